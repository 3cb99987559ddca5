"""Several runs beside each other: which was better, which was faster, and what was different.

Pure: from what was read of the runs to rows of plain values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from convoy.monitor.reports.curve import Curve, number


@dataclass(frozen=True)
class Entry:
    """What is known of one run of a comparison.

    Attributes:
        name: no other run of the comparison has it.
        snapshot: of its view, see docs/monitor.md.
        summary: how it ended; empty while it has not.
        config: its effective configuration.
    """

    name: str
    snapshot: Mapping[str, Any]
    summary: Mapping[str, Any]
    config: Mapping[str, Any]

    def test(self, column: str) -> list[Any]:
        """Return a column of what its tests gave."""
        return list(self.snapshot["series"]["test"]["columns"][column])


@dataclass(frozen=True)
class Row:
    """A line of the table; None: not known.

    Attributes:
        seconds: from the start to the last sign of life, time between an end and a resume left out.
        seconds_to_common: until a test first reached the accuracy that all runs reach.
        samples_per_s: over the run, or, while it has not ended, the last measured.
        idle: part of the nodes' time that they spent waiting (0..1).
    """

    run: str
    state: str
    model: str | None
    strategy: str | None
    nodes: int
    best_accuracy: float | None
    last_accuracy: float | None
    seconds: float
    seconds_to_common: float | None
    samples_per_s: float | None
    idle: float | None
    faults: int


@dataclass(frozen=True)
class Comparison:
    """Several runs beside each other.

    Attributes:
        rows: one for each run, in the order they were given.
        common_accuracy: the highest that all runs reach; None where one was not tested yet.
        differences: what their configurations differ in: for each key, each run's value.
    """

    rows: tuple[Row, ...]
    common_accuracy: float | None
    differences: dict[str, dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "runs": [asdict(row) for row in self.rows],
            "common_accuracy": self.common_accuracy,
            "differences": self.differences,
        }


def compare(entries: Sequence[Entry]) -> Comparison:
    """Set runs beside each other."""
    common = common_accuracy(entries)
    return Comparison(
        rows=tuple(_row(entry, common) for entry in entries),
        common_accuracy=common,
        differences=differences(entries),
    )


def common_accuracy(entries: Sequence[Entry]) -> float | None:
    """Return the lowest of the best test accuracies: all runs reach it, and one no more."""
    reached = [_numbers(entry.test("test_accuracy")) for entry in entries]
    return min(max(numbers) for numbers in reached) if reached and all(reached) else None


def seconds_to(entry: Entry, accuracy: float) -> float | None:
    """Return when a test first showed an accuracy, in seconds since the start."""
    tests = zip(entry.test("time"), entry.test("test_accuracy"), strict=True)
    for when, found in tests:
        if number(found) is not None and found >= accuracy:
            return number(when)
    return None


def differences(entries: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    """Return what configurations differ in; a key that one does not have is None there."""
    keys = dict.fromkeys(key for entry in entries for key in entry.config)
    found = {key: {entry.name: entry.config.get(key) for entry in entries} for key in keys}
    return {
        key: values
        for key, values in found.items()
        if any(value != values[entries[0].name] for value in values.values())
    }


def evaluation_curves(entries: Sequence[Entry], column: str, factor: float = 1.0) -> list[Curve]:
    """Return what the runs' tests gave over time, to be drawn over each other."""
    curves = []
    for look, entry in enumerate(entries):
        cells = map(number, entry.test(column))
        values = [None if cell is None else factor * cell for cell in cells]
        curves.append(Curve(entry.name, entry.test("time"), values, look))
    return curves


def tell_apart(paths: Sequence[Path]) -> list[str]:
    """Return a name for each folder: its own, with as many of those above it as it takes.

    >>> tell_apart([Path("/a/x/run"), Path("/a/y/run"), Path("/a/y/other")])
    ['x/run', 'y/run', 'other']
    """
    names = []
    for path in paths:
        others = [other.parts for other in paths if other != path]
        length = 1
        while any(parts[-length:] == path.parts[-length:] for parts in others):
            length += 1
        names.append(str(Path(*path.parts[-length:])))
    return names


def _row(entry: Entry, common: float | None) -> Row:
    run, progress = entry.snapshot["run"], entry.snapshot["progress"]
    speed = number(entry.summary.get("samples_per_s")) if run["ended"] else None
    return Row(
        run=entry.name,
        state=str(run["state"]),
        model=run["model"],
        strategy=run["strategy"],
        nodes=len(entry.snapshot["nodes"]),
        best_accuracy=number(progress["best_test_accuracy"]),
        last_accuracy=number(progress["test_accuracy"]),
        seconds=run["elapsed_s"],
        seconds_to_common=None if common is None else seconds_to(entry, common),
        samples_per_s=number(progress["samples_per_s"]) if speed is None else speed,
        idle=_idle(entry.snapshot["nodes"]),
        faults=entry.snapshot["counts"]["faults"],
    )


def _idle(nodes: Sequence[Mapping[str, Any]]) -> float | None:
    waiting = sum(_numbers([node["waiting_s"] for node in nodes]))
    total = waiting + sum(_numbers([node["busy_s"] for node in nodes]))
    return round(waiting / total, 4) if total else None


def _numbers(cells: Sequence[Any]) -> list[float]:
    return [cell for cell in map(number, cells) if cell is not None]
