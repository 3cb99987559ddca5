"""One node's part of a step: its own samples up to the head, everybody's samples through its part.

features of own samples        the trunk, the same on all nodes
features of all samples        exchanged, pass by pass (passes.py)
this node's neurons of them    forward and backward; gradients of its weights are complete
gradients of own features      partial sums come back from all
the trunk's backward pass      whose gradients a reduction adds up over all nodes
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from convoy.hybrid.allot import bounds_of
from convoy.hybrid.crossings import (
    Late,
    gather_neurons,
    gather_samples,
    late_linear,
    return_samples,
    split_answers,
    split_losses,
)
from convoy.hybrid.exchange import Exchange, Finish
from convoy.hybrid.head import Layer
from convoy.hybrid.passes import Scheme, Stretch, make_passes
from convoy.hybrid.split import Split
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.executor import Sums
from convoy.models.dropout import drop_by


@dataclass(frozen=True, slots=True, eq=False)
class Marks:
    """What is known of the samples of a pass, node after node.

    Attributes:
        counts: how many are each node's own.
    """

    counts: tuple[int, ...]
    labels: Tensor
    keys: Tensor | None

    def own(self, rank: int) -> slice:
        """Return where a node's own samples lie."""
        start = sum(self.counts[:rank])
        return slice(start, start + self.counts[rank])


class Computation:
    """Computes one node's part of the steps of a network that is split.

    Args:
        trunk: the modules before the first layer that is cut.
        layers: from there on.
        split: holds this node's parts of their weights.
        exchange: with the other nodes.
        arithmetic: how to compute.
        smoothing: of labels.
        scheme: in which order samples cross to the head.
    """

    def __init__(
        self,
        trunk: Sequence[nn.Module],
        layers: Sequence[Layer],
        split: Split,
        exchange: Exchange,
        arithmetic: Arithmetic,
        *,
        smoothing: float = 0.0,
        scheme: Scheme = "all",
    ) -> None:
        self._trunk, self._layers, self._split = nn.Sequential(*trunk), layers, split
        self._net = nn.ModuleList([self._trunk, *(layer.module for layer in layers)])
        self._exchange, self._arithmetic = exchange, arithmetic
        self._smoothing, self._scheme = smoothing, scheme
        self._late = Late()
        first = layers[0].module
        assert isinstance(first, nn.Linear)
        self._features = first.in_features
        bf16 = arithmetic.precision == "bf16"
        self._dtype = torch.bfloat16 if bf16 else arithmetic.dtype
        self.shared = _shared_module(self._trunk, layers, split)
        cut = {id(p) for p in self._trunk.parameters()}
        self.ready_early = [p for p in self.shared.parameters() if id(p) not in cut]

    # ---------------------------------------------------------------- training

    def gradients(
        self,
        images_nchw: Tensor | None,
        marks: Marks,
        divisor: float,
        before_trunk: Callable[[], None],
    ) -> Sums:
        """Leave the gradient of (sum of all nodes' losses / divisor) in this node's weights.

        Those of the weights that all nodes share are of its own samples, and must be added up.

        Args:
            images_nchw: this node's samples; None where it has none.
            marks: of all nodes' samples.
            divisor: samples of all nodes.
            before_trunk: called when the head is done and the trunk's backward pass begins.
        """
        self._net.train()
        rank = self._exchange.rank
        own = marks.own(rank)
        keys = marks.keys[own] if marks.keys is not None else None
        features = self._run_trunk(images_nchw, keys)
        passes = make_passes(self._scheme, marks.counts)
        gradients: list[Finish] = []
        losses, correct = [], []
        crossing = self._begin_pass(features, passes[0])
        for number, stretches in enumerate(passes):
            x = crossing().requires_grad_()
            if number + 1 < len(passes):
                crossing = self._begin_pass(features, passes[number + 1])
            part = _part(marks, stretches)
            loss, right = self._learn(x, part, divisor)
            losses.append(loss)
            correct.append(right)
            assert x.grad is not None
            gradients.append(self._exchange.start_return(x.grad, part.counts))
        before_trunk()
        gradient = torch.cat([finish() for finish in gradients])
        if features.requires_grad:
            features.backward(gradient.to(features.dtype))
        self._late.compute()  # while the trunk's gradients travel
        total = torch.stack(losses).sum()
        return Sums(total, None, marks.labels[own], torch.stack(correct).sum())

    def _run_trunk(self, images_nchw: Tensor | None, keys: Tensor | None) -> Tensor:
        if images_nchw is None:
            device = self._arithmetic.device
            return torch.zeros(0, self._features, dtype=self._dtype, device=device)
        with drop_by(keys), self._arithmetic.autocast():
            found: Tensor = self._trunk(images_nchw)
        return found.to(self._dtype)

    def _begin_pass(self, features: Tensor, stretches: Sequence[Stretch]) -> Finish:
        start, stop = stretches[self._exchange.rank]
        counts = [end - begin for begin, end in stretches]
        return self._exchange.start_gather(features.detach()[start:stop], counts)

    def _learn(self, x: Tensor, marks: Marks, divisor: float) -> tuple[Tensor, Tensor]:
        """Run a pass's features through the head and back; return own loss and own correct."""
        logits = self._run_head(x, marks)
        own = marks.own(self._exchange.rank)
        losses = self._losses(logits, marks)
        losses.backward(torch.full_like(losses, 1 / divisor))
        is_split = self._layers[-1].after == "neurons"
        mine = losses.detach()[own].sum() if is_split else losses.detach().sum()
        right = self._answers(logits.detach()) == (marks.labels if is_split else marks.labels[own])
        return mine, (right[own] if is_split else right).sum()

    # ---------------------------------------------------------------- the head

    def _run_head(self, x: Tensor, marks: Marks) -> Tensor:
        """Return the logits: of own samples, or of all samples and some classes."""
        exchange = self._exchange
        widths: tuple[int, ...] = ()
        with self._dropout(marks) as place, self._arithmetic.autocast():
            for number, layer in enumerate(self._layers):
                module = layer.module
                if layer.kind == "columns":
                    if number and layer.before == "samples":
                        x = gather_samples(x, exchange, marks.counts)
                    elif number:
                        x = gather_neurons(x, exchange, widths)
                    x = self._columns(x, module)
                elif layer.kind == "rows":
                    x = self._rows(x, module, marks.counts)
                else:
                    place(layer)
                    x = module(x)
                widths = layer.widths
        return x

    def _columns(self, x: Tensor, layer: nn.Module) -> Tensor:
        """Return this node's neurons."""
        assert isinstance(layer, nn.Linear)
        bias = None if layer.bias is None else self._split.part_of(layer.bias)
        return late_linear(x, self._split.part_of(layer.weight), bias, self._late)

    def _rows(self, x: Tensor, layer: nn.Module, counts: Sequence[int]) -> Tensor:
        """Return all neurons of own samples, to which every node's add something."""
        assert isinstance(layer, nn.Linear)
        partial = late_linear(x, self._split.part_of(layer.weight), None, self._late)
        found = return_samples(partial, self._exchange, counts)
        return found if layer.bias is None else found + layer.bias.to(found.dtype)

    @contextmanager
    def _dropout(self, marks: Marks) -> Iterator[Callable[[Layer], None]]:
        """Let dropout layers draw what they would for a whole network: by sample and neuron."""
        rank = self._exchange.rank
        with drop_by(marks.keys) as draws:

            def place(layer: Layer) -> None:
                if draws is None or marks.keys is None:
                    return
                by_neuron = layer.after == "neurons"
                draws.keys = marks.keys if by_neuron else marks.keys[marks.own(rank)]
                draws.first = bounds_of(layer.widths)[rank] if by_neuron else 0

            yield place

    def _losses(self, logits: Tensor, marks: Marks) -> Tensor:
        """Return the losses: one for each of own samples, or for each of all."""
        last = self._layers[-1]
        rank = self._exchange.rank
        if last.after == "samples":
            labels = marks.labels[marks.own(rank)]
            with self._arithmetic.autocast():
                return functional.cross_entropy(
                    logits, labels, reduction="none", label_smoothing=self._smoothing_now
                )
        return split_losses(
            logits,
            marks.labels,
            self._exchange,
            first=bounds_of(last.widths)[rank],
            classes=sum(last.widths),
            smoothing=self._smoothing_now,
        )

    @property
    def _smoothing_now(self) -> float:
        return self._smoothing if self._net.training else 0.0

    def _answers(self, logits: Tensor) -> Tensor:
        """Return which classes own samples, or all, are taken for."""
        last = self._layers[-1]
        if last.after == "samples":
            return logits.argmax(1)
        return split_answers(logits, self._exchange, bounds_of(last.widths)[self._exchange.rank])

    # ---------------------------------------------------------------- testing

    @torch.no_grad()
    def evaluate(
        self, images_nchw: Tensor | None, marks: Marks, *, mirrored: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of own samples' losses, and how many of them are right."""
        self._net.eval()
        views = [images_nchw]
        if mirrored:
            views.append(None if images_nchw is None else images_nchw.flip(3))
        found = []
        for view in views:
            features = self._run_trunk(view, None)
            x = self._exchange.gather(features, marks.counts)
            found.append(self._run_head(x, marks))
        logits = torch.stack(found).mean(0) if mirrored else found[0]
        losses, answers = self._losses(logits, marks), self._answers(logits)
        own = marks.own(self._exchange.rank)
        labels = marks.labels[own]
        if self._layers[-1].after == "neurons":
            losses, answers = losses[own], answers[own]
        return losses.sum(), (answers == labels).sum()


def _part(marks: Marks, stretches: Sequence[Stretch]) -> Marks:
    """Return what is known of the samples of one pass."""
    if all(stretch == (0, count) for stretch, count in zip(stretches, marks.counts, strict=True)):
        return marks
    starts = bounds_of(marks.counts)
    spans = [(begin + a, begin + b) for begin, (a, b) in zip(starts, stretches, strict=False)]
    labels = torch.cat([marks.labels[a:b] for a, b in spans])
    keys = torch.cat([marks.keys[a:b] for a, b in spans]) if marks.keys is not None else None
    return Marks(tuple(b - a for a, b in spans), labels, keys)


def _shared_module(trunk: nn.Module, layers: Sequence[Layer], split: Split) -> nn.Module:
    """Return a module of all weights that every node has the whole of."""
    cut = {id(one.whole) for one in split.cuts}
    rest = [
        parameter
        for layer in layers
        for parameter in layer.module.parameters()
        if id(parameter) not in cut
    ]
    return nn.ModuleList([trunk, nn.ParameterList(rest)])
