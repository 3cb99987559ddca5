"""Which emulated node runs on which core, so that each has the part of a core it was promised.

Where nodes' parts fill the cores, a scheduler that moves them about lets now one, now another
come short; a real machine would not do that to its neighbour.
"""

import contextlib
import os
from collections.abc import Sequence

_FULL = 1.0 + 1e-9


def assign_cores(speeds: Sequence[float], cores: Sequence[int]) -> tuple[int | None, ...]:
    """Give every node a core so that no core is promised twice, or nobody any if that fails.

    >>> assign_cores([0.8, 0.6, 0.4, 0.2], [0, 1])
    (0, 1, 1, 0)
    >>> assign_cores([0.8, 0.8, 0.4], [0, 1])
    (None, None, None)
    """
    taken = dict.fromkeys(cores, 0.0)
    chosen: list[int | None] = [None] * len(speeds)
    for node in sorted(range(len(speeds)), key=lambda n: -speeds[n]):
        fitting = [core for core in cores if taken[core] + speeds[node] <= _FULL]
        if not fitting:
            return (None,) * len(speeds)
        core = min(fitting, key=lambda c: taken[c])
        chosen[node] = core
        taken[core] += speeds[node]
    return tuple(chosen)


def pin(pid: int, cores: set[int]) -> None:
    """Keep a process, with the threads it has and will have, on some cores."""
    with contextlib.suppress(OSError):  # it is gone, or its threads come and go
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(task), cores)
