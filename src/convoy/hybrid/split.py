"""This node's parts of the layers that are cut, taken out of a network and put back into it.

While a network is split, the weights that were cut are nowhere whole: a node holds its part of
them, of their gradients and of their momentum, and nothing else. Its other weights stay in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn, optim

from convoy.config import Config
from convoy.hybrid.allot import bounds_of
from convoy.hybrid.exchange import Exchange
from convoy.hybrid.head import Layer
from convoy.inner.optimizer import hold_momentum, make_optimizer

_MOMENTUM = "momentum_buffer"


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """A weight that is cut, and this node's part of it.

    Attributes:
        whole: the network's own parameter; empty while it is cut.
        shape: of the whole.
        bounds: where each node's part begins and ends, along `axis`.
    """

    whole: nn.Parameter
    part: nn.Parameter
    shape: torch.Size
    axis: int
    bounds: tuple[int, ...]

    def slice_of(self, tensor: Tensor, rank: int) -> Tensor:
        """Return a node's part of a tensor of the whole's shape."""
        start, stop = self.bounds[rank], self.bounds[rank + 1]
        return tensor.narrow(self.axis, start, stop - start)


class Split:
    """A network whose fully connected layers are cut; its other weights are whole.

    Args:
        layers: of the network's head, from the first that is cut on.
        optimizer: the whole network's; it lends momentum, and gets it back.
        rank: of this node.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        optimizer: optim.Optimizer,
        rank: int,
    ) -> None:
        self._optimizer, self._rank = optimizer, rank
        hold_momentum(optimizer, {})
        self.cuts: list[Cut] = []
        self._momentum: dict[nn.Parameter, Tensor] = {}
        for layer in layers:
            if layer.kind not in ("columns", "rows"):
                continue
            assert isinstance(layer.module, nn.Linear)
            bounds = bounds_of(layer.widths)
            assert isinstance(layer.module.weight, nn.Parameter)
            self._take(layer.module.weight, 0 if layer.kind == "columns" else 1, bounds)
            bias = layer.module.bias
            if layer.kind == "columns" and isinstance(bias, nn.Parameter):
                self._take(bias, 0, bounds)

    def _take(self, whole: nn.Parameter, axis: int, bounds: tuple[int, ...]) -> None:
        own = slice(bounds[self._rank], bounds[self._rank + 1])
        pick = (own,) if axis == 0 else (slice(None), own)
        part = nn.Parameter(whole.data[pick].clone(), requires_grad=whole.requires_grad)
        self.cuts.append(Cut(whole, part, whole.shape, axis, bounds))
        momentum = self._optimizer.state.pop(whole, {}).get(_MOMENTUM)
        if momentum is not None:
            self._momentum[part] = momentum[pick].clone()
        whole.data = whole.data.new_empty(0)
        whole.grad = None

    def part_of(self, whole: Tensor) -> nn.Parameter:
        """Return this node's part of a weight that is cut."""
        return next(cut.part for cut in self.cuts if cut.whole is whole)

    def make_optimizers(self, shared: nn.Module, config: Config) -> tuple[optim.SGD, optim.SGD]:
        """Return two: of the weights that all nodes have, and of this node's parts."""
        ours = make_optimizer(shared, config)
        for parameter in shared.parameters():
            if parameter in self._optimizer.state:
                ours.state[parameter] = self._optimizer.state[parameter]
        own = make_optimizer(nn.ParameterList([cut.part for cut in self.cuts]), config)
        for part, momentum in self._momentum.items():
            own.state[part][_MOMENTUM] = momentum
        return ours, own

    def collect(self, exchange: Exchange, to: Sequence[int]) -> None:
        """Make the network whole again on some nodes; all must call this."""
        for cut in self.cuts:
            weight = _bring_together(cut, cut.part.data, exchange, to)
            if weight is not None:
                cut.whole.data = weight
            if cut.part in self._momentum:
                momentum = _bring_together(cut, self._momentum[cut.part], exchange, to)
                if momentum is not None:
                    self._optimizer.state[cut.whole][_MOMENTUM] = momentum

    def release(self) -> None:
        """Drop the whole weights where they were collected; the parts go on."""
        for cut in self.cuts:
            cut.whole.data = cut.part.data.new_empty(0)
            self._optimizer.state.pop(cut.whole, None)

    def make_room(self) -> None:
        """Give the whole weights their shapes back, for other contents."""
        for cut in self.cuts:
            cut.whole.data = cut.part.data.new_empty(cut.shape)


def _bring_together(cut: Cut, own: Tensor, exchange: Exchange, to: Sequence[int]) -> Tensor | None:
    """Return the whole of a tensor of which every node has a part, to those who want it."""
    sends = [exchange.start_send(own, rank) for rank in to if rank != exchange.rank]
    whole = own.new_empty(cut.shape) if exchange.rank in to else None
    if whole is not None:
        for rank in range(exchange.size):
            place = cut.slice_of(whole, rank)
            is_own = rank == exchange.rank
            place.copy_(own if is_own else exchange.receive(place.shape, own.dtype, rank))
    for finish in sends:
        finish()
    return whole
