"""Which cores a measurement has: one of its own for each process, and no other."""

import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from convoy.launch.pinning import pin

_PROBE_S = 0.3
_PROBE_SIZE = 192  # of a matrix: a product takes a tenth of a millisecond


class Pins:
    """Slots of one whole core each, without any quota."""

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = cores

    def place(self, node: int, pid: int) -> None:
        """Keep a process on the core of a node."""
        pin(pid, {self._cores[node]})


def choose_cores(count: int) -> list[int]:
    """Return some of the cores that this process may use, if possible no two of them halves.

    Virtual machines share theirs with others, who come and go. Where there are more cores than
    asked for, those are taken that are fastest at present.
    """
    usable = os.sched_getaffinity(0)
    assert len(usable) >= count, f"{count} cores are asked for, {len(usable)} are there"
    speeds = speeds_of(usable) if len(usable) > count else {}
    return whole_first({core: _halves_of(core) for core in usable}, speeds)[:count]


def speeds_of(cores: Collection[int]) -> dict[int, float]:
    """Return how much each core computes while all of them do."""
    with ThreadPoolExecutor(len(cores)) as pool:
        return dict(zip(cores, pool.map(_speed_of, cores), strict=True))


def _speed_of(core: int) -> float:
    os.sched_setaffinity(0, {core})  # of this thread alone, which ends with its pool
    matrix = torch.full((_PROBE_SIZE, _PROBE_SIZE), 1 / _PROBE_SIZE)
    products, started = 0, time.perf_counter()
    while time.perf_counter() - started < _PROBE_S:
        torch.mm(matrix, matrix)
        products += 1
    return products / (time.perf_counter() - started)


def whole_first(
    halves: Mapping[int, Collection[int]], speeds: Mapping[int, float] | None = None
) -> list[int]:
    """Order cores so that those come first of which no two share the hardware of one.

    Args:
        halves: of each core, those that share its hardware.
        speeds: among cores that are alike in this, the faster go first.

    >>> whole_first({0: {0, 1}, 1: {0, 1}, 2: {2, 3}, 3: {2, 3}})
    [0, 2, 1, 3]
    >>> whole_first({0: {0}, 1: {1}, 2: {2}}, {0: 5.0, 1: 9.0, 2: 7.0})
    [1, 2, 0]
    """

    def halves_before(core: int) -> int:
        return sum(half < core for half in halves[core] if half in halves)

    return sorted(
        halves, key=lambda core: (halves_before(core), -(speeds or {}).get(core, 0), core)
    )


def read_list(text: str) -> set[int]:
    """Read a list of cores as the kernel writes it.

    >>> read_list("0-2,64")
    {0, 1, 2, 64}
    """
    ends = [part.split("-") for part in text.strip().split(",")]
    return {core for end in ends for core in range(int(end[0]), int(end[-1]) + 1)}


@contextmanager
def held_to(cores: Collection[int]) -> Iterator[None]:
    """Keep this process, and those it starts meanwhile, on some cores."""
    before = os.sched_getaffinity(0)
    pin(os.getpid(), set(cores))
    try:
        yield
    finally:
        pin(os.getpid(), before)


def _halves_of(core: int) -> set[int]:
    """Return the cores that share one's hardware, itself among them."""
    path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    try:
        return read_list(path.read_text())
    except (OSError, ValueError):  # not every system tells
        return {core}
