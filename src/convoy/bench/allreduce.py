"""How long does it take to add up a vector over the ranks of one machine?

Our sum, as it chooses by itself (here: through shared memory), beside gloo's all-reduce, which is
what torch.distributed does on CPUs. The other rows are our schedules over gloo's own messages, as
between hosts, where there is no memory to share. All take turns, length by length; what each gives
is checked in every turn.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, distributed

from convoy.bench.peers import ddp
from convoy.bench.peers.crew import Crew, Link
from convoy.bench.report import Bar, Report, Row, median_ratio
from convoy.collectives.allreduce import AllReduce
from convoy.collectives.cost import Choice, Method
from convoy.collectives.exchange import Exchange
from convoy.collectives.schedule import butterfly_size, even_bounds
from convoy.collectives.wires import ProcessGroupWires

SIZES = tuple(4**power << 10 for power in range(1, 9))  # bytes
AT_MOST, AT_LEAST = 1.05, 1.5
OURS, GLOO = "convoy", "gloo's all-reduce"
METHODS = (Method.DOUBLING, Method.HALVING, Method.RING, Method.TREE)
_PATIENCE_S = 120.0
_MANY_RANKS, _MANY_CORES = 8, 16
_TURN_BYTES = 8 << 20  # so many are added up in a turn, but no vector more often than told

_Values = dict[tuple[int, int, str], tuple[float, ...]]  # by ranks, size and way: ms


@dataclass(frozen=True, slots=True)
class Plan:
    """How thoroughly to measure.

    Attributes:
        repeats: turns of the two that are compared.
        others: turns of the others.
        calls: sums of a turn, at most.
        every: one in so many sizes is measured with the others too.
    """

    repeats: int
    others: int
    calls: int
    every: int = 1


PLAN, QUICK_PLAN = Plan(9, 3, calls=100), Plan(3, 1, calls=25, every=3)


def bench_allreduce(*, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure all ways in turn, for each number of ranks."""
    plan = QUICK_PLAN if quick else PLAN
    values: _Values = {}
    for ranks in rank_counts(len(os.sched_getaffinity(0))):
        with ddp.open_store() as address:
            given = [(rank, ranks, address) for rank in range(ranks)]
            with Crew(_be_rank, given) as crew:
                for size in SIZES:
                    values.update(_measure(crew, ranks, size, plan))
                    tell(_in_words(values, ranks, size))
                crew.send(None)
    return Report("allreduce", plan.repeats, rows(values), bars(values))


def rank_counts(cores: int) -> tuple[int, ...]:
    """Return how many ranks are measured on so many cores.

    >>> rank_counts(2), rank_counts(16)
    ((2, 4), (2, 4, 8))
    """
    return (2, 4, _MANY_RANKS) if cores >= _MANY_CORES else (2, 4)


def label(size: int) -> str:
    """Return a number of bytes in words.

    >>> label(4096), label(1 << 20)
    ('4 KB', '1 MB')
    """
    return f"{size >> 20} MB" if size >= 1 << 20 else f"{size >> 10} KB"


def _measure(crew: Crew, ranks: int, size: int, plan: Plan) -> _Values:
    """Let the ways take turns; a turn takes as long as its slowest rank."""
    found: _Values = {}
    others = plan.others if SIZES.index(size) % plan.every == 0 else 0
    for turn in range(plan.repeats):
        ways = [OURS, GLOO, *(METHODS if turn < others else ())]
        for way in ways:
            crew.send((way, size, plan.calls))
            ms = 1e3 * max(crew.receive(_PATIENCE_S))
            found[ranks, size, way] = (*found.get((ranks, size, way), ()), ms)
    return found


def _in_words(values: _Values, ranks: int, size: int) -> str:
    ratio = median_ratio(values[ranks, size, OURS], values[ranks, size, GLOO])
    return f"{ranks} ranks, {label(size)}: convoy takes {ratio:.2f} of gloo's time"


def rows(values: _Values) -> tuple[Row, ...]:
    """Return a row for each way at each size."""
    return tuple(
        Row(f"{ranks} ranks, {label(size)}", _name(way), "ms", found)
        for (ranks, size, way), found in values.items()
    )


def _name(way: str) -> str:
    return way if way in (OURS, GLOO) else f"convoy's {way} over gloo's messages"


def bars(values: _Values) -> tuple[Bar, ...]:
    """Compare with gloo: the worst size and the best, for each number of ranks."""
    made = []
    for ranks in dict.fromkeys(ranks for ranks, _, _ in values):
        sizes = dict.fromkeys(size for count, size, _ in values if count == ranks)
        ratios = {
            size: median_ratio(values[ranks, size, OURS], values[ranks, size, GLOO])
            for size in sizes
        }
        worst, best = max(ratios, key=ratios.__getitem__), min(ratios, key=ratios.__getitem__)
        name = f"{ranks} ranks: {OURS} / {GLOO}, the worst ({label(worst)})"
        made.append(Bar(name, ratios[worst], at_most=AT_MOST))
        name = f"{ranks} ranks: {GLOO} / {OURS}, the best ({label(best)})"
        made.append(Bar(name, 1 / ratios[best], at_least=AT_LEAST))
    return tuple(made)


# ---------------------------------------------------------------- a rank


def _be_rank(link: Link, rank: int, size: int, address: str) -> None:
    with ddp.group(address, rank, size):
        wires = ProcessGroupWires(deadline_s=_PATIENCE_S)
        ours = AllReduce(wires, rank, size, deadline_s=_PATIENCE_S)
        exchange = Exchange(wires)
        ways: dict[str, Callable[[Tensor], object]] = {
            OURS: ours.sum,
            GLOO: distributed.all_reduce,
            **{method: partial(_follow, exchange, method, rank, size) for method in METHODS},
        }
        while (order := link.receive()) is not None:
            way, num_bytes, most = order
            calls = max(1, min(most, _TURN_BYTES // num_bytes))
            vector = torch.empty(num_bytes // 4)
            link.send(_time_sums(ways[way], vector, rank, size, calls))
        ours.close()


def _follow(exchange: Exchange, method: Method, rank: int, size: int, vector: Tensor) -> None:
    parts = {Method.HALVING: butterfly_size(size), Method.RING: size}.get(method, 1)
    bounds = even_bounds(vector.numel(), parts)
    choice = Choice(method, tuple(range(size)), bounds, 0.0, "")
    exchange.run(choice.schedule(rank), vector)


def _time_sums(
    add_up: Callable[[Tensor], object], vector: Tensor, rank: int, size: int, calls: int
) -> float:
    """Return the seconds that a sum takes, after one that is checked."""
    torch.arange(vector.numel(), out=vector).remainder_(97).mul_(rank + 1)
    add_up(vector)
    _check(vector, size)
    vector.zero_()
    for _ in range(calls // 10 + 1):
        add_up(vector)
    distributed.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        add_up(vector)
    return (time.perf_counter() - started) / calls


def _check(vector: Tensor, size: int) -> None:
    """Make sure that a sum is right: these numbers leave nothing to round."""
    expected = torch.arange(vector.numel(), dtype=torch.float32).remainder_(97)
    assert torch.equal(vector, expected.mul_(size * (size + 1) / 2)), "a sum is wrong"
