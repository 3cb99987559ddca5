"""Adding up over a star: all send to one node, which adds and sends the sum back.

gloo's all-reduce passes every part of a message through every node in turn, 2(n-1) hops; where
one of them is slow to wake up, each hop waits for it. A star has two hops whatever n is. It
moves n times the bytes through its centre, so that it loses where messages are long or the
centre's link is slow: both are timed when a group forms.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_TRIALS = 5
_CHEAP_S = 0.05  # where both ways together take longer than this, one trial must do
LONGEST_BYTES = 4 << 20  # beyond, the centre's link would be the bottleneck: not even tried


class Wires(Protocol):
    """What a star needs of a group."""

    def start_send(self, tensor: Tensor, rank: int) -> dist.Work:
        """Begin to send a tensor to one member."""
        ...

    def start_receive(self, tensor: Tensor, rank: int) -> dist.Work:
        """Begin to fill a tensor with what a member sends."""
        ...

    def wait(self, work: dist.Work) -> None:
        """Wait for what was begun."""
        ...

    def sum_around(self, tensor: Tensor) -> None:
        """Add up a tensor over all members by an all-reduce, in place."""
        ...


class Star:
    """Adds up tensors over a group through its centre; all members get the same bits."""

    def __init__(self, wires: Wires, rank: int, size: int, centre: int) -> None:
        self._wires = wires
        self._rank = rank
        self._others = [other for other in range(size) if other != centre]
        self._centre = centre
        self._parts: list[Tensor] = []
        self._expected: list[dist.Work] = []

    def expect(self, like: Tensor) -> None:
        """Let the centre take in what the others send from now on, while it is still at work.

        The next sum must be of a tensor like this one.
        """
        if self._rank != self._centre:
            return
        if (
            not self._parts
            or self._parts[0].shape != like.shape
            or self._parts[0].dtype != like.dtype
        ):
            self._parts = [torch.empty_like(like) for _ in self._others]
        pairs = zip(self._parts, self._others, strict=True)
        self._expected = [self._wires.start_receive(part, other) for part, other in pairs]

    def sum(self, tensor: Tensor) -> None:
        """Add up a tensor over all members, in place."""
        wires = self._wires
        if self._rank != self._centre:
            wires.wait(wires.start_send(tensor, self._centre))
            wires.wait(wires.start_receive(tensor, self._centre))
            return
        if not self._expected:
            self.expect(tensor)
        expected, self._expected = self._expected, []
        for work, part in zip(expected, self._parts, strict=True):
            wires.wait(work)
            tensor += part  # always in the same order: all runs round alike
        for work in [wires.start_send(tensor, other) for other in self._others]:
            wires.wait(work)


def is_star_faster(star: Star, wires: Wires, numel: int, dtype: torch.dtype) -> bool:
    """Time both ways with a message of the real size; every member comes to the same answer."""
    message = torch.zeros(numel, dtype=dtype)
    ways = (star.sum, wires.sum_around)
    for add_up in ways:
        add_up(message)  # the first one is cold
    times = [_time_once(ways, message, wires)]
    if sum(times[0]) < _CHEAP_S:  # a single time says little: nodes wake up when they may
        times += [_time_once(ways, message, wires) for _ in range(_TRIALS - 1)]
    return statistics.median(t[0] for t in times) < statistics.median(t[1] for t in times)


def _time_once(
    ways: Sequence[Callable[[Tensor], None]], message: Tensor, wires: Wires
) -> tuple[float, ...]:
    """Return how long each way took, as the mean over all members: all get the same numbers."""
    took = torch.zeros(len(ways) + 1, dtype=torch.float64)
    took[-1] = 1
    for place, add_up in enumerate(ways):
        started = time.perf_counter()
        add_up(message)
        took[place] = time.perf_counter() - started
    wires.sum_around(took)
    return tuple((took[:-1] / took[-1]).tolist())
