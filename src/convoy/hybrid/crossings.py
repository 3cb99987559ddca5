"""Exchanges as steps of a differentiable computation: each has its mirror in the backward pass."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from convoy.hybrid.exchange import Exchange

Crossing = Callable[[Tensor], Tensor]


class _Crossing(Function):
    """An exchange, and the one that takes gradients back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Crossing, back: Crossing) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


class Late:
    """Gradients of weights that are computed later, when what others wait for has been sent."""

    def __init__(self) -> None:
        self._waiting: list[tuple[nn.Parameter, nn.Parameter | None, Tensor, Tensor]] = []

    def note(
        self, weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, slope: Tensor
    ) -> None:
        """Remember what a layer was given, and what came back."""
        self._waiting.append((weight, bias, x, slope))

    @torch.no_grad()
    def compute(self) -> None:
        """Leave the gradients in the weights, in the place of those of the step before.

        That place is used again: glibc maps more than 32 MiB anew each time, page by page, which
        made a product of 2048 x 4096 numbers a third slower.
        """
        begun: set[nn.Parameter] = set()
        for weight, bias, x, slope in self._waiting:
            if weight.requires_grad:
                _put_product(weight, slope.t(), x.to(slope.dtype), again=weight in begun)
            if bias is not None and bias.requires_grad:
                _put(bias, slope.sum(0), again=bias in begun)
            begun.update([weight] if bias is None else [weight, bias])
        self._waiting.clear()


def _put_product(weight: nn.Parameter, left: Tensor, right: Tensor, *, again: bool) -> None:
    """Make a product a weight's gradient, or add it to that where it comes `again`."""
    place = weight.grad
    if place is None or place.dtype != left.dtype:
        _put(weight, left @ right, again=again)
    elif again:
        place.addmm_(left, right)
    else:
        torch.mm(left, right, out=place)


def _put(weight: nn.Parameter, gradient: Tensor, *, again: bool) -> None:
    gradient = gradient.to(weight.dtype)
    weight.grad = gradient if weight.grad is None or not again else weight.grad.add_(gradient)


class _LateLinear(Function):
    """A fully connected layer whose backward pass gives the gradient of its input only."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, late: Late
    ) -> Tensor:
        ctx.x, ctx.weight, ctx.bias, ctx.late = x, weight, bias, late
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.late.note(ctx.weight, ctx.bias, ctx.x, slope)
        return (slope @ ctx.weight.to(slope.dtype)).to(ctx.x.dtype), None, None, None


class _SplitLoss(Function):
    """Cross-entropy of samples whose logits lie on several nodes, each with some classes.

    Nodes tell each other three numbers of each sample, never the logits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        exchange: Exchange,
        first: int,
        classes: int,
        smoothing: float,
    ) -> Tensor:
        z = logits.float() if logits.dtype == torch.bfloat16 else logits
        inside = (labels >= first) & (labels < first + z.shape[1])
        rows = torch.nonzero(inside).flatten()
        columns = labels[rows] - first
        highest = largest(z.amax(1) if z.shape[1] else z.new_full((len(z),), -torch.inf), exchange)
        powers = torch.exp(z - highest[:, None])
        right = z.new_zeros(len(z)).index_put_((rows,), z[rows, columns])
        told = torch.stack([powers.sum(1), right, z.sum(1)], 1)
        summed = exchange.gather(told, [len(z)] * exchange.size).view(exchange.size, len(z), 3)
        whole, right, everything = summed.sum(0).unbind(1)
        losses = torch.log(whole) + highest - (1 - smoothing) * right
        losses = losses - smoothing / classes * everything
        chances = powers.div_(whole[:, None])
        ctx.save_for_backward(chances, rows, columns)
        ctx.about = smoothing, classes, logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        chances, rows, columns = ctx.saved_tensors
        smoothing, classes, dtype = ctx.about
        slope = chances  # nobody needs it again
        slope[rows, columns] -= 1 - smoothing
        if smoothing:
            slope -= smoothing / classes
        slope *= gradient[:, None]
        return slope.to(dtype), None, None, None, None, None


def largest(own: Tensor, exchange: Exchange) -> Tensor:
    """Return, number by number, the largest that any node has."""
    told = exchange.gather(own[None].contiguous(), [1] * exchange.size)
    return told.amax(0)


def late_linear(x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, late: Late) -> Tensor:
    """Return what a layer makes of its input; the gradients of its weights come later."""
    return _applied(_LateLinear, x, weight, bias, late)


def gather_samples(own: Tensor, exchange: Exchange, counts: Sequence[int]) -> Tensor:
    """Return everyone's samples."""
    there = partial(exchange.gather, counts=counts)
    return _applied(_Crossing, own, there, partial(exchange.give_back, counts=counts))


def return_samples(sums: Tensor, exchange: Exchange, counts: Sequence[int]) -> Tensor:
    """Return the sum of everyone's partial sums of this node's own samples."""
    there = partial(exchange.give_back, counts=counts)
    return _applied(_Crossing, sums, there, partial(exchange.gather, counts=counts))


def gather_neurons(own: Tensor, exchange: Exchange, widths: Sequence[int]) -> Tensor:
    """Return everyone's neurons."""
    there = partial(exchange.gather_columns, widths=widths)
    return _applied(_Crossing, own, there, partial(exchange.give_back_columns, widths=widths))


def split_losses(
    logits: Tensor,
    labels: Tensor,
    exchange: Exchange,
    *,
    first: int,
    classes: int,
    smoothing: float,
) -> Tensor:
    """Return each sample's loss from the logits of some classes, the first of which is `first`."""
    return _applied(_SplitLoss, logits, labels, exchange, first, classes, smoothing)


@torch.no_grad()
def split_answers(logits: Tensor, exchange: Exchange, first: int) -> Tensor:
    """Return the class that each sample is taken for; the first of several that are equal."""
    z = logits.float() if logits.dtype == torch.bfloat16 else logits
    best, place = z.max(1)
    told = torch.stack([best.double(), (place + first).double()], 1)
    shape = (exchange.size, len(z), 2)
    values, places = exchange.gather(told, [len(z)] * exchange.size).view(shape).unbind(2)
    winner = values.argmax(0)
    return places.gather(0, winner[None])[0].long()


def _applied(function: type[Function], *arguments: object) -> Tensor:
    found: Tensor = function.apply(*arguments)
    return found
