"""DC-ASGD: a stale gradient is corrected towards the place where it is applied.

    g = -D_j / rate_j
    W <- W - (rate_j / m) (g + lambda g g (W - W_base))         elementwise

g g stands in for the curvature. It is meant for few local steps: over many, g is no gradient.
"""

from collections.abc import Sequence

from convoy.outer.rules.rule import AtOnce, Merged, Submission, Weights, World


class DcAsgd(AtOnce):
    """Applies each increment as a gradient with a correction for what has changed since.

    Args:
        strength: lambda, how far the correction is trusted.
    """

    needs_base = True

    def __init__(self, strength: float = 0.04) -> None:
        self._strength = strength

    def merge(
        self, world: World[Weights], pending: Sequence[Submission[Weights]]
    ) -> Merged[Weights]:
        """Correct and apply."""
        (submission,) = pending
        gradient = submission.increment * (-1 / submission.rate)
        moved = world.weights - world.outstanding[submission.base]
        corrected = gradient + gradient * gradient * moved * self._strength
        return Merged(world.weights - corrected * (submission.rate / max(1, len(world.bases))))
