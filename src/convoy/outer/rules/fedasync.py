"""FedAsync: the global weights move towards the node's own, W <- (1 - a) W + a W_j.

The part a shrinks with staleness. It cannot overshoot, but an old submission pulls back.
"""

from collections.abc import Sequence

from convoy.outer.rules.discount import Discount, polynomial
from convoy.outer.rules.rule import AtOnce, Merged, Submission, Weights, World


class FedAsync(AtOnce):
    """Mixes each node's weights into the global ones.

    Args:
        part: of a fresh submission.
    """

    needs_base = True

    def __init__(self, part: float = 0.6, discount: Discount | None = None) -> None:
        self._part = part
        self._discount = discount or polynomial()

    def merge(
        self, world: World[Weights], pending: Sequence[Submission[Weights]]
    ) -> Merged[Weights]:
        """Mix."""
        (submission,) = pending
        part = self._part * self._discount(world.staleness(submission))
        local = world.outstanding[submission.base] + submission.increment
        return Merged(world.weights * (1 - part) + local * part)
