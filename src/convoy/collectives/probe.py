"""Measures what messages between ranks take, once; all ranks come to the same numbers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import partial

import torch
from torch import Tensor

from convoy.collectives.cost import Line, Link, choose
from convoy.collectives.exchange import Exchange
from convoy.collectives.schedule import Receive, Round, Schedule, Send, doubling, relabelled
from convoy.collectives.wires import AroundWires

_LONG_BYTES = 1 << 18  # over a link of 100 Mbit/s 20 ms
_SHORT_BYTES = 1 << 12
_TRIALS = 5
_TIMES = 3  # of a pair
_MOST_PARTNERS = 15
_CHANCE = 1.5
_MOST_STRETCH = 4.0  # beyond, something else was at work


def gather(exchange: Exchange, rank: int, ranks: Sequence[int], row: Tensor) -> Tensor:
    """Return the rows of some ranks, as a table: all of them call this."""
    table = torch.zeros(len(ranks), row.numel(), dtype=row.dtype)
    mine = ranks.index(rank)
    table[mine] = row
    flat = table.view(-1)
    # Rows that are not ours are zeros: to add them up changes no bit.
    exchange.run(relabelled(doubling(mine, len(ranks), flat.numel()), ranks), flat)
    return table


def measure_links(
    exchange: Exchange, rank: int, size: int, measured: Sequence[int]
) -> tuple[Link, ...]:
    """Measure the links of some ranks; all ranks call this, and get the same numbers.

    Each meets all others in turn, and its best partner counts: a fast link is not to be judged by
    the slow one at its other end.
    """
    row = torch.zeros(_TIMES + 1, dtype=torch.float64)
    if rank in measured:
        mine = measured.index(rank)
        found = [
            _measure_pair(exchange, measured[other], leads=mine < other)
            for other in opponents(mine, len(measured))
            if other != mine
        ]
        row[:_TIMES] = torch.tensor([min(times) for times in zip(*found, strict=True)])
        row[_TIMES] = _seconds_per_added_byte()
    table = gather(exchange, rank, range(size), row)
    links = levelled([_link(*table[each].tolist()) for each in measured])
    return _stretched(exchange, rank, size, measured, links)


def measure_around(exchange: Exchange, wires: AroundWires, rank: int, ranks: Sequence[int]) -> Line:
    """Measure the wires' own sum: a line through the times of two sizes."""
    vectors = [torch.zeros(size // 4) for size in (_SHORT_BYTES, _LONG_BYTES)]
    took = torch.tensor([_best_s(partial(wires.sum_around, vector)) for vector in vectors])
    short_s, long_s = gather(exchange, rank, ranks, took).mean(0).tolist()
    byte_s = _slope(short_s, long_s)
    return Line(max(0.0, long_s - _LONG_BYTES * byte_s), byte_s)


def levelled(links: Sequence[Link]) -> tuple[Link, ...]:
    """Return links, all equal if they differ by no more than chance does."""
    speeds = [link.byte_s for link in links]
    if max(speeds) > _CHANCE * min(speeds):
        return tuple(links)
    mean = Link(*(sum(each) / len(links) for each in zip(*map(astuple, links), strict=True)))
    return (mean,) * len(links)


def opponents(place: int, size: int) -> list[int]:
    """Return whom a place meets, round by round; itself where it has none.

    >>> [opponents(place, 3) for place in range(3)]
    [[0, 1, 2], [2, 0, 1], [1, 2, 0]]
    """
    return [(number - place) % size for number in range(min(size, _MOST_PARTNERS + 1))]


def _measure_pair(exchange: Exchange, peer: int, *, leads: bool) -> tuple[float, float, float]:
    """Return the seconds to swap a byte, to send many there and back, and to swap as many."""
    vector = torch.zeros(2 * _LONG_BYTES, dtype=torch.uint8)
    sent = (Send(peer, 0, _LONG_BYTES),)
    apart = (Receive(peer, _LONG_BYTES, 2 * _LONG_BYTES, False),)
    same = (Receive(peer, 0, _LONG_BYTES, False),)  # it must be here before it can go back
    ways: tuple[Schedule, ...] = (
        (Round((Send(peer, 0, 1),), (Receive(peer, 1, 2, False),)),),
        (Round(sent), Round((), apart)) if leads else (Round((), same), Round(sent)),
        (Round(sent, apart),),
    )
    short_s, in_turn_s, both_s = (_best_s(partial(exchange.run, way, vector)) for way in ways)
    return short_s, in_turn_s, both_s


def _link(short_s: float, in_turn_s: float, both_s: float, add_s: float) -> Link:
    """Return what the times of a pair say about a link."""
    byte_s = _slope(short_s, in_turn_s / 2)
    back_s = (both_s - short_s) / _LONG_BYTES - byte_s
    return Link(short_s, byte_s, min(byte_s, max(0.0, back_s)), add_s)


def _stretched(
    exchange: Exchange, rank: int, size: int, measured: Sequence[int], links: tuple[Link, ...]
) -> tuple[Link, ...]:
    """Return links on which the model's time for a long sum is what one took.

    Pairs do not show what a whole sum meets: links and cores that several messages share.
    """
    chosen = choose(_LONG_BYTES // 4, 4, links)
    took = torch.zeros(1, dtype=torch.float64)
    if rank in measured:
        schedule = relabelled(chosen.schedule(measured.index(rank)), measured)
        took += _best_s(partial(exchange.run, schedule, torch.zeros(_LONG_BYTES // 4)))
    mean_s = float(gather(exchange, rank, range(size), took).sum()) / len(measured)
    factor = min(_MOST_STRETCH, max(1.0, mean_s / chosen.seconds))
    return tuple(
        replace(link, byte_s=link.byte_s * factor, back_s=link.back_s * factor) for link in links
    )


def _slope(short_s: float, long_s: float) -> float:
    """Return the seconds of a byte; where a short message was no faster, chance was at work."""
    return max(long_s - short_s, long_s / 10) / _LONG_BYTES


def _seconds_per_added_byte() -> float:
    total, part = torch.zeros(_LONG_BYTES // 4), torch.zeros(_LONG_BYTES // 4)
    return _best_s(lambda: total.add_(part)) / _LONG_BYTES


def _best_s(act: Callable[[], object]) -> float:
    """Return the shortest time of some: what a noisy moment adds says nothing about a link."""
    times = []
    for _ in range(_TRIALS):
        started = time.perf_counter()
        act()
        times.append(time.perf_counter() - started)
    return min(times)
