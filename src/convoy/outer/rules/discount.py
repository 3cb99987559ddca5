"""How much a submission is worth that missed some versions."""

import math
from collections.abc import Callable

Discount = Callable[[int], float]


def polynomial(power: float = 0.5) -> Discount:
    """Return (1 + staleness) ** -power.

    >>> polynomial(0.5)(3)
    0.5
    """
    return lambda staleness: float((1 + staleness) ** -power)


def inverse() -> Discount:
    """Return 1 / max(1, staleness): staleness-aware SGD.

    >>> [inverse()(s) for s in (0, 1, 4)]
    [1.0, 1.0, 0.25]
    """
    return lambda staleness: 1 / max(1, staleness)


def hinge(slope: float = 10.0, free: int = 4) -> Discount:
    """Return 1 up to some staleness, and then a quotient.

    >>> [hinge(0.5, 2)(s) for s in (0, 2, 4)]
    [1.0, 1.0, 0.5]
    """
    return lambda staleness: 1.0 if staleness <= free else 1 / (slope * (staleness - free) + 1)


def exponential(rate: float = 0.1) -> Discount:
    """Return exp(-rate * staleness)."""
    return lambda staleness: math.exp(-rate * staleness)
