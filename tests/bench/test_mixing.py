"""The benchmark of butterfly mixing: what it compares, and what it says."""

from typing import Any

import pytest

from convoy.bench import mixing
from convoy.bench.hybrid import Case, Measured
from convoy.config import Config
from convoy.launch.links import Links


def test_both_ways_are_trained_and_timed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def train(config: Config, *, mixing: bool) -> float:
        asked.append((config.data, config.seed, mixing))
        return 87.0 if mixing else 87.5

    def measure(case: Case, steps: int, **options: object) -> Measured:
        asked.append((case.link, steps, options["mixing"]))
        return Measured(3.0 if options["mixing"] else 2.0, 1e6)

    monkeypatch.setattr(mixing, "_train", train)
    monkeypatch.setattr(mixing, "measure_ours", measure)
    monkeypatch.setattr(Links, "available", lambda: None)
    report = mixing.bench_mixing(quick=True, tell=print)
    assert asked == [
        ("fashion-mini", 0, False),
        ("fashion-mini", 0, True),
        (True, 4, False),
        (True, 4, True),
    ]
    lost, faster = report.bars
    assert lost.value == pytest.approx(0.5)
    assert lost.is_met
    assert faster.value == pytest.approx(1.5)
    assert [row.median for row in report.rows] == [87.5, 87.0, 2.0, 3.0]
