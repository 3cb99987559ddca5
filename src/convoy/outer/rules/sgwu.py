"""SGWU, and the means it is compared with: all nodes hand in, then one average for all.

sgwu    W = sum_j Q_j W_j / sum_j Q_j       by accuracy (BPT-CNN, as reconstructed)
mean    W = sum_j W_j / m
fedavg  W = sum_j n_j W_j / sum_j n_j       by samples
"""

from collections.abc import Callable, Sequence
from typing import Any

from convoy.outer.rules.rule import Merged, Submission, Together, Weights, World, weighted_mean


class Mean(Together):
    """The mean of the nodes' weights, each with a weight of its own.

    Args:
        part: what a submission counts.
    """

    def __init__(self, part: Callable[[Submission[Any]], float]) -> None:
        self._part = part

    def merge(
        self, world: World[Weights], pending: Sequence[Submission[Weights]]
    ) -> Merged[Weights]:
        """Return the mean; a node without samples does not count."""
        counted = [s for s in pending if s.samples > 0]
        if not counted:
            return Merged(world.weights)
        return Merged(weighted_mean(world, counted, [self._part(s) for s in counted]))


def sgwu() -> Mean:
    """Weigh by accuracy."""
    return Mean(lambda submission: submission.quality)


def plain_mean() -> Mean:
    """Weigh all alike."""
    return Mean(lambda submission: 1.0)


def fedavg() -> Mean:
    """Weigh by samples."""
    return Mean(lambda submission: float(submission.samples))


def samples_and_quality() -> Mean:
    """Weigh by samples times accuracy: a control."""
    return Mean(lambda submission: submission.samples * submission.quality)
