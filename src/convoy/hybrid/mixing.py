"""Butterfly mixing: one exchange per step instead of the sum of all gradients.

Every node moves the weights that all have by its own gradient, then takes the mean with one
partner, another one at each step. After log2(n) steps whatever one node learned has reached all.
Meanwhile nodes differ a little, so that before a test or a checkpoint the mean over all is taken.

A node's gradient is of its own samples' part of the batch's loss, times the number of nodes: so
the mean over all nodes moves exactly as with the sum of all gradients, whatever their shares.
Momentum stays a node's own between two such moments.
"""

from collections.abc import Collection

import torch
from torch import Tensor, nn, optim

from convoy.outer.membership import Group


class Mixing:
    """Takes the place of a reduction: the step's few numbers are added up, gradients are not.

    Args:
        shared: the weights that all nodes have.
        optimizer: moves them.
        group: of the nodes.
        size: how many there are.
    """

    def __init__(
        self, shared: nn.Module, optimizer: optim.Optimizer, group: Group, size: int
    ) -> None:
        self._parameters = [p for p in shared.parameters() if p.requires_grad]
        self._optimizer, self._group, self._size = optimizer, group, size

    def begin(self, group: Group, ready: Collection[Tensor] = ()) -> None:
        """Nothing goes out before the step is over."""

    def close(self) -> None:
        """Nothing is watched."""

    def finish(self, extras: Tensor) -> Tensor:
        """Return the sums of the step's numbers."""
        self._group.sum(extras)
        return extras

    @torch.no_grad()
    def scale(self) -> None:
        """Make this node's gradients stand for those of all."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, self._size)

    @torch.no_grad()
    def mix(self, step: int) -> None:
        """Take the mean with this step's partner."""
        weights = [parameter.data for parameter in self._parameters]
        flat = torch.cat([weight.flatten() for weight in weights])
        self._group.mix(flat, step)
        _put(flat, weights)

    @torch.no_grad()
    def settle(self) -> None:
        """Take the mean over all nodes, of weights and of momentum."""
        held = [self._optimizer.state[p].get("momentum_buffer") for p in self._parameters]
        tensors = [p.data for p in self._parameters] + [m for m in held if m is not None]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        self._group.sum(flat)
        _put(flat.div_(self._size), tensors)


def is_power_of_two(count: int) -> bool:
    """Tell whether a butterfly has a partner for everyone."""
    return count & (count - 1) == 0


def _put(flat: Tensor, tensors: list[Tensor]) -> None:
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(
        tensors, [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
    )
