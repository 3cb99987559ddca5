"""A pipeline on one device: the same batches, the same weights, the same numbers, no pipeline.

In a pipeline, stage s computes the gradient of batch m with weights of max(0, m - lead) updates,
and applies it to weights of m updates. Nothing in that depends on what the other stages do
meanwhile. So one device can compute batch after batch: it keeps each stage's weights of the last
`lead` updates, puts the old ones in place for the forward pass, and the present ones for the
update. That is about as fast as plain training, and can be recorded (convoy.inner.graph).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from convoy.config import Config
from convoy.data.batches import Batch
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.eager import EagerExecutor
from convoy.inner.optimizer import hold_momentum
from convoy.pipeline.recipe import Recipe
from convoy.pipeline.sgd import StageSGD

_ALIGNED = 64  # numbers; kernels are slower for tensors that begin anywhere


class DelayedStage:
    """A stage's weights: as they are, and as its next forward passes read them.

    All of a stage's weights lie in one row of memory, and what is to be read in a ring of such
    rows, so that putting other weights in place is one operation however many there are.

    Args:
        parameters: of the stage; they are moved to the row.
        lead: updates that its forward passes are behind.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], lead: int) -> None:
        self.parameters = list(parameters)
        self.lead = lead
        self._row = _in_one_row(self.parameters) if lead and self.parameters else None
        # Written through aliases: autograd would take a change for a mistake.
        self.places = [parameter.data for parameter in self.parameters]
        if self._row is not None:
            self._present = self._row.clone()
            self._ring = self._row.repeat(lead + 1, 1)
            self._next = torch.zeros(1, dtype=torch.int64, device=self._row.device)

    def enter_past(self) -> None:
        """Put the weights in place that the next batch's forward pass reads."""
        if self._row is not None:
            self._present.copy_(self._row)
            self._row.copy_(self._ring.index_select(0, self._next).squeeze(0))

    def enter_present(self) -> None:
        """Put the weights in place as they are."""
        if self._row is not None:
            self._row.copy_(self._present)

    def enter(self, weights: Sequence[Tensor]) -> None:
        """Put any weights in place."""
        if self._row is not None:
            self._row.copy_(self._as_row(weights))

    def remember(self, weights: Sequence[Tensor] | None) -> None:
        """Note what the batch after the others is to read; the last one read is not needed."""
        if self._row is not None:
            self._ring.index_copy_(0, self._next, self._as_row(weights).unsqueeze(0))
            self._next.add_(1).remainder_(self.lead + 1)

    def restart(self, weights: Sequence[Sequence[Tensor] | None]) -> None:
        """Begin with an empty pipeline: note what its first batches are to read."""
        if self._row is not None:
            self._next.zero_()
            self._ring.copy_(torch.stack([self._as_row(found) for found in weights]))

    def _as_row(self, weights: Sequence[Tensor] | None) -> Tensor:
        assert self._row is not None
        if weights is None:
            return self._row
        row = torch.empty_like(self._row)
        offset, parts = 0, []
        for tensor in weights:
            parts.append(tensor.as_strided((tensor.numel(),), (1,)))
            offset += tensor.numel()
            gap = -offset % _ALIGNED
            parts.append(self._row[offset : offset + gap])  # nobody reads what lies between
            offset += gap
        return torch.cat(parts, out=row)


def _in_one_row(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Move weights so that they lie one after the other, in the layout that each has."""
    sizes = [p.numel() + -p.numel() % _ALIGNED for p in parameters]
    row = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, part in zip(parameters, row.split(sizes), strict=True):
        place = part.as_strided(parameter.shape, _dense(parameter), part.storage_offset())
        parameter.data = place.copy_(parameter.data)
    return row


def _dense(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the strides of a weight whose numbers lie side by side."""
    return torch.empty_like(parameter, device="meta").stride()


class DelayedSGD(StageSGD):
    """Moves the present weights by gradients of the past."""

    def __init__(self, stages: Sequence[DelayedStage], recipe: Recipe, config: Config) -> None:
        self.stages = list(stages)
        parts, leads = [stage.parameters for stage in stages], [stage.lead for stage in stages]
        super().__init__(parts, leads, recipe, config)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Move the weights, and note what comes to be read."""
        del closure
        for stage in self.stages:
            stage.enter_present()
        super().step()
        for number, (stage, group) in enumerate(zip(self.stages, self.param_groups, strict=True)):
            stage.remember(self.predicted(number, stage.lead, group["lr"]))

    def drain(self, rate: float) -> None:
        """Let all batches out of the pipeline; `rate` is that of the last update.

        The first batches that come in afterwards read weights that fewer updates are behind.
        """
        for number, stage in enumerate(self.stages):
            if stage.lead and stage.parameters:
                distances = range(stage.lead + 1)
                stage.restart([self.predicted(number, distance, rate) for distance in distances])


class DelayedExecutor(EagerExecutor):
    """Computes as a pipeline would.

    Args:
        inner: computes a forward pass with the weights that are in place; its optimizer is a
            DelayedSGD over the same network.
    """

    optimizer: DelayedSGD

    def __init__(self, inner: EagerExecutor) -> None:
        super().__init__(inner.model, inner.optimizer, inner.arithmetic)
        self._inner = inner

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of a batch's losses, ready to be differentiated, and the logits."""
        optimizer = self.optimizer
        for stage in optimizer.stages:
            stage.enter_past()
        loss, logits = self._inner.forward(batch)
        backward = optimizer.recipe.backward
        for number, stage in enumerate(optimizer.stages):
            if backward != "stashed":
                stage.enter_present()
            if backward == "predicted" and stage.lead:
                stage.enter(optimizer.recalled(number))
        return loss, logits


def make_delayed(
    model: nn.Module,
    parts: Sequence[Sequence[nn.Module]],
    leads: Sequence[int],
    recipe: Recipe,
    config: Config,
    arithmetic: Arithmetic,
    make: type[EagerExecutor] = EagerExecutor,
) -> DelayedExecutor:
    """Return an executor that trains a network as a pipeline of these parts would.

    `make` makes what computes a forward pass.
    """
    stages = [
        # As a sequence, which names a weight once that several blocks share.
        DelayedStage([p for p in nn.Sequential(*part).parameters() if p.requires_grad], lead)
        for part, lead in zip(parts, leads, strict=True)
    ]
    optimizer = DelayedSGD(stages, recipe, config)
    hold_momentum(optimizer, {})
    smoothing = config.label_smoothing
    return DelayedExecutor(make(model, optimizer, arithmetic, label_smoothing=smoothing))
