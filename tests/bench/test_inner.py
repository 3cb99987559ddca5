"""The benchmark of a CPU step as tasks, with the times taken out."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from convoy.bench import inner
from convoy.bench.inner import Candidate, Task, bench_inner, thread_counts
from convoy.config import Config
from convoy.data.batches import Batch
from convoy.inner.arithmetic import Arithmetic
from convoy.machine import usable_cores
from convoy.models.dropout import SampleDropout


@pytest.fixture(autouse=True)
def _settings_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # to be put back
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_powers_of_two_and_all_cores_are_tried() -> None:
    assert thread_counts(1) == [1]
    assert thread_counts(2) == [1, 2]
    assert thread_counts(12) == [1, 2, 4, 8, 12]
    assert thread_counts(16) == [1, 2, 4, 8, 16]


def test_a_candidate_runs_on_its_own_threads() -> None:
    seen: list[int] = []
    batch = Batch(torch.zeros(1, 1, 2, 2), torch.zeros(1, dtype=torch.int64))
    candidate = Candidate("one", 1, lambda b, rate: seen.append(torch.get_num_threads()), batch)
    assert candidate.run(0.0) > 0
    assert set(seen) == {1}


def test_every_contender_and_a_curve_are_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = (Task("lenet5", "fp32", (1, 28, 28), over=1.0),)
    monkeypatch.setattr(inner, "TASKS", tasks)
    monkeypatch.setattr(inner, "_BATCH", 8)
    monkeypatch.setattr(inner, "_TRIAL_S", 0.0)
    monkeypatch.setattr(inner, "_ALONE_S", 0.2)
    monkeypatch.setattr(Candidate.run, "__defaults__", (0.0,))
    # Compiling takes half a minute; that it can fail is part of the test.
    monkeypatch.setattr(
        inner, "compiled_step", lambda *a: (_ for _ in ()).throw(RuntimeError("no compiler"))
    )
    told: list[str] = []
    report = bench_inner(quick=False, tell=told.append)
    systems = {row.system.split(":")[0] for row in report.rows if row.x is None}
    assert systems == {"PyTorch, eager", "convoy", inner.ALONE.split(":")[0]}
    assert {row.x for row in report.rows} == {None, *thread_counts(usable_cores())}
    assert any("no compiler" in line for line in told)
    (bar,) = report.bars
    assert bar.at_least is not None
    assert bar.value > 0


@pytest.mark.parametrize(("model", "shape"), [("lenet5", (1, 28, 28)), ("resnet20", (3, 32, 32))])
def test_the_compilers_own_scatter_is_tried_where_there_are_pools(
    monkeypatch: pytest.MonkeyPatch, model: str, shape: tuple[int, int, int]
) -> None:
    asked: list[tuple[int, object]] = []

    def note(net: nn.Module, way: Arithmetic, config: Config, update: str, how: object) -> Any:
        assert not any(isinstance(module, SampleDropout) for module in net.modules())
        asked.append((torch.get_num_threads(), how))
        return lambda batch, rate: None

    monkeypatch.setattr(inner, "compiled_step", note)
    monkeypatch.setattr(inner, "_TRIAL_S", 0.0)
    task = Task(model, "fp32", shape, over=1.0)
    inner._Bench(task, quick=False, tell=lambda _: None)._best_compiled(0.0)
    hows = [how for _, how in asked]
    assert hows[:2] == [None, None]
    own = {"cpp.fallback_scatter_reduce_sum": False}
    assert (own in hows) == (model == "lenet5")


def test_the_bar_is_the_ratio_to_pytorchs_faster_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner, "usable_cores", lambda: 16)
    task = Task("resnet20", "fp32", (3, 32, 32), over=2.2)
    values: dict[str, tuple[float, ...]] = {
        "PyTorch, eager: x": (100.0, 100.0, 100.0),
        "torch.compile: x": (50.0, 200.0, 50.0),
        "convoy: tasks": (300.0, 300.0, 200.0),
    }
    bar = inner._bar(task, values)
    assert (bar.value, bar.at_least) == (2.0, 2.2)
    monkeypatch.setattr(inner, "usable_cores", lambda: 2)
    assert inner._bar(task, values).at_least == 0.97
