"""Every node trains by itself with whole batches: what the nodes could do at most, together.

Its loop, the plainest there is, is also the one that the other systems are put around.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import cast

import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from convoy.bench.peers import Peer, Step, Task
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.compiling import compile_for_one_size
from convoy.inner.optimizer import make_optimizer
from convoy.models.dropout import torch_dropout
from convoy.models.zoo import build_model

_BATCHES_AT_HAND = 4


def arithmetic_of(task: Task) -> Arithmetic:
    """Return how a task's nodes compute."""
    return Arithmetic(torch.device("cpu"), task.precision, task.memory_format)


def make_model(task: Task) -> nn.Module:
    """Return the task's network with torch's own dropout; every node has the same weights."""
    model = build_model(task.model, task.in_shape, task.classes, task.seed)
    return arithmetic_of(task).place(torch_dropout(model))


def compiled_if_asked(task: Task, part: nn.Module) -> nn.Module:
    """Return a network, or a part of one, as the task says that it is run."""
    if not task.compiled:
        return part
    # Not part.compile(): that leaves a network of blocks in pieces, at half of this speed.
    return cast(nn.Module, compile_for_one_size(part, fullgraph=True))


class Samples:
    """Random images of one node, in memory as normalised floats: ready to be indexed."""

    def __init__(self, task: Task, node: int, size: int) -> None:
        generator = torch.Generator().manual_seed(node)
        count = size * _BATCHES_AT_HAND
        shape = (count, *task.in_shape)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        arithmetic = arithmetic_of(task)
        self._images = ((pixels.to(arithmetic.dtype) - 127.5) / 74.0).contiguous(
            memory_format=arithmetic.memory_format
        )
        self._labels = torch.randint(0, task.classes, (count,), generator=generator)
        self._parts = torch.randperm(count, generator=generator).split(size)
        self._next = 0

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the images and labels of the next step."""
        picked = self._parts[self._next]
        self._next = (self._next + 1) % len(self._parts)
        return self._images[picked], self._labels[picked]


class Loop:
    """A bare training loop over one node's samples.

    Args:
        task: gives the arithmetic.
        model, optimizer: whatever a system has wrapped them in.
        samples: what the node trains on.
        divisor: the gradient is that of the sum of the losses divided by this.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        optimizer: optim.Optimizer,
        samples: Samples,
        divisor: float,
    ) -> None:
        self._arithmetic = arithmetic_of(task)
        self._model = model.train()
        self._optimizer = optimizer
        self._samples = samples
        self._scale = torch.tensor(1 / divisor, dtype=self._arithmetic.dtype)

    def step(self) -> int:
        """Train on the next samples; return how many they were."""
        images, labels = self._samples.take()
        self._optimizer.zero_grad()
        with self._arithmetic.autocast():
            logits = self._model(images)
            loss = functional.cross_entropy(logits, labels, reduction="sum")
        loss.backward(self._scale)
        self._optimizer.step()
        return len(labels)


@contextmanager
def _join(task: Task, node: int, address: str) -> Iterator[Step]:
    del address
    model, samples = make_model(task), Samples(task, node, task.batch)
    optimizer = make_optimizer(model, task.config)
    yield Loop(task, compiled_if_asked(task, model), optimizer, samples, task.batch).step


ALONE = Peer(lockstep=False, meet=lambda num_nodes: nullcontext(""), join=_join)
