"""How many neurons of a layer each node computes: by speed, as far as its memory goes."""

from collections.abc import Sequence

from convoy.outer.allocation.shares import apportion

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
    full: dict[int, int] = {}
    while True:
        open_ = [node for node in range(len(speeds)) if node not in full]
        left = outputs - sum(full.values())
        parts = apportion([speeds[node] for node in open_], left, 1)
        over = [node for node, part in zip(open_, parts, strict=True) if part > most[node]]
        if not over:
            found = full | dict(zip(open_, parts, strict=True))
            return tuple(found[node] for node in range(len(speeds)))
        full |= {node: most[node] for node in over}


def bounds_of(parts: Sequence[int]) -> tuple[int, ...]:
    """Return where parts that lie behind each other begin and end.

    >>> bounds_of([2, 3])
    (0, 2, 5)
    """
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part)
    return tuple(ends)
