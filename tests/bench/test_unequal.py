"""Lockstep beside others on unequal nodes: who is measured, and what is made of it."""

import pytest

from convoy.bench import unequal
from convoy.bench.peers import Task
from convoy.bench.unequal import SPEEDS, TASK, bench_unequal

_SPEEDS = {"torchft": 40.0, "ddp": 50.0, "ddp-oracle": 98.0, "alone": 100.0}


class _Lab:
    def __init__(self, speeds: tuple[float, ...]) -> None:
        assert speeds == SPEEDS

    def __enter__(self) -> "_Lab":
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _machine_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each system have its speed; torch.compile makes networks a tenth faster."""

    def crew(system: str, task: Task, lab: _Lab, *, warm_s: float, seconds: float) -> float:
        assert isinstance(lab, _Lab)
        assert 0 < warm_s < seconds
        return _SPEEDS[system] * (1.1 if task.compiled else 1.0)

    monkeypatch.setattr(unequal, "Lab", _Lab)
    monkeypatch.setattr(unequal, "measure_crew", crew)
    monkeypatch.setattr(unequal, "available", lambda name: "none" if name == "hivemind" else None)
    monkeypatch.setattr(unequal, "has_own_convolutions", lambda: True)
    monkeypatch.setattr(unequal, "record_lockstep", lambda task, speeds, steps, executor: executor)
    ours = {"eager": 99.0, "tasks": 135.0}
    monkeypatch.setattr(unequal, "speed_between", lambda record, first, last: ours[record])


def test_everybody_is_measured_and_ours_is_compared_with_each_at_its_best() -> None:
    told: list[str] = []
    report = bench_unequal(quick=False, tell=told.append)
    assert {row.system: row.values for row in report.rows} == {
        "torchft DDP": (40.0,) * 5,
        "DDP, equal shares, torch.compile": pytest.approx((55.0,) * 5),
        "DDP, shares by hand, torch.compile": pytest.approx((107.8,) * 5),
        "DDP, equal shares": (50.0,) * 5,
        "DDP, shares by hand": (98.0,) * 5,
        "nodes alone, summed": (100.0,) * 5,
        "convoy lockstep": (99.0,) * 5,
        "convoy lockstep, tasks": (135.0,) * 5,
    }
    assert {row.task for row in report.rows} == {f"resnet20, batch {TASK.batch}"}
    assert {bar.name: (round(bar.value, 3), bar.at_least) for bar in report.bars} == {
        "lockstep / nodes alone, summed": (0.99, 0.93),
        "lockstep / DDP, equal shares": (1.98, 2.0),
        "lockstep / DDP, shares by hand": (1.01, 0.97),
        "lockstep, tasks / eager": (1.364, 1.0),
        "lockstep, tasks / DDP, equal shares, eager or compiled": (2.455, 2.0),
        "lockstep, tasks / DDP, shares by hand, eager or compiled": (1.252, 0.97),
    }
    assert not report.bars[1].is_met
    assert told[0] == "hivemind is left out: none"


def test_a_quick_answer_leaves_out_what_takes_long() -> None:
    report = bench_unequal(quick=True, tell=lambda _: None)
    assert [row.system for row in report.rows] == [
        "DDP, equal shares",
        "DDP, shares by hand",
        "nodes alone, summed",
        "convoy lockstep",
        "convoy lockstep, tasks",
    ]
    assert all(len(row.values) == 1 for row in report.rows)
    assert len(report.bars) == 4


def test_without_convolutions_of_our_own_kernels_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unequal, "has_own_convolutions", lambda: False)
    report = bench_unequal(quick=False, tell=lambda _: None)
    assert not any("tasks" in row.system for row in report.rows)
    assert [bar.at_least for bar in report.bars] == [0.93, 2.0, 0.97]
