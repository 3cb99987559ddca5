"""Every network of a process is compiled, not only the first ones."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convoy.inner.compiling import compile_for_one_size


@pytest.mark.filterwarnings("ignore:::torch")  # its compiler warns of its own parts
def test_every_network_of_a_process_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def note(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
        made.append(graph)
        return graph.forward  # type: ignore[no-any-return]

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=note))
    torch._dynamo.reset()
    for number in range(1, 13):
        layer = nn.Linear(number, 2)

        def apply(x: Tensor, layer: nn.Module = layer) -> Tensor:
            found: Tensor = layer(x)
            return found

        x = torch.ones(3, number)
        assert torch.equal(compile_for_one_size(apply)(x), layer(x))
        assert len(made) == number
    torch._dynamo.reset()
