"""A curve over time, and what makes it different from the others, with colours and without."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# By Okabe and Ito, for all eyes; their yellow is left out, which nobody sees on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
# Lengths of strokes and gaps, in widths of the line; () is a line without gaps.
DASHES: tuple[tuple[float, ...], ...] = ((), (5, 1.5), (1, 1.2), (6, 1.5, 1, 1.5), (3, 1, 1, 1))

_TOO_LARGE = 1e100  # for a measurement, and for arithmetic with it
_UNITS = ((180.0, 1.0, "s"), (3 * 3600.0, 60.0, "min"), (math.inf, 3600.0, "h"))


@dataclass(frozen=True)
class Curve:
    """Values over time, both in columns of equal length.

    Attributes:
        times: in seconds.
        look: which colour, marker and dashes it has; they go round at different places, so that
            hundreds of curves are all different.
    """

    label: str
    times: Sequence[object]
    values: Sequence[object]
    look: int

    def points(self) -> list[tuple[float, float]]:
        """Return time and value of each place; not a number where there is a gap."""
        pairs = zip(self.times, self.values, strict=True)
        found = [(number(time), number(value)) for time, value in pairs]
        return [(math.nan if t is None else t, math.nan if v is None else v) for t, v in found]

    @property
    def colour(self) -> str:
        """Return its colour."""
        return COLOURS[self.look % len(COLOURS)]

    @property
    def marker(self) -> str:
        """Return its marker, as matplotlib names it."""
        return MARKERS[self.look % len(MARKERS)]

    @property
    def dashes(self) -> tuple[float, ...]:
        """Return its dashes."""
        return DASHES[self.look % len(DASHES)]


def number(cell: object) -> float | None:
    """Return a cell that is a number, else None: files that anyone may edit hold others too."""
    if isinstance(cell, bool) or not isinstance(cell, int | float):
        return None
    return cell if abs(cell) < _TOO_LARGE else None


def time_unit(curves: Sequence[Curve]) -> tuple[float, str]:
    """Return the unit that suits curves: how many seconds it has, and its sign."""
    longest = max((number(time) or 0.0 for curve in curves for time in curve.times), default=0.0)
    return next((length, sign) for limit, length, sign in _UNITS if longest <= limit)


def short(name: object, letters: int = 28) -> str:
    """Return a name that fits a legend: on one line, and without the middle of a very long one.

    >>> short("20261116-101500-lenet5-fashion-mini-2")
    '20261116-10150…ashion-mini-2'
    """
    text = " ".join(str(name).encode("utf-8", "replace").decode().split())
    half = letters // 2
    return text if len(text) <= letters else f"{text[:half]}…{text[half + 1 - letters :]}"
