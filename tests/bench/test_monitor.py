"""The benchmark of being watched: every way trains, and the page is really open."""

from pathlib import Path

import pytest

from convoy.bench import monitor
from convoy.bench.monitor import ALONE, WATCHED, WRITTEN, bench_monitor


def test_all_ways_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[Path] = []
    readers = monitor._readers

    def counted(folder: Path) -> object:
        watched.append(folder)
        return readers(folder)

    monkeypatch.setattr(monitor, "_readers", counted)
    monkeypatch.setattr(monitor, "_SAMPLES", 128)
    told: list[str] = []
    report = bench_monitor(quick=True, tell=told.append)
    assert [row.system for row in report.rows[:3]] == [ALONE, WRITTEN, WATCHED]
    assert all(min(row.values) > 0 for row in report.rows)
    assert len(watched) == len(told) == 3
    cost = report.bars[-1]
    assert cost.is_met, "an interval's events take more than 1 % of it"
