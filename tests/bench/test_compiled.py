"""The peer torch.compile compiles the whole network, or says that it cannot."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convoy.bench.compiled import UPDATES, compiled_step
from convoy.bench.peers import Task
from convoy.bench.peers.alone import make_model
from convoy.config import Config
from convoy.data.batches import Batch
from convoy.inner.arithmetic import Arithmetic
from convoy.models.zoo import build_model

pytestmark = pytest.mark.filterwarnings("ignore:::torch")  # its compiler warns of its own parts

_WAY = Arithmetic(torch.device("cpu"))
_SHAPE = (3, 16, 16)


@pytest.fixture
def convolutions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Stand in for the slow part of the compiler; note the convolutions of each graph."""
    found: list[int] = []

    def note(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        called = [graph.get_submodule(n.target) for n in graph.graph.nodes if n.op == "call_module"]
        functions = [n for n in graph.graph.nodes if n.target is torch.conv2d]
        found.append(len(functions) + sum(isinstance(m, nn.Conv2d) for m in called))
        return graph.forward  # type: ignore[no-any-return]

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=note))
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def _step(model: nn.Module) -> None:
    batch = Batch(torch.randn(4, *_SHAPE), torch.arange(4))
    compiled_step(model, _WAY, Config(), UPDATES[0])(batch, 0.1)


def test_a_network_with_dropout_is_one_graph(convolutions: list[int]) -> None:
    task = Task("alexnet", _SHAPE, 10, 4, (4,))
    _step(make_model(task))
    assert convolutions == [5]


def test_a_network_that_would_be_left_to_eager_is_refused(convolutions: list[int]) -> None:
    """Our own dropout asks for the samples' keys, which the compiler cannot follow."""
    with pytest.raises(torch._dynamo.exc.Unsupported):
        _step(build_model("alexnet", _SHAPE, 10, seed=0))
    assert convolutions == []
