"""IDPA: the data set is handed out in batches, each so that all nodes would finish together.

The first batch goes by nominal speed, for nothing was measured yet. From then on the time per
sample of each node is known, and a batch is divided so that the predicted times of the next
iteration, over everything a node holds by then, become equal:

    T = (samples held by all + batch) / sum_j 1/t_j
    node j then holds T / t_j

A node never gives samples back: one that has become slow gets nothing new, and the others share
the batch. (BPT-CNN, as reconstructed: the paper's own formulas were not at hand.)
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from convoy.outer.allocation.shares import apportion

Mode = Literal["cumulative", "per-batch", "nominal", "uniform"]


def batch_volumes(samples: int, batches: int) -> tuple[int, ...]:
    """Return how many samples each batch of the allocation holds.

    >>> batch_volumes(1000, 3)
    (333, 333, 334)
    """
    edges = [a * samples // batches for a in range(batches + 1)]
    return tuple(after - before for before, after in itertools.pairwise(edges))


def iterations_with(batches: int, iterations: int) -> int:
    """Return how many iterations visit as many samples as so many over the whole set would.

    Iteration a sees only a of A batches, so that the first A are worth (A + 1) / 2.

    >>> iterations_with(4, 10)
    12
    """
    return iterations + batches // 2  # (A - 1) / 2, rounded up


@dataclass(frozen=True, slots=True)
class Holding:
    """What one node holds, and how fast it was found to be.

    Attributes:
        samples: that it was given so far.
        nominal: its speed by the data sheet or a short probe, in any unit common to all nodes.
        time_s: measured seconds per sample; None until it has trained.
    """

    samples: int
    nominal: float
    time_s: float | None = None


def allocate(
    holdings: Sequence[Holding], volume: int, mode: Mode = "cumulative"
) -> tuple[int, ...]:
    """Divide a batch of so many samples; return each node's increment.

    >>> allocate([Holding(0, 2.0), Holding(0, 2.5), Holding(0, 3.0)], 300)
    (80, 100, 120)
    """
    if mode == "uniform":
        return apportion([1.0] * len(holdings), volume)
    if mode == "nominal" or all(h.time_s is None for h in holdings):
        return apportion([h.nominal for h in holdings], volume)
    times = _times(holdings)
    if mode == "per-batch":
        return apportion([1 / time_s for time_s in times], volume)
    return _equalise([h.samples for h in holdings], times, volume)


def finish_time(holdings: Sequence[Holding], volume: int) -> float:
    """Return the time of the next iteration if all nodes finished it together."""
    held = sum(h.samples for h in holdings) + volume
    return held / sum(1 / time_s for time_s in _times(holdings))


def _times(holdings: Sequence[Holding]) -> list[float]:
    """Return seconds per sample; a node without any is judged by its nominal speed.

    What a nominal unit is worth is read off the nodes that were measured.
    """
    known = [(h.time_s, h.nominal) for h in holdings if h.time_s is not None]
    if not known:
        return [1 / h.nominal for h in holdings]
    worth = sum(time_s * nominal for time_s, nominal in known) / len(known)
    return [h.time_s if h.time_s is not None else worth / h.nominal for h in holdings]


def _equalise(held: Sequence[int], times: Sequence[float], volume: int) -> tuple[int, ...]:
    active = list(range(len(held)))
    while True:
        total = sum(held[j] for j in active) + volume
        finish_s = total / sum(1 / times[j] for j in active)
        wanted = {j: finish_s / times[j] - held[j] for j in active}
        enough = [j for j in active if wanted[j] < 0]  # it is slower than was thought
        if not enough or enough == active:  # all: nothing but a rounding error is left to share
            parts = [max(0.0, wanted.get(j, 0.0)) for j in range(len(held))]
            return apportion(parts, volume)
        active = [j for j in active if j not in enough]


def hand_out(increments: Mapping[int, int], start: int) -> dict[int, range]:
    """Return which stretch of the shuffled data set each node gets, beginning at a place.

    >>> hand_out({0: 2, 3: 1}, 10)
    {0: range(10, 12), 3: range(12, 13)}
    """
    stretches = {}
    for node, count in increments.items():
        stretches[node] = range(start, start + count)
        start += count
    return stretches
