"""How a stage goes forward and back with a batch by PyTorch, one operation at a time."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor, nn
from torch.func import functional_call

from convoy.inner.arithmetic import Arithmetic
from convoy.models.dropout import drop_by
from convoy.pipeline.postponed import Postponed


@dataclass(frozen=True, slots=True, eq=False)
class _Passage:
    """A batch on its way: what came in, what went out, and the weights that were read."""

    x: Tensor
    y: Tensor
    weights: tuple[Tensor, ...] | None


class EagerPasses:
    """Runs blocks by PyTorch.

    Args:
        part: the blocks.
        arithmetic: how to compute.
        is_first: what comes in are images, for which nobody wants a gradient.
        postpones: the gradient of what comes in is computed before those of the weights.
    """

    def __init__(
        self, part: nn.Module, arithmetic: Arithmetic, *, is_first: bool, postpones: bool
    ) -> None:
        self._part, self._arithmetic, self._is_first = part, arithmetic, is_first
        self._names, self._parameters = trained(part)
        # Nobody waits for what a first stage's backward pass leads to.
        self._postponed = Postponed() if postpones and not is_first else None

    def forward(
        self, x: Tensor, keys: Tensor | None, weights: Sequence[Tensor] | None
    ) -> tuple[Tensor, _Passage]:
        """Return what the blocks make of a batch, and what its way back needs."""
        x = x.detach().requires_grad_(not self._is_first)
        own = None
        with self._watch(), drop_by(keys), self._arithmetic.autocast():
            if weights is None:
                y = self._part(x)
            else:
                own = tuple(weight.requires_grad_() for weight in weights)
                named = {
                    name: weight
                    for names, weight in zip(self._names, own, strict=True)
                    for name in names
                }
                y = functional_call(self._part, named, (x,), tie_weights=False)
        return y.detach(), _Passage(x, y, own)

    def backward(self, passage: _Passage, gradient: Tensor) -> Tensor | None:
        """Return the gradient of a batch's input; leave those of the weights, or what they need."""
        assert not self._postponed, "the last batch's gradients are missing"
        for parameter in self._parameters:
            parameter.grad = None
        if passage.y.requires_grad:  # not where a first stage has only frozen weights
            if self._postponed is None:
                passage.y.backward(gradient)
            else:
                self._postponed.backward(passage.y, gradient)
        return passage.x.grad

    def gradients(self, passage: _Passage) -> None:
        """Leave the gradient of each weight in its .grad."""
        if self._postponed is not None:
            self._postponed.compute()
        for parameter, read in zip(self._parameters, passage.weights or (), strict=False):
            parameter.grad = read.grad

    def _watch(self) -> AbstractContextManager[object]:
        return nullcontext() if self._postponed is None else self._postponed.watch()


def trained(net: nn.Module) -> tuple[list[list[str]], list[nn.Parameter]]:
    """Return the weights that are trained, with the names by which they can be replaced.

    A weight of two modules has two names. A module that is used twice has one: torch would put
    the replacement in the place of the weight when it replaces it a second time.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for prefix, module in net.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if parameter.requires_grad:
                names.setdefault(parameter, []).append(name)
    return list(names.values()), list(names)
