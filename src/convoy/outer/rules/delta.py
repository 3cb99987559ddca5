"""Increments with an explicit rate and an explicit discount: AGWU's message, its faults mended.

delta-poly  W <- W + (rate / m) (1 + s)^-a D_j          at once
fedbuff     W <- W + rate (1 / K) sum_K (1 + s)^-a D_j  once K have come in
"""

from collections.abc import Sequence
from typing import Any

from convoy.outer.rules.discount import Discount, polynomial
from convoy.outer.rules.rule import AtOnce, Merged, Submission, Weights, World


class Delta(AtOnce):
    """Every increment at once, divided by the number of nodes and discounted for its age."""

    def __init__(self, discount: Discount | None = None, rate: float = 1.0) -> None:
        self._discount = discount or polynomial()
        self._rate = rate

    def merge(
        self, world: World[Weights], pending: Sequence[Submission[Weights]]
    ) -> Merged[Weights]:
        """Add what is left of the increment."""
        (submission,) = pending
        worth = self._discount(world.staleness(submission))
        part = self._rate * worth / max(1, len(world.bases))
        return Merged(world.add(world.weights, submission.increment, part))


class FedBuff:
    """Increments are collected, whoever they come from, and added together.

    Args:
        size: how many make a version.
    """

    has_barrier = False
    has_window = False
    needs_base = False

    def __init__(self, size: int, discount: Discount | None = None, rate: float = 1.0) -> None:
        self._size = size
        self._discount = discount or polynomial()
        self._rate = rate

    def is_complete(self, pending: Sequence[Submission[Any]], live: Sequence[int]) -> bool:
        """Tell whether the buffer is full."""
        del live
        return len(pending) >= self._size

    def merge(
        self, world: World[Weights], pending: Sequence[Submission[Weights]]
    ) -> Merged[Weights]:
        """Add the mean of the discounted increments."""
        weights = world.weights
        for submission in pending:
            worth = self._discount(world.staleness(submission))
            part = self._rate * worth / len(pending)
            weights = world.add(weights, submission.increment, part)
        return Merged(weights)
