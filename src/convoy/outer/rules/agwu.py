"""AGWU: every increment at once, less of it the older its base (BPT-CNN, as reconstructed).

    gamma_j = exp(k_j / i) / sum over live nodes of exp(k / i)        i: the current version
    W <- W + gamma_j Q_j D_j

The exponent is a staleness relative to all updates so far, so that it fades out: after ten
thousand updates all nodes weigh 1/m. `scale="nodes"` divides by their number instead.
"""

import math
from collections.abc import Sequence
from typing import Literal

from convoy.outer.rules.rule import AtOnce, Merged, Submission, Weights, World

Scale = Literal["version", "nodes"]
Quality = Literal["raw", "relative", "off"]


class Agwu(AtOnce):
    """The published rule, with switches for what its formula leaves open.

    Args:
        scale: what staleness is divided by: the current version, the number of nodes, or this.
        quality: the accuracy factor as it is, relative to the other nodes' mean, or none.
    """

    def __init__(self, scale: Scale | float = "version", quality: Quality = "raw") -> None:
        self._scale = scale
        self._quality = quality

    def merge(
        self, world: World[Weights], pending: Sequence[Submission[Weights]]
    ) -> Merged[Weights]:
        """Add what is left of the increment after attenuation."""
        (submission,) = pending
        bases = {**world.bases, submission.node: submission.base}
        factor = attenuation(submission.node, bases, self._divisor(world))
        part = factor * self._worth(world, submission)
        return Merged(world.add(world.weights, submission.increment, part))

    def _divisor(self, world: World[Weights]) -> float:
        if isinstance(self._scale, float):
            return self._scale
        return float(world.version if self._scale == "version" else max(1, len(world.bases)))

    def _worth(self, world: World[Weights], submission: Submission[Weights]) -> float:
        if self._quality == "off":
            return 1.0
        if self._quality == "raw":
            return submission.quality
        latest = {**world.qualities, submission.node: submission.quality}
        mean = sum(latest.values()) / len(latest)
        return submission.quality / mean if mean > 0 else 1.0


def attenuation(node: int, bases: "dict[int, int]", divisor: float) -> float:
    """Return a node's part in a softmax over the versions that all nodes train from.

    >>> round(attenuation(1, {0: 2, 1: 1, 2: 1}, 2), 6)
    0.274069
    """
    # Only differences count, and with them nothing overflows. Without a version yet, all are equal.
    newest = max(bases.values())
    parts = {n: math.exp((k - newest) / divisor) if divisor else 1.0 for n, k in bases.items()}
    return parts[node] / sum(parts.values())
