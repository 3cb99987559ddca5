"""The executor `fused`: what was compiled gives the numbers of eager, and what cannot be is told.

The recording of compiled steps needs a GPU: test_graph_gpu.py.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convoy.config import Config
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.eager import EagerExecutor
from convoy.inner.fused import FusedExecutor, FusedForward
from convoy.inner.optimizer import make_optimizer
from tests.inner.test_graph import make_batch, make_model

_FP64 = Arithmetic(torch.device("cpu"), "fp64")
Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _pair(model: nn.Module) -> tuple[EagerExecutor, FusedForward, list[str]]:
    one = _FP64.place(model)
    two = copy.deepcopy(one)
    told: list[str] = []
    plain = EagerExecutor(one, make_optimizer(one, Config()), _FP64, label_smoothing=0.1)
    optimizer = make_optimizer(two, Config())
    fused = FusedForward(two, optimizer, _FP64, label_smoothing=0.1, tell=told.append)
    return plain, fused, told


def _train(plain: EagerExecutor, fused: FusedForward, sizes: list[int]) -> None:
    for number, size in enumerate(sizes):
        batch = make_batch(number, size)
        a, b = (executor.step(batch, size, 0.1) for executor in (plain, fused))
        assert float(a.loss) == pytest.approx(float(b.loss), rel=1e-12)
    state = fused.model.state_dict()
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-12, msg=name)


@pytest.fixture
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:::torch")  # its compiler warns of its own parts
@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_steps_equal_those_of_eager_whatever_the_size() -> None:
    plain, fused, told = _pair(make_model(dropout=False))
    _train(plain, fused, [10, 10, 4, 10, 7])
    assert (fused._compiled is not None, told) == (True, [])
    assert int(fused.model.get_buffer("1.num_batches_tracked")) == 5  # the trial left no trace
    assert told == []


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a compiler that changes nothing count what it is asked for."""
    sizes: list[int] = []

    def compiled(function: Loss, **options: Any) -> Loss:
        def call(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            sizes.append(len(images))
            return function(images, labels)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    return sizes


def test_only_the_first_size_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _counted(monkeypatch)
    plain, fused, _ = _pair(make_model(dropout=False))
    _train(plain, fused, [10, 4, 10])
    assert asked == [10, 10, 10]  # a trial and two steps


def test_dropout_by_sample_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _counted(monkeypatch)
    plain, fused, told = _pair(make_model())
    _train(plain, fused, [10, 10])
    assert asked == []
    (line,) = told
    assert line.startswith("the executor 'fused' computes as 'graph' does: its dropout draws")


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_compiler_that_fails_leaves_no_trace(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Tensor:
            raise RuntimeError("no compiler for this\nand a long story")

    def compiled(function: Loss, **options: Any) -> Loss:
        def call(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            loss, logits = function(images, labels)
            if when == "forward":
                raise RuntimeError("no compiler for this\nand a long story")
            return Broken.apply(loss), logits  # type: ignore[no-untyped-call]

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    plain, fused, told = _pair(make_model(dropout=False))
    _train(plain, fused, [10, 10, 4])
    (line,) = told
    assert line.endswith("does: torch.compile failed: no compiler for this")


def test_without_a_gpu_it_says_so_and_trains() -> None:
    told: list[str] = []
    model = _FP64.place(make_model(dropout=False))
    executor = FusedExecutor(model, make_optimizer(model, Config()), _FP64, tell=told.append)
    before = executor.model.get_parameter("0.weight").clone()
    executor.step(make_batch(0), 10, 0.1)
    assert not torch.equal(before, executor.model.get_parameter("0.weight"))
    assert told == ["the executor 'fused' computes as 'eager' does: it needs a GPU"]
