"""DDP around the convolutions, DTensor for the fully connected layers: torch's own hybrid.

    trunk   DDP          own samples
    fc1     by columns   features of all samples are gathered; the backward pass scatters their sums
    fc2     by rows      partial sums are scattered, so that each rank has its own samples again
    top     DDP          own samples, fc3

Between fc1 and fc2 nothing travels. A rank's loss is the sum over its own samples. What is cut
sees the samples of all ranks, so its gradients are sums over the batch already; DDP, in contrast,
takes a mean over the ranks. Both come out right if the gradient changes its scale where it passes
from one to the other.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from convoy.bench.peers import Peer, Step, Task, ddp
from convoy.bench.peers.alone import Loop, Samples, make_model

_FIRST_CUT, _LAST_CUT = "fc1", "fc2"


class HybridNet(nn.Module):
    """A network of the zoo that ends in fc1, fc2 and fc3, spread over the group's ranks."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        model, settings = make_model(task), dict(task.ddp)
        layers = list(_without_inplace(model).named_children())
        names = [name for name, _ in layers]
        first, last = names.index(_FIRST_CUT), names.index(_LAST_CUT) + 1
        trunk, cut, top = (
            nn.Sequential(OrderedDict(part))
            for part in (layers[:first], layers[first:last], layers[last:])
        )
        self.trunk = ddp.wrap_model(trunk, **settings)
        self.cut = _cut_over_ranks(cut, task.num_nodes)
        self.top = ddp.wrap_model(top, **settings)
        self._num_nodes = task.num_nodes

    def forward(self, images_NCHW: Tensor) -> Tensor:  # noqa: N803 - shapes are in names
        """Return the logits of own samples."""
        features: Tensor = self.trunk(images_NCHW)
        features.register_hook(lambda gradient: gradient * self._num_nodes)
        hidden: Tensor = self.cut(features)
        hidden.register_hook(lambda gradient: gradient / self._num_nodes)
        logits: Tensor = self.top(hidden)
        return logits


def _without_inplace(model: nn.Module) -> nn.Module:
    """Let activations write to new tensors: what comes out of a DTensor must not be written to."""
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return model


def _cut_over_ranks(layers: nn.Sequential, num_nodes: int) -> nn.Module:
    plan = {
        _FIRST_CUT: ColwiseParallel(input_layouts=Shard(0)),
        _LAST_CUT: RowwiseParallel(output_layouts=Shard(0)),
    }
    found = parallelize_module(layers, init_device_mesh("cpu", (num_nodes,)), plan)
    # A plan whose names match nothing does nothing, without a word.
    assert all(isinstance(weight, DTensor) for weight in found.parameters())
    return found


class LocalSGD(optim.SGD):
    """SGD over this rank's own numbers.

    torch has no fused update of DTensors, and the others take several passes over all weights.
    """

    def __init__(self, model: nn.Module, task: Task) -> None:
        self._weights = list(model.parameters())
        self._own = [nn.Parameter(_local(weight.detach())) for weight in self._weights]
        super().__init__(
            self._own,
            lr=task.lr,
            momentum=task.momentum,
            nesterov=task.nesterov,
            weight_decay=task.weight_decay,
            fused=True,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the whole network."""
        for weight in self._weights:
            weight.grad = None
        super().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401
        """Move the weights, which lie where the network's do."""
        for weight, own in zip(self._weights, self._own, strict=True):
            own.grad = None if weight.grad is None else _local(weight.grad)
        super().step(closure)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def make_loop(task: Task, node: int, model: HybridNet) -> Loop:
    """Return the loop of a rank that is in the group."""
    samples = Samples(task, node, task.equal_shares[node])
    return Loop(task, model, LocalSGD(model, task), samples, task.batch / task.num_nodes)


@contextmanager
def _join(task: Task, node: int, address: str) -> Iterator[Step]:
    with ddp.group(address, node, task.num_nodes):
        yield make_loop(task, node, HybridNet(task)).step


DTENSOR = Peer(lockstep=True, meet=ddp.DDP.meet, join=_join)
