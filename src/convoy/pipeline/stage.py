"""One stage of a pipeline: some blocks, the batches that are inside them, and their update.

A stage knows nothing of the other stages. It is given a batch's activations and later the
gradient of what it made of them, in the order of its schedule:

    forward(batch, x) -> y      with the weights that the recipe says
    backward(batch, dy) -> dx   which the stage before waits for
    update(rate)                what nobody waits for, and the weights move

Between the first two a batch is on its way; what it needs for its backward pass is kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from convoy.config import Config
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.executor import Sums
from convoy.inner.passes import Passes
from convoy.pipeline.passes import trained
from convoy.pipeline.recipe import Recipe
from convoy.pipeline.sgd import StageSGD


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """A batch on its way.

    Attributes:
        y: what went out.
        version: updates that the weights had had when its forward pass read them.
        passes: that took it forward, and will take it back.
        held: what they need for that.
    """

    y: Tensor
    version: int
    passes: Passes
    held: Any


class Stage:
    """Some blocks of a network, trained in place.

    Args:
        blocks: in the order in which they run.
        lead: forwards that it is ahead of its backwards.
        recipe: which weights are read, and how they move.
        config: of the run.
        arithmetic: how to compute.
        momentum: each weight's, which is moved in place; missing ones start from zero.
        passes: compute the blocks.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        lead: int,
        recipe: Recipe,
        config: Config,
        arithmetic: Arithmetic,
        momentum: Mapping[nn.Parameter, Tensor],
        passes: Passes,
    ) -> None:
        self.lead = lead
        self.version = 0
        self._net = nn.Sequential(*blocks)
        self._recipe = recipe
        self._arithmetic = arithmetic
        self._smoothing = config.label_smoothing
        self._passes = passes
        _, parameters = trained(self._net)
        # Written through aliases: autograd would take a change for a mistake.
        self._places = [parameter.data for parameter in parameters]
        self.optimizer = StageSGD([parameters], [lead], recipe, config)
        for parameter in parameters:
            if parameter in momentum:
                self.optimizer.state[parameter]["momentum_buffer"] = momentum[parameter]
        self._on_the_way: dict[int, Passage] = {}
        self._back: Passage | None = None  # whose gradients the next update takes
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
        ahead = self._forwards - self.version
        weights = self.optimizer.predicted(0, ahead, self._last_rate) if ahead else None
        own = None  # that its backward pass will read too
        if self._recipe.needs_own_weights and (ahead or self.lead):
            own = weights if weights is not None else [place.clone() for place in self._places]
            weights = None
        with self._in_place(weights):
            y, held = self._passes.forward(x, keys, own)
        self._on_the_way[batch] = Passage(y, self.version, self._passes, held)
        self._forwards += 1
        return y

    @contextmanager
    def _in_place(self, weights: Sequence[Tensor] | None) -> Iterator[None]:
        """Let the blocks have other weights for a while; None: let them have their own."""
        if not weights:
            yield
            return
        present = [place.clone() for place in self._places]
        torch._foreach_copy_(self._places, list(weights))
        try:
            yield
        finally:
            torch._foreach_copy_(self._places, present)

    # ---------------------------------------------------------------- backward

    def backward(self, batch: int, gradient: Tensor, epochs_done: float) -> Tensor | None:
        """Return the gradient of a batch's input, if it is wanted; an update must follow."""
        assert self._back is None, "the last batch's update is missing"
        passage = self._back = self._on_the_way.pop(batch)
        self.optimizer.begin_update(epochs_done)
        recalls = self._recipe.backward == "predicted" and self.lead
        with self._in_place(self.optimizer.recalled(0) if recalls else None):
            return passage.passes.backward(passage.held, gradient)

    def finish(
        self, batch: int, labels: Tensor, divisor: float, epochs_done: float
    ) -> tuple[Sums, Tensor | None]:
        """Do the last stage's part after its forward pass: the loss and the backward pass."""
        logits = self._on_the_way[batch].y.detach().requires_grad_()
        with self._arithmetic.autocast():
            loss = functional.cross_entropy(
                logits, labels, reduction="sum", label_smoothing=self._smoothing
            )
        loss.backward(torch.full_like(loss, 1 / divisor))
        assert logits.grad is not None
        found = self.backward(batch, logits.grad, epochs_done)
        return Sums(loss.detach(), logits.detach(), labels), found

    def update(self, rate: float) -> None:
        """Move the weights by the gradient of the batch whose backward pass was last."""
        assert self._back is not None, "there was no backward pass"
        self._back.passes.gradients(self._back.held)
        self._back = None
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self._last_rate = rate
        self.version += 1
