"""The benchmark of pipelines, with the times taken out."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from convoy.bench import ours, pipeline
from convoy.bench.peers import Task
from convoy.bench.peers.pipelining import PipelineTask
from convoy.bench.pipeline import Setup, bench_pipeline, best_of_each, equal_bars, unequal_bar
from convoy.config import Config
from convoy.errors import EnvironmentProblem
from convoy.monitor.events import NodesEvent

TASK = PipelineTask("resnet56", (3, 32, 32), 10, 128, (64, 64), micro=2, bounds=(0, 13, 29))


@pytest.fixture(autouse=True)
def _threads_stay() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class _Lab:
    """Holds nobody to anything."""

    def __init__(self, speeds: Sequence[float]) -> None:
        self.speeds = tuple(speeds)

    def __enter__(self) -> "_Lab":
        return self

    def __exit__(self, *error: object) -> None:
        pass


class _Measured:
    """Says what each system would give on a machine without noise: one core does 100 samples/s."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Task, float]] = []
        self.compiling_is_worth = 0.9
        self.best_cut = 20

    def crew(
        self, system: str, task: Task, slots: object, *, warm_s: float, seconds: float
    ) -> float:
        self.calls.append((system, task, seconds))
        layout = 1.0 if task.memory_format == "contiguous" else 0.8
        layout *= self.compiling_is_worth if task.compiled else 1.0
        cores = sum(slots.speeds) if isinstance(slots, _Lab) else task.num_nodes
        if isinstance(task, PipelineTask):
            micro = {"gpipe": 8, "1f1b": 4}[system]
            balance = 1.0 if task.bounds[1] == self.best_cut else 0.8
            return 75.0 * cores * layout * balance * (1.0 if task.micro == micro else 0.9)
        return 100.0 * cores * layout

    def ours(
        self,
        model: str,
        held: tuple[float, ...],
        steps: int,
        tell: object,
        recipe: str = "convoy",
        executor: str = "eager",
    ) -> float:
        self.calls.append(("ours", TASK, steps * 128 / (100.0 * sum(held))))
        each = 95.0 if recipe == "convoy" else 98.0
        each = 141.0 if executor == "tasks" else each
        return each * sum(held)


def _cut(task: Task, micro: int, speeds: Sequence[float], budget_s: float) -> PipelineTask:
    del budget_s
    bounds = (0, *range(20, 20 + len(speeds) - 1), 29)
    given = {name: getattr(task, name) for name in Task.__dataclass_fields__}
    return PipelineTask(**given, micro=micro, bounds=bounds)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> _Measured:
    """Take the clock out of the benchmark, and give the machine four cores."""
    measured = _Measured()
    monkeypatch.setattr(pipeline, "measure_crew", measured.crew)
    monkeypatch.setattr(pipeline, "_ours", measured.ours)
    monkeypatch.setattr(pipeline, "_one_as_tasks", lambda model, steps: 150.0)
    monkeypatch.setattr(pipeline, "has_own_convolutions", lambda: True)
    monkeypatch.setattr(pipeline, "cut_for", _cut)
    monkeypatch.setattr(pipeline, "Lab", _Lab)
    monkeypatch.setattr(pipeline, "usable_cores", lambda: 4)
    monkeypatch.setattr(pipeline, "choose_cores", lambda count: [0] * count)
    return measured


def test_a_full_report_has_every_contender_at_its_best(measured: _Measured) -> None:
    told: list[str] = []
    report = bench_pipeline(quick=False, tell=told.append)
    medians = {(row.task, row.system): row.median for row in report.rows}

    def of(asked: str) -> dict[str, float]:
        return {system: value for (task, system), value in medians.items() if task == asked}

    assert of("resnet110, 2 stages, batch 128") == {
        "torch GPipe, 8 micro-batches, eager": 150.0,
        "torch 1F1B, 4 micro-batches, eager": 150.0,
        "plain training on one core, contiguous, eager": 100.0,
        "convoy, pipeline": 190.0,
        "one process for each core, summed: the limit": 200.0,
        "convoy, plain training on one core, tasks": 150.0,
        "convoy, pipeline, tasks": 282.0,
    }
    unequal = "resnet56, stages of 1 and 0.5"
    assert medians[unequal, "nodes alone, summed"] == 150.0
    assert medians[unequal, "convoy, pipeline"] == 142.5
    assert all(len(row.values) == report.repeats for row in report.rows)
    assert any("channels_last, eager 80" in line for line in told)
    assert of("resnet56, 4 stages, batch 128") == {
        "plain training on one core, contiguous, eager": 100.0,
        "convoy, pipeline": 380.0,
        "convoy, pipeline, convoy:order=stale": 392.0,
        "one process for each core, summed: the limit": 400.0,
        "convoy, plain training on one core, tasks": 150.0,
        "convoy, pipeline, tasks": 564.0,
    }


@pytest.mark.parametrize("compiling_is_worth", [0.9, 1.25])
@pytest.mark.parametrize("best_cut", [19, 21])
def test_peers_are_cut_where_they_are_fastest(
    measured: _Measured, best_cut: int, compiling_is_worth: float
) -> None:
    measured.best_cut, measured.compiling_is_worth = best_cut, compiling_is_worth
    report = bench_pipeline(quick=False, tell=lambda _: None, only=["resnet110, 2 stages"])
    medians = {row.system: row.median for row in report.rows}
    fastest = max(value for system, value in medians.items() if system.startswith("torch"))
    assert fastest == pytest.approx(150.0 * max(1.0, compiling_is_worth))


def test_peers_and_the_limit_compile_where_that_is_faster(measured: _Measured) -> None:
    measured.compiling_is_worth = 1.25
    report = bench_pipeline(quick=False, tell=lambda _: None)
    medians = {(row.task, row.system): row.median for row in report.rows}
    task = "resnet56, 2 stages, batch 128"
    assert medians[task, "plain training on one core, contiguous, torch.compile"] == 125.0
    assert medians[task, "one process for each core, summed: the limit"] == 250.0
    assert medians[task, "torch GPipe, 8 micro-batches, torch.compile"] == 187.5
    unequal = "resnet56, stages of 1 and 0.5"
    assert (unequal, "torch GPipe, 8 micro-batches, torch.compile, told the speeds") in medians
    tried = [task for _, task, _ in measured.calls if isinstance(task, PipelineTask)]
    assert {(task.micro, task.compiled) for task in tried if task.compiled} == {
        (8, True),
        (4, True),
    }


def test_the_bars_are_those_of_the_issue(measured: _Measured) -> None:
    bars = {bar.name: bar for bar in bench_pipeline(quick=False, tell=lambda _: None).bars}
    found = {name: (round(bar.value, 3), bar.at_least) for name, bar in bars.items()}
    assert found == {
        **{
            f"{model}, 2 stages, batch 128: convoy / {peer}": values
            for model in ("resnet56", "resnet110")
            for peer, values in [
                ("one core", (1.9, 1.85)),
                ("torch's better schedule", (1.267, 1.15)),
            ]
        },
        **{
            f"{model}, 4 stages, batch 128: convoy / one core": (3.8, 3.4)
            for model in ("resnet56", "resnet110")
        },
        **{
            f"{model}, {stages} stages, batch 128: convoy, tasks / {one}": (value, bound)
            for model in ("resnet56", "resnet110")
            for stages, one, value, bound in [
                (2, "one core, tasks", 1.88, 1.85),
                (2, "one core", 2.82, 1.85),
                (2, "torch's better schedule", 1.88, 1.15),
                (4, "one core, tasks", 3.76, 3.4),
                (4, "one core", 5.64, 3.4),
            ]
        },
        "resnet56, stages of 1 and 0.5: convoy / the sum of the nodes": (0.95, 0.9),
    }


def test_fewer_micro_batches_than_stages_are_not_tried(
    measured: _Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    setups = tuple(Setup("resnet56", stages, 1.0, over_torch=1.0) for stages in (2, 4))
    monkeypatch.setattr(pipeline, "FULL", replace(pipeline.FULL, setups=setups))
    bench_pipeline(quick=False, tell=lambda _: None)
    cut = [task for _, task, _ in measured.calls if isinstance(task, PipelineTask)]
    tried = {(task.num_nodes, task.micro) for task in cut}
    assert tried == {*((2, micro) for micro in (2, 4, 8, 16)), *((4, m) for m in (4, 8, 16))}


def test_a_quick_answer_takes_a_small_network_and_one_round(measured: _Measured) -> None:
    report = bench_pipeline(quick=True, tell=lambda _: None)
    assert {row.task for row in report.rows} == {"resnet20, 2 stages, batch 128"}
    assert len(report.bars) == 2
    # 15 s are what starts, first steps and ours may take beyond it.
    assert sum(seconds for _, _, seconds in measured.calls) < 35


def test_two_cores_have_no_four_stages(
    measured: _Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "usable_cores", lambda: 2)
    report = bench_pipeline(quick=False, tell=lambda _: None)
    assert not any("4 stages" in row.task for row in report.rows)


def test_one_core_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "usable_cores", lambda: 1)
    with pytest.raises(EnvironmentProblem, match="cores of their own"):
        bench_pipeline(quick=True, tell=lambda _: None)


def test_each_schedule_is_taken_at_its_best_and_the_faster_first() -> None:
    four = replace(TASK, micro=4)
    tried = {("gpipe", TASK): 3.0, ("gpipe", four): 1.0, ("1f1b", TASK): 2.0, ("1f1b", four): 4.0}
    assert list(best_of_each(tried).items()) == [("1f1b", four), ("gpipe", TASK)]


def test_ours_is_compared_with_whichever_schedule_is_faster_in_a_round() -> None:
    values = {
        "one core": [100.0, 100.0, 200.0],
        "gpipe": [150.0, 100.0, 100.0],
        "1f1b": [100.0, 150.0, 300.0],
        "convoy": [180.0, 180.0, 360.0],
        "limit": [200.0, 200.0, 400.0],
    }
    one, torchs = equal_bars(Setup("resnet56", 2, 1.85, 1.15), values)
    assert (one.value, one.is_met) == (1.8, False)
    assert (torchs.value, torchs.is_met) == (1.2, True)
    assert [bar.name for bar in equal_bars(Setup("resnet56", 4, 3.4), values)] == [
        "resnet56, 4 stages, batch 128: convoy / one core"
    ]
    assert unequal_bar("x", values).value == 0.9


def test_ours_is_counted_while_the_stages_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def record(task: Task, stages: int, speeds: Sequence[float], steps: int, executor: str) -> str:
        asked.update(batch=task.batch, stages=stages, speeds=speeds, steps=steps)
        asked.update(executor=executor)
        return "what it told"

    def between(recording: object, first: int, last: int) -> float:
        asked.update(recording=recording, first=first, last=last)
        return 7.0

    monkeypatch.setattr(pipeline, "record_pipeline", record)

    def busy(recording: object, first: int, last: int) -> list[tuple[float, float]]:
        asked["between"] = (recording, first, last)
        return [(0.25, 0.0), (0.2, 0.05)]

    told: list[str] = []
    monkeypatch.setattr(pipeline, "speed_between", between)
    monkeypatch.setattr(pipeline, "busy_between", busy)
    assert pipeline._ours("resnet110", (1.0, 0.5), 6, told.append) == 7.0
    assert told[0].endswith("0.250 + 0.000, 0.200 + 0.050")
    assert asked["between"] == (asked["recording"], asked["first"], asked["last"])
    assert (asked["batch"], asked["stages"], asked["speeds"]) == (128, 2, (1.0, 0.5))
    assert (asked["recording"], asked["executor"]) == ("what it told", "eager")
    assert 0 < asked["first"] < asked["last"] < asked["steps"]
    assert asked["last"] - asked["first"] == 6


def test_where_tasks_have_no_convolutions_of_their_own_they_are_not_measured(
    measured: _Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "has_own_convolutions", lambda: False)
    report = bench_pipeline(quick=False, tell=lambda _: None)
    assert not any("tasks" in row.system for row in report.rows)


def test_one_core_computes_tasks_as_a_run_on_one_node_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def record(task: Task, steps: int, **options: object) -> str:
        asked.update(options, model=task.model, steps=steps)
        return "what it told"

    def between(recording: object, first: int, last: int) -> float:
        asked.update(recording=recording, first=first, last=last)
        return 7.0

    monkeypatch.setattr(pipeline, "record_run", record)
    monkeypatch.setattr(pipeline, "speed_between", between)
    assert pipeline._one_as_tasks("resnet110", 6) == 7.0
    assert (asked["model"], asked["strategy"], asked["executor"]) == (
        "resnet110",
        "single",
        "tasks",
    )
    assert asked["recording"] == "what it told"
    assert 0 < asked["first"] < asked["last"] == asked["steps"]
    assert asked["last"] - asked["first"] == 6


@pytest.mark.parametrize("speeds", [(), (1.0, 0.5)])
def test_ours_is_a_run_of_the_strategy_pipeline(
    monkeypatch: pytest.MonkeyPatch, speeds: tuple[float, ...]
) -> None:
    given: list[Config] = []
    monkeypatch.setattr(
        ours, "run_training", lambda options, **more: given.append(Config(**options))
    )
    task = Task("resnet20", (3, 8, 8), 10, 4, (4,))
    ours.record_pipeline(task, 2, speeds, 3)
    (config,) = given
    assert (config.strategy, config.stages, config.speeds) == ("pipeline", 2, speeds)
    assert (config.threads, config.precision, config.batch) == (1, "fp32", 4)


def test_what_nodes_did_is_counted_between_two_steps() -> None:
    recording = ours.Recording()
    for step, busy in ((1, 9.0), (3, 1.0), (5, 2.0), (6, 9.0)):
        event = NodesEvent(
            step=step,
            nodes=[1, 2],
            speeds=[1.0, 1.0],
            shares=[2, 2],
            samples=[8, 8],
            busy_s=[busy, 2 * busy],
            waiting_s=[1.0, 0.0],
            exchange_s=0.0,
        )
        recording.receive(event, when=float(step))
    assert ours.busy_between(recording, 1, 5) == [(0.75, 0.5), (1.5, 0.0)]
