"""Who sends what to whom, round by round: every way to add up a vector over ranks.

A schedule is what one rank does, as a tuple of rounds. All ranks have equally many rounds, and what
one sends in a round another receives in the same round; a rank that has nothing to do in a round
has an empty one. Places of a vector are counted in numbers, ranges are half-open, and a message
without numbers is not sent at all.

    doubling   whole vectors, to the rank whose number differs in one bit: lg P rounds
    halving    the same ranks, half of what is left each time, then back: 2 lg P rounds
    ring       a part to the next rank, round and round: 2 (P - 1) rounds
    tree       whole vectors, up to rank 0 and down again: 2 lg P rounds

Doubling and halving need a power of two. Where there are more ranks, the first few come in pairs:
the even one hands everything to the odd one, sits out, and is given the result.

All ranks end with the same bits. In doubling both of a pair add the same two numbers; in all
others each number is added up by one rank and copied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Send:
    """Numbers `start` to `stop` go to a rank."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Numbers `start` to `stop` come from a rank, and are added to ours or take their place."""

    peer: int
    start: int
    stop: int
    adds: bool


@dataclass(frozen=True, slots=True)
class Round:
    """What a rank sends and receives at the same time."""

    sends: tuple[Send, ...] = ()
    receives: tuple[Receive, ...] = ()


Schedule = tuple[Round, ...]  # of one rank
Range = tuple[int, int]


def doubling(rank: int, size: int, length: int) -> Schedule:
    """Return the butterfly by recursive doubling: for short vectors."""
    return _folded(rank, size, length, lambda place: _doubling(place, size, length))


def halving(rank: int, size: int, bounds: Sequence[int]) -> Schedule:
    """Return the butterfly by halving, then doubling: for long vectors.

    Args:
        rank: whose part this is.
        size: number of ranks.
        bounds: where the parts begin and end, in the order in which they lie in the vector. There
            are as many as the largest power of two within `size`; see `part_of` for whose they are.
    """
    assert len(bounds) == butterfly_size(size) + 1, "one part for each rank of the butterfly"
    return _folded(rank, size, bounds[-1], lambda place: _halving(place, size, bounds))


def ring(rank: int, size: int, bounds: Sequence[int]) -> Schedule:
    """Return the ring; rank r adds up part r + 1 last. There is one part for each rank."""
    parts = list(pairwise(bounds))
    assert len(parts) == size, "one part for each rank"
    left, right = (rank - 1) % size, (rank + 1) % size
    steps = [(step, True) for step in range(size - 1)]
    steps += [(step - 1, False) for step in range(size - 1)]
    return tuple(
        _round(right, parts[(rank - step) % size], left, parts[(rank - step - 1) % size], adds)
        for step, adds in steps
    )


def tree(rank: int, size: int, length: int) -> Schedule:
    """Return the binomial tree: everything is added up at rank 0, which sends the sum down."""
    whole = (0, length)
    up: list[Round] = []
    down: list[Round] = []
    for distance in _powers(size):
        at = rank % (2 * distance)
        if at == distance:
            up.append(_round(rank - distance, whole, None, whole, True))
            down.append(_round(None, whole, rank - distance, whole, False))
        elif at == 0 and rank + distance < size:
            up.append(_round(None, whole, rank + distance, whole, True))
            down.append(_round(rank + distance, whole, None, whole, False))
        else:
            up.append(Round())
            down.append(Round())
    return (*up, *reversed(down))


def partner(rank: int, size: int, step: int) -> int:
    """Return with whom a rank mixes in a step (butterfly mixing); itself if it is alone.

    >>> [partner(0, 8, step) for step in range(4)]
    [1, 2, 4, 1]
    """
    assert size == butterfly_size(size), "mixing needs a power of two"
    return rank ^ 1 << step % (size.bit_length() - 1) if size > 1 else rank


def mixing(rank: int, size: int, step: int, length: int) -> Schedule:
    """Return the one round of a step of butterfly mixing: whole vectors, in pairs."""
    peer = partner(rank, size, step)
    return (_round(peer, (0, length), peer, (0, length), True),) if peer != rank else ()


# ---------------------------------------------------------------- parts, places, orders


def butterfly_size(size: int) -> int:
    """Return the largest power of two within a number of ranks: so many do not sit out.

    >>> [butterfly_size(size) for size in (1, 2, 3, 6, 8)]
    [1, 2, 2, 4, 8]
    """
    return 1 << size.bit_length() - 1


def place_of(rank: int, size: int) -> int | None:
    """Return which place in the butterfly a rank has; None if it sits out.

    >>> [place_of(rank, 6) for rank in range(6)]
    [None, 0, None, 1, 2, 3]
    """
    extra = size - butterfly_size(size)
    if rank >= 2 * extra:
        return rank - extra
    return rank // 2 if rank % 2 else None


def part_of(place: int, places: int) -> int:
    """Return which part a place adds up when halving: the bits of its number, reversed.

    >>> [part_of(place, 4) for place in range(4)]
    [0, 2, 1, 3]
    """
    bits = places.bit_length() - 1
    return sum((place >> bit & 1) << bits - 1 - bit for bit in range(bits))


def even_bounds(length: int, parts: int) -> tuple[int, ...]:
    """Cut a length into equal parts; the first ones are longer by one if it does not divide.

    >>> even_bounds(10, 4)
    (0, 3, 6, 8, 10)
    """
    each, rest = divmod(length, parts)
    return tuple(part * each + min(part, rest) for part in range(parts + 1))


def relabelled(schedule: Schedule, order: Sequence[int]) -> Schedule:
    """Give the ranks of a schedule other names: rank i becomes `order[i]`."""
    return tuple(
        Round(
            tuple(replace(send, peer=order[send.peer]) for send in step.sends),
            tuple(replace(receive, peer=order[receive.peer]) for receive in step.receives),
        )
        for step in schedule
    )


# ---------------------------------------------------------------- what a schedule amounts to


def messages_sent(schedule: Schedule) -> int:
    """Return how many messages a rank sends."""
    return sum(len(step.sends) for step in schedule)


def numbers_sent(schedule: Schedule) -> int:
    """Return how many numbers a rank sends."""
    return sum(send.stop - send.start for step in schedule for send in step.sends)


def numbers_added(schedule: Schedule) -> int:
    """Return how many additions a rank does."""
    received = (receive for step in schedule for receive in step.receives)
    return sum(receive.stop - receive.start for receive in received if receive.adds)


# ---------------------------------------------------------------- the steps


def _powers(size: int) -> list[int]:
    """Return the powers of two below a size."""
    return [1 << bit for bit in range((size - 1).bit_length())]


def _round(
    to: int | None, sent: Range, of: int | None, received: Range, adds: bool = False
) -> Round:
    """Return a round with at most one message each way, and none without numbers."""
    sends = (Send(to, *sent),) if to is not None and sent[0] < sent[1] else ()
    is_received = of is not None and received[0] < received[1]
    receives = (Receive(of, *received, adds),) if of is not None and is_received else ()
    return Round(sends, receives)


def _folded(
    rank: int, size: int, length: int, butterfly: Callable[[int], Sequence[Round]]
) -> Schedule:
    """Put what the ranks beyond a power of two do around a butterfly, whose ranks are places."""
    extra = size - butterfly_size(size)
    place = place_of(rank, size)
    whole = (0, length)
    names = [place * 2 + 1 if place < extra else place + extra for place in range(size - extra)]
    if place is None:
        idle = tuple(Round() for _ in butterfly(0))
        hand_in = _round(rank + 1, whole, None, whole)
        take = _round(None, whole, rank + 1, whole)
        return (hand_in, *idle, take)
    steps = relabelled(tuple(butterfly(place)), names)
    if extra == 0:
        return steps
    if rank >= 2 * extra:
        return (Round(), *steps, Round())
    add = _round(None, whole, rank - 1, whole, True)
    give = _round(rank - 1, whole, None, whole)
    return (add, *steps, give)


def _doubling(place: int, size: int, length: int) -> list[Round]:
    whole = (0, length)
    return [
        _round(place ^ distance, whole, place ^ distance, whole, True)
        for distance in _powers(butterfly_size(size))
    ]


def _halving(place: int, size: int, bounds: Sequence[int]) -> list[Round]:
    """Split what is left between the two of a pair: the lower keeps the lower half."""
    low, high = 0, butterfly_size(size)  # the parts that are left
    apart: list[Round] = []
    together: list[Round] = []
    for distance in _powers(butterfly_size(size)):
        middle = (low + high) // 2
        lower, upper = (bounds[low], bounds[middle]), (bounds[middle], bounds[high])
        is_upper = bool(place & distance)
        kept, given = (upper, lower) if is_upper else (lower, upper)
        low, high = (middle, high) if is_upper else (low, middle)
        peer = place ^ distance
        apart.append(_round(peer, given, peer, kept, True))
        together.append(_round(peer, kept, peer, given, False))
    return [*apart, *reversed(together)]
