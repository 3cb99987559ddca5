"""A network that is run to learn about it, and left as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def borrow(net: nn.Module) -> Iterator[None]:
    """Put a network into training mode for a while: its statistics and mode come back after it.

    It is for the time before training: gradients are dropped.
    """
    running = [(buffer, buffer.clone()) for buffer in net.buffers()]
    was_training = net.training
    net.train()
    try:
        yield
    finally:
        for parameter in net.parameters():
            parameter.grad = None
        for buffer, former in running:
            buffer.copy_(former)
        net.train(was_training)
