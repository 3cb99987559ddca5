"""What a benchmark says: every system measured, and the ratios it exists for."""

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from convoy.machine import machine, versions


@dataclass(frozen=True, slots=True)
class Row:
    """One system on one task, measured several times.

    Attributes:
        task: what was done.
        system: who did it.
        unit: of the values.
        values: one per repeat.
        x: where it stands on a curve, if its task is one: the report says of what.
    """

    task: str
    system: str
    unit: str
    values: tuple[float, ...]
    x: float | None = None

    @property
    def median(self) -> float:
        """Return the middle value."""
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """Return the distance from the lowest to the highest value, as a part of the median."""
        distance = max(self.values) - min(self.values)
        return distance / self.median if distance else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "task": self.task,
            "system": self.system,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "values": list(self.values),
            **({} if self.x is None else {"x": self.x}),
        }


@dataclass(frozen=True, slots=True)
class Bar:
    """A ratio that the benchmark exists for, and what it must reach."""

    name: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def is_met(self) -> bool:
        """Tell whether the value is within its bounds."""
        low = self.at_least is None or self.value >= self.at_least
        high = self.at_most is None or self.value <= self.at_most
        return low and high

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        bounds = {"at_least": self.at_least, "at_most": self.at_most}
        given = {key: bound for key, bound in bounds.items() if bound is not None}
        return {"name": self.name, "value": self.value, **given, "met": self.is_met}


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a benchmark.

    Attributes:
        x_name: what the rows of a curve differ in.
    """

    bench: str
    repeats: int
    rows: tuple[Row, ...]
    bars: tuple[Bar, ...]
    x_name: str = "threads"

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "bench": self.bench,
            "machine": machine(),
            "versions": versions(),
            "repeats": self.repeats,
            "rows": [row.as_dict() for row in self.rows],
            "bars": [bar.as_dict() for bar in self.bars],
        }


Contenders = dict[str, Callable[[], float]]


def interleave(
    make: Callable[[ExitStack], Contenders],
    *,
    repeats: int,
    slices: int,
    tell: Callable[[str], None],
    alternate: bool = False,
    warm_up: bool = True,
) -> dict[str, tuple[float, ...]]:
    """Measure the speed of several systems in turn, so that a noisy moment strikes them alike.

    Args:
        make: sets the contenders up, anew for each round, because where tensors happen to lie
            in memory is worth some per cent. Each contender does a short slice of work, the
            same amount every time, and returns its speed. The stack cleans up after them.
        repeats: how many rounds there are; each gives every contender one value.
        slices: how many slices a round is made of, after one to warm up. The contenders take
            turns in a fixed order: whoever ran twice in a row would find its own data cached.
        tell: shows progress.
        alternate: let the order change direction each time; for contenders that share their data.
        warm_up: give everybody the slice to warm up; those that start anew each time need none.
    """
    values: dict[str, tuple[float, ...]] = {}
    for number in range(repeats):
        with ExitStack() as stack:
            contenders = make(stack)
            speeds = [
                {name: contenders[name]() for name in _order(contenders, alternate and turn % 2)}
                for turn in range(slices + warm_up)
            ]
        for name in contenders:
            speed = statistics.harmonic_mean([part[name] for part in speeds[-slices:]])
            values[name] = (*values.get(name, ()), speed)
        shown = ", ".join(f"{name} {found[-1]:,.0f}" for name, found in values.items())
        tell(f"round {number + 1} of {repeats}: {shown}")
    return values


def _order(contenders: Contenders, backwards: int | bool) -> list[str]:
    return list(reversed(contenders)) if backwards else list(contenders)


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios round by round: what drifts in both cancels out."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
