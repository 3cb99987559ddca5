"""What a sum takes, before it is done: a model of latency, bandwidth and additions.

    doubling   lg P (a + n b + n g)
    halving    2 lg P a + 2 n (P-1)/P b + n (P-1)/P g
    ring       2 (P-1) a + 2 n (P-1)/P b + n (P-1)/P g
    tree       2 lg P (a + n b) + lg P n g
    mixing     a + n b + n g

for n bytes on P ranks; a is the latency, b and g are seconds per byte sent and added. Where P is no
power of two, doubling and halving take two messages of n bytes and n additions more.

That is for equal links. For unequal ones a schedule is gone through round by round: a round lasts
as long as its slowest exchange, which is as fast as the slower of its two links. The same walk
shows which rank should stand where, and how long the parts should be.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from math import ceil, log2

from convoy.collectives.schedule import (
    Round,
    Schedule,
    butterfly_size,
    doubling,
    even_bounds,
    halving,
    part_of,
    place_of,
    relabelled,
    ring,
    tree,
)

_POWERS = (0.5, 1.0, 2.0)  # of the speed, that parts are tried in proportion to


class Method(StrEnum):
    """How a vector is added up over ranks."""

    DOUBLING = "doubling"
    HALVING = "halving"
    RING = "ring"
    TREE = "tree"
    AROUND = "around"  # whatever the wires themselves offer


@dataclass(frozen=True, slots=True)
class Link:
    """What messages of a rank take.

    Attributes:
        latency_s: of a message, however short.
        byte_s: of a byte, one way.
        back_s: what a byte takes more while another goes the other way. 0 where both directions
            are independent; like `byte_s` where they share the air, or a core.
        add_s: to add a byte to another.
    """

    latency_s: float
    byte_s: float
    back_s: float = 0.0
    add_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """What a way was measured to take: a fixed time, and one per byte."""

    fixed_s: float
    byte_s: float

    def seconds(self, num_bytes: int) -> float:
        """Return how long so many bytes take."""
        return self.fixed_s + num_bytes * self.byte_s


@dataclass(frozen=True, slots=True)
class Choice:
    """How to add up vectors of some length.

    Attributes:
        method: the way.
        order: which rank stands where: that of place i is `order[i]`.
        bounds: of the parts, where there are any.
        seconds: what it should take.
        reason: in words.
    """

    method: Method
    order: tuple[int, ...]
    bounds: tuple[int, ...]
    seconds: float
    reason: str

    def schedule(self, rank: int) -> Schedule:
        """Return what a rank has to do."""
        return relabelled(self._placed(self.order.index(rank)), self.order)

    def _placed(self, place: int) -> Schedule:
        size, length = len(self.order), self.bounds[-1]
        match self.method:
            case Method.DOUBLING:
                return doubling(place, size, length)
            case Method.HALVING:
                return halving(place, size, self.bounds)
            case Method.RING:
                return ring(place, size, self.bounds)
            case Method.TREE:
                return tree(place, size, length)
            case Method.AROUND:
                return ()


def choose(length: int, itemsize: int, links: Sequence[Link], around: Line | None = None) -> Choice:
    """Return the fastest way to add up so many numbers, by the model.

    Args:
        length: of the vector, in numbers.
        itemsize: bytes of a number.
        links: of each rank.
        around: what the wires' own sum takes, if they have one.
    """
    candidates = [_judged(choice, itemsize, links) for choice in _candidates(length, links)]
    if around is not None:
        order = tuple(range(len(links)))
        seconds = around.seconds(length * itemsize)
        candidates.append(Choice(Method.AROUND, order, (0, length), seconds, ""))
    by_time = sorted(candidates, key=lambda choice: choice.seconds)
    best = by_time[0]
    other = next((choice for choice in by_time if choice.method != best.method), best)
    reason = (
        f"{best.method} should take {best.seconds * 1e3:.3g} ms,"
        f" {other.method} {other.seconds * 1e3:.3g} ms"
    )
    return Choice(best.method, best.order, best.bounds, best.seconds, reason)


def method_seconds(method: Method, num_bytes: int, size: int, link: Link) -> float:
    """Return what a method takes on equal links, by its formula."""
    butterfly = butterfly_size(size)
    rounds = butterfly.bit_length() - 1
    whole = link.latency_s + num_bytes * link.byte_s
    added = num_bytes * link.add_s
    fold = 0.0 if butterfly == size else 2 * whole + added
    match method:
        case Method.DOUBLING:
            return rounds * (whole + added) + fold
        case Method.HALVING:
            part = (butterfly - 1) / butterfly
            sent = 2 * rounds * link.latency_s + 2 * num_bytes * part * link.byte_s
            return sent + part * added + fold
        case Method.RING:
            part = (size - 1) / size
            sent = 2 * (size - 1) * link.latency_s + 2 * num_bytes * part * link.byte_s
            return sent + part * added
        case Method.TREE:
            return ceil(log2(size)) * (2 * whole + added)
        case Method.AROUND:
            raise AssertionError("what the wires offer is measured")


def mixing_seconds(num_bytes: int, link: Link) -> float:
    """Return what a step of butterfly mixing takes on equal links."""
    return link.latency_s + num_bytes * (link.byte_s + link.add_s)


def schedule_seconds(schedules: Sequence[Schedule], itemsize: int, links: Sequence[Link]) -> float:
    """Return what the schedules of all ranks take together, on links of any speed."""
    return sum(
        max(_round_seconds(rank, step, itemsize, links) for rank, step in enumerate(steps))
        for steps in zip(*schedules, strict=True)
    )


def _round_seconds(rank: int, step: Round, itemsize: int, links: Sequence[Link]) -> float:
    mine = links[rank]
    messages = [(each.peer, itemsize * (each.stop - each.start)) for each in step.sends]
    sent = sum(size for _, size in messages)
    arriving = [(each.peer, itemsize * (each.stop - each.start)) for each in step.receives]
    received = sum(size for _, size in arriving)
    slowest = max(
        (
            max(mine.latency_s, links[peer].latency_s) + size * max(mine.byte_s, links[peer].byte_s)
            for peer, size in messages + arriving
        ),
        default=0.0,
    )
    added = itemsize * sum(each.stop - each.start for each in step.receives if each.adds)
    return slowest + min(sent, received) * mine.back_s + added * mine.add_s


def _judged(choice: Choice, itemsize: int, links: Sequence[Link]) -> Choice:
    schedules = [choice.schedule(rank) for rank in range(len(links))]
    seconds = schedule_seconds(schedules, itemsize, links)
    return Choice(choice.method, choice.order, choice.bounds, seconds, choice.reason)


# ---------------------------------------------------------------- who stands where, with how much


def _candidates(length: int, links: Sequence[Link]) -> Iterator[Choice]:
    """Yield every method, in every order of ranks and with all sizes of parts worth a try."""
    size = len(links)
    for order in _orders(links):
        yield Choice(Method.DOUBLING, order, (0, length), 0.0, "")
        yield Choice(Method.TREE, order, (0, length), 0.0, "")
        for bounds in _part_bounds(length, [links[rank] for rank in order]):
            yield Choice(Method.HALVING, order, bounds, 0.0, "")
        yield Choice(Method.RING, order, even_bounds(length, size), 0.0, "")


def _orders(links: Sequence[Link]) -> list[tuple[int, ...]]:
    """Return the ranks as they are, the fastest first, and the slowest first.

    Where some sit out, the order says who: the first ones are in pairs.
    """
    ranks = range(len(links))
    by_speed = sorted(ranks, key=lambda rank: (links[rank].byte_s, links[rank].latency_s))
    orders = [tuple(ranks), tuple(by_speed), tuple(reversed(by_speed))]
    return orders[:1] if _are_equal(links) else list(dict.fromkeys(orders))


def _part_bounds(length: int, links: Sequence[Link]) -> list[tuple[int, ...]]:
    """Return how to cut a vector for halving: evenly, and with more for the faster places."""
    size = len(links)
    places = butterfly_size(size)
    even = even_bounds(length, places)
    if _are_equal(links):
        return [even]
    speeds = [0.0] * places
    for rank, link in enumerate(links):
        place = place_of(rank, size)
        if place is not None:
            speeds[part_of(place, places)] = 1.0 / link.byte_s
    weights = [[speed**power for speed in speeds] for power in _POWERS]
    return list(dict.fromkeys([even, *(bounds_by_weight(length, each) for each in weights)]))


def bounds_by_weight(length: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Cut a length in proportion to weights.

    >>> bounds_by_weight(100, [3.0, 1.0])
    (0, 75, 100)
    """
    total = sum(weights)
    ends = [round(length * upto / total) for upto in accumulate(weights)]
    return (0, *ends[:-1], length)


def _are_equal(links: Sequence[Link]) -> bool:
    return all(link == links[0] for link in links)
