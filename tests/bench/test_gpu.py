"""The GPU benchmark: every contender trains, each at its best, and the bars are their ratios."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convoy.bench import compiled, gpu
from convoy.bench.gpu import COMPILED, EAGER, OURS, TASKS, Task, bench_gpu, measure_all
from convoy.bench.report import Report
from convoy.config import Config
from convoy.data.batches import Batch
from convoy.errors import ConfigError
from convoy.inner.arithmetic import Arithmetic
from tests.conftest import Outcome

_CPU = torch.device("cpu")
_TINY = Task("lenet5", (1, 12, 12), batch=4, steps=3, over_eager=7.0)


def _measure(told: list[str], *, quick: bool = False) -> Report:
    return measure_all((_TINY,), _CPU, repeats=3, slices=1, quick=quick, tell=told.append)


def _eager_for_compiled(
    model: nn.Module, way: Arithmetic, config: Config, update: str
) -> Callable[[Batch, float], object]:
    """Stand in for torch.compile, which takes half a minute here."""
    parameters: list[Tensor] = list(model.parameters())

    def step(batch: Batch, rate: float) -> None:
        with way.autocast():
            loss = nn.functional.cross_entropy(model(batch.images_NCHW), batch.labels)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            torch._foreach_sub_(parameters, gradients, alpha=rate)

    return step


def test_all_contenders_are_measured_at_their_best(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "compiled_step", _eager_for_compiled)
    told: list[str] = []
    report = _measure(told)
    systems = [row.system.partition(":")[0] for row in report.rows]
    assert systems == [EAGER, COMPILED, OURS]
    assert all(math.isfinite(row.median) and row.median > 0 for row in report.rows)
    assert all(row.system.split()[-2] in ("fp32", "bf16") for row in report.rows[::2])
    eager, peer, ours = (row.values for row in report.rows)
    ratios = [sorted(a / b for a, b in zip(ours, other, strict=True))[1] for other in (eager, peer)]
    assert [bar.value for bar in report.bars] == ratios
    assert [bar.at_least for bar in report.bars] == [7.0, 1.0]
    assert sum("computes as 'eager' does: it needs a GPU" in line for line in told) == 5
    assert sum(f"trial: {COMPILED}" in line for line in told) == 3  # two precisions, two updates


def test_the_quick_one_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "compiled_step", _eager_for_compiled)
    told: list[str] = []
    _measure(told, quick=True)
    assert sum(f"trial: {COMPILED}" in line for line in told) == 1


def test_a_compiler_that_fails_is_told_of_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*args: Any) -> Callable[[Batch, float], object]:
        raise RuntimeError("no triton here\nand a long story")

    monkeypatch.setattr(gpu, "compiled_step", failing)
    told: list[str] = []
    report = _measure(told)
    last = report.rows[-1]
    assert last.system == f"{COMPILED}: failed: RuntimeError: no triton here"
    assert last.values == (0.0, 0.0, 0.0)
    (bar,) = report.bars
    assert EAGER in bar.name
    assert any("no triton here" in line for line in told)


@pytest.mark.parametrize("update", compiled.UPDATES)
def test_the_peer_trains(monkeypatch: pytest.MonkeyPatch, update: str) -> None:
    def as_it_is(
        function: Callable[..., Any],
        *,
        mode: str | None,
        dynamic: bool,
        fullgraph: bool = False,
    ) -> Callable[..., Any]:
        assert mode is None  # there is nothing to capture on a CPU
        assert not dynamic
        whole.append(fullgraph)
        return function

    whole: list[bool] = []

    monkeypatch.setattr(torch, "compile", as_it_is)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    way = Arithmetic(_CPU)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    twin = nn.Linear(4, 2)
    twin.load_state_dict(model[1].state_dict())
    step = compiled.compiled_step(model, way, Config(), update)
    batch = Batch(torch.randn(6, 1, 2, 2), torch.arange(6) % 2)
    optimizer = torch.optim.SGD(twin.parameters(), momentum=0.9, nesterov=True, weight_decay=5e-4)
    for rate in (0.1, 0.2, 0.05):
        step(batch, rate)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        nn.functional.cross_entropy(twin(batch.images_NCHW.flatten(1)), batch.labels).backward()
        optimizer.step()
    torch.testing.assert_close(model[1].weight, twin.weight)
    assert whole == [True] + [False] * (update == compiled.UPDATES[1])


def test_the_tasks_are_those_that_were_promised() -> None:
    promised = [("lenet5", 128, 7.0), ("resnet20", 128, 3.5), ("resnet56", 1024, 1.2)]
    assert [(t.model, t.batch, t.over_eager) for t in TASKS] == promised


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("quick", [True, False])
def test_without_a_gpu_it_is_refused(quick: bool) -> None:
    with pytest.raises(ConfigError, match="this needs a GPU"):
        bench_gpu(quick=quick, tell=print)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_says_so_in_one_line(convoy: Callable[..., Outcome]) -> None:
    outcome = convoy("bench", "gpu", "--quick", "--json")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("convoy: error: this needs a GPU")
