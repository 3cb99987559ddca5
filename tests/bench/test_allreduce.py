"""The benchmark of sums: all ways add up what they are given, and the bars compare with gloo."""

import pytest

from convoy.bench import allreduce
from convoy.bench.allreduce import GLOO, METHODS, OURS, Plan, bars, rows
from convoy.bench.peers import ddp
from convoy.bench.peers.crew import Crew


def test_all_ways_are_timed_and_checked() -> None:
    plan = Plan(repeats=2, others=1, calls=2)
    with (
        ddp.open_store() as address,
        Crew(allreduce._be_rank, [(rank, 3, address) for rank in range(3)]) as crew,
    ):
        short = allreduce._measure(crew, 3, 4096, plan)
        values = short | allreduce._measure(crew, 3, 1 << 20, plan)
        crew.send(None)
    for size in (4096, 1 << 20):
        assert len(values[3, size, OURS]) == len(values[3, size, GLOO]) == 2
        assert all(len(values[3, size, method]) == 1 for method in METHODS)
    assert all(0 < ms < 10_000 for found in values.values() for ms in found)
    assert {row.task for row in rows(values)} == {"3 ranks, 4 KB", "3 ranks, 1 MB"}


def test_the_bars_are_the_worst_and_the_best_size() -> None:
    values: allreduce._Values = {
        (2, 4096, OURS): (1.0, 1.0),
        (2, 4096, GLOO): (4.0, 4.0),
        (2, 1 << 20, OURS): (11.0, 11.0),
        (2, 1 << 20, GLOO): (10.0, 10.0),
    }
    worst, best = bars(values)
    assert (worst.value, best.value) == pytest.approx((1.1, 4.0))
    assert "1 MB" in worst.name
    assert "4 KB" in best.name
    assert not worst.is_met
    assert best.is_met


def test_sizes_go_from_4_kb_to_64_mb() -> None:
    assert [allreduce.label(size) for size in allreduce.SIZES] == [
        *("4 KB", "16 KB", "64 KB", "256 KB"),
        *("1 MB", "4 MB", "16 MB", "64 MB"),
    ]
