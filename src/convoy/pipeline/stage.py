"""One stage of a pipeline: some blocks, the batches that are inside them, and their update.

A stage knows nothing of the other stages. It is given a batch's activations and later the
gradient of what it made of them, in the order of its schedule:

    forward(batch, x) -> y      with the weights that the recipe says
    backward(batch, dy) -> dx   which the stage before waits for
    update(rate)                what nobody waits for, and the weights move

Between the first two a batch is on its way; what it needs for its backward pass is kept.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from convoy.config import Config
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.executor import Sums
from convoy.models.dropout import drop_by
from convoy.pipeline.postponed import Postponed
from convoy.pipeline.recipe import Recipe
from convoy.pipeline.sgd import StageSGD


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """A batch on its way: what came in, what went out, and the weights in between.

    Attributes:
        version: updates that the weights had had when its forward pass read them.
        copies: of the weights that the forward pass read, where the backward pass needs those.
    """

    x: Tensor
    y: Tensor
    version: int
    copies: tuple[Tensor, ...] | None


class Stage:
    """Some blocks of a network, trained in place.

    Args:
        blocks: in the order in which they run.
        lead: forwards that it is ahead of its backwards.
        recipe: which weights are read, and how they move.
        config: of the run.
        arithmetic: how to compute.
        momentum: each weight's, which is moved in place; missing ones start from zero.
        is_first: what comes in are images, for which nobody wants a gradient.
        postpones: the gradient of what comes in is computed before those of the weights.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        lead: int,
        recipe: Recipe,
        config: Config,
        arithmetic: Arithmetic,
        momentum: Mapping[nn.Parameter, Tensor],
        is_first: bool,
        postpones: bool = False,
    ) -> None:
        self.lead = lead
        self.version = 0
        self._is_first = is_first
        self._net = nn.Sequential(*blocks)
        self._recipe = recipe
        self._arithmetic = arithmetic
        self._smoothing = config.label_smoothing
        self._names, self._parameters = _trained(self._net)
        # Written through aliases: autograd would take a change for a mistake.
        self._places = [parameter.data for parameter in self._parameters]
        self.optimizer = StageSGD([self._parameters], [lead], recipe, config)
        for parameter in self._parameters:
            if parameter in momentum:
                self.optimizer.state[parameter]["momentum_buffer"] = momentum[parameter]
        self._on_the_way: dict[int, Passage] = {}
        self._copies: tuple[Tensor, ...] | None = None  # whose gradients the next update takes
        # Nobody waits for what a first stage's backward pass leads to.
        self._postponed = Postponed() if postpones and not is_first else None
        self._forwards = 0
        self._last_rate = 0.0

    @property
    def held(self) -> int:
        """Return how many batches are on their way."""
        return len(self._on_the_way)

    def fill(self, rate: float, epochs_done: float) -> None:
        """Begin with an empty pipeline; `rate` is that of the last update."""
        assert not self._on_the_way
        self.optimizer.begin_segment(rate, epochs_done)
        self.version = self._forwards = 0
        self._last_rate = rate
        self._net.train()

    # ---------------------------------------------------------------- forward

    def forward(self, batch: int, x: Tensor, keys: Tensor | None) -> Tensor:
        """Return what the blocks make of a batch's activations."""
        assert batch not in self._on_the_way, batch
        x = x.detach().requires_grad_(not self._is_first)
        with self._watch(), drop_by(keys), self._arithmetic.autocast():
            y, copies = self._pass(x)
        self._on_the_way[batch] = Passage(x, y, self.version, copies)
        self._forwards += 1
        return y.detach()

    def _pass(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        ahead = self._forwards - self.version
        predicted = self.optimizer.predicted(0, ahead, self._last_rate) if ahead else None
        if ahead == 0 and self.lead == 0:
            return self._net(x), None
        if self._recipe.needs_own_weights:
            values = predicted if predicted is not None else [p.clone() for p in self._places]
            copies = tuple(value.requires_grad_() for value in values)
            weights = {
                name: copied
                for names, copied in zip(self._names, copies, strict=True)
                for name in names
            }
            return functional_call(self._net, weights, (x,), tie_weights=False), copies
        if predicted is None:
            return self._net(x), None
        present = [place.clone() for place in self._places]
        self._put(predicted)
        y = self._net(x)
        self._put(present)
        return y, None

    def _put(self, weights: Sequence[Tensor]) -> None:
        if self._places:  # all may be frozen
            torch._foreach_copy_(self._places, list(weights))

    # ---------------------------------------------------------------- backward

    def backward(self, batch: int, gradient: Tensor, epochs_done: float) -> Tensor | None:
        """Return the gradient of a batch's input, if it is wanted; an update must follow."""
        passage = self._on_the_way.pop(batch)
        self.optimizer.begin_update(epochs_done)
        return self._differentiate(passage, gradient)

    def finish(
        self, batch: int, labels: Tensor, divisor: float, epochs_done: float
    ) -> tuple[Sums, Tensor | None]:
        """Do the last stage's part after its forward pass: the loss and the backward pass."""
        passage = self._on_the_way.pop(batch)
        logits = passage.y
        with self._arithmetic.autocast():
            loss = functional.cross_entropy(
                logits, labels, reduction="sum", label_smoothing=self._smoothing
            )
        scale = torch.full_like(loss, 1 / divisor)
        self.optimizer.begin_update(epochs_done)
        found = self._differentiate(replace(passage, y=loss), scale)
        return Sums(loss.detach(), logits.detach(), labels), found

    def update(self, rate: float) -> None:
        """Move the weights by the gradient of the batch whose backward pass was last."""
        if self._postponed is not None:
            self._postponed.compute()
        for parameter, copied in zip(self._parameters, self._copies or (), strict=False):
            parameter.grad = copied.grad
        self._copies = None
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self._last_rate = rate
        self.version += 1

    def _differentiate(self, passage: Passage, gradient: Tensor) -> Tensor | None:
        """Return the gradient of the input; leave those of the weights, or what they need."""
        assert not self._postponed, "the last batch's update is missing"
        self.optimizer.zero_grad(set_to_none=True)
        self._copies = passage.copies
        recalls = self._recipe.backward == "predicted" and self.lead
        present = [place.clone() for place in self._places] if recalls else []
        if recalls:
            self._put(self.optimizer.recalled(0))
        if passage.y.requires_grad:  # not where a first stage has only frozen weights
            if self._postponed is None:
                passage.y.backward(gradient)
            else:
                self._postponed.backward(passage.y, gradient)
        if recalls:
            self._put(present)
        return passage.x.grad

    def _watch(self) -> AbstractContextManager[object]:
        return nullcontext() if self._postponed is None else self._postponed.watch()


def _trained(net: nn.Module) -> tuple[list[list[str]], list[nn.Parameter]]:
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
