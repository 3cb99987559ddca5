"""How many neurons and samples each node computes: by speed, as far as its memory goes."""

from collections import Counter
from collections.abc import Hashable, Sequence

from convoy.outer.allocation.shares import apportion_within

_COPIES = 3  # of a weight: itself, its gradient, its momentum
_USABLE = 0.8  # of the memory that is free: the rest is for activations


def allot(
    outputs: int, speeds: Sequence[float], neuron_bytes: int, free_bytes: Sequence[float]
) -> tuple[int, ...]:
    """Return each node's neurons, at least one, in proportion to speed where memory allows.

    Raises:
        MemoryError: all nodes together have not enough.

    >>> allot(100, [3, 1], neuron_bytes=1, free_bytes=[1e6, 1e6])
    (75, 25)
    >>> allot(100, [3, 1], neuron_bytes=10, free_bytes=[1500, 9000])
    (40, 60)
    """
    most = [max(1, int(free * _USABLE / (_COPIES * neuron_bytes))) for free in free_bytes]
    if sum(most) < outputs:
        raise MemoryError
    return apportion_within(speeds, outputs, most, 1)


def samples_within(sample_bytes: int, free_bytes: Sequence[float]) -> tuple[int, ...]:
    """Return how many samples' activations each node has room for, beside its neurons.

    >>> samples_within(100, [10_000, 100])
    (20, 1)
    """
    room = [free * (1 - _USABLE) for free in free_bytes]
    return tuple(max(1, round(one) // max(1, sample_bytes)) for one in room)


def memory_of_each(free_bytes: Sequence[float], places: Sequence[Hashable]) -> list[float]:
    """Return each node's part of what is free, which nodes at the same place share.

    >>> memory_of_each([90, 90, 50], ["a", "a", "b"])
    [45.0, 45.0, 50.0]
    """
    crowd = Counter(places)
    return [free / crowd[place] for free, place in zip(free_bytes, places, strict=True)]


def bounds_of(parts: Sequence[int]) -> tuple[int, ...]:
    """Return where parts that lie behind each other begin and end.

    >>> bounds_of([2, 3])
    (0, 2, 5)
    """
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part)
    return tuple(ends)
