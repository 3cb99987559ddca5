"""Who trains which samples next, where nodes ask for work instead of sharing every batch.

A node is given an order: stretches of the epochs' own order, how many local steps to make of
them, and how far the learning rate has got. What an order covers is outstanding until the
service has taken in what was trained; a node that is lost gives its samples back, and they are
handed out again. So every sample of every epoch is trained into the weights exactly once.
"""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

from convoy.outer.allocation.shares import apportion
from convoy.outer.allocation.speeds import has_changed, middle

_TIMES_KEPT = 10  # of each node
_EXCHANGE_PART = 0.15  # of a node's time may go into exchanging weights
_STEPS_AT_MOST = 64  # between two exchanges: further apart, nodes drift


class Span(NamedTuple):
    """Places `start` up to, not including, `stop` in the order of one epoch."""

    epoch: int
    start: int
    stop: int

    @property
    def samples(self) -> int:
        """Return how many places it has."""
        return self.stop - self.start


def count_samples(spans: Iterable[Span]) -> int:
    """Return how many samples some stretches hold."""
    return sum(span.samples for span in spans)


def cut_spans(spans: Sequence[Span], count: int) -> tuple[list[Span], list[Span]]:
    """Return the first so many samples of some stretches, and the rest.

    >>> first, rest = cut_spans([Span(0, 5, 8), Span(1, 0, 4)], 4)
    >>> first == [(0, 5, 8), (1, 0, 1)], rest == [(1, 1, 4)]
    (True, True)
    """
    first: list[Span] = []
    rest: list[Span] = []
    for span in spans:
        taken = min(span.samples, count)
        count -= taken
        if taken:
            first.append(span._replace(stop=span.start + taken))
        if taken < span.samples:
            rest.append(span._replace(start=span.start + taken))
    return first, rest


@dataclass(frozen=True, slots=True)
class Order:
    """What a node is to do before it hands in.

    Attributes:
        number: counts a node's orders, from 1.
        spans: the samples, as places in epochs; of the node's own passes where it holds some.
        steps: local steps to make of them, before handing in.
        ahead: how many of the samples, the last ones, are for one more step, which a node does
            while what it handed in is under way; it counts with the next order.
        carried: how many samples of the step ahead before count with this order; a node that
            has done others drops them, for a service that was started anew hands them out again.
        done: samples in the weights so far, of all nodes.
        meanwhile: samples that all nodes together train during this order.
        holding: the stretches of the data set that the node draws from; empty: all of it.
        coming: stretches that later orders will need, for a node that has them sent.
    """

    number: int
    spans: tuple[Span, ...]
    steps: int
    ahead: int = 0
    carried: int = 0
    done: int = 0
    meanwhile: int = 0
    holding: tuple[tuple[int, int], ...] = ()
    coming: tuple[tuple[int, int], ...] = ()

    @property
    def samples(self) -> int:
        """Return how many samples it covers."""
        return count_samples(self.spans)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Order":
        """Read what `as_dict` wrote, also after a passage through JSON."""
        spans = tuple(Span(*span) for span in values["spans"])
        ranges = {
            name: tuple((start, stop) for start, stop in values[name])
            for name in ("holding", "coming")
        }
        return cls(**{**values, "spans": spans, **ranges})


class Pace:
    """How long a node takes for a sample, from what it reports."""

    def __init__(self, speed: float) -> None:
        self._guess = speed
        self._times: deque[float] = deque(maxlen=_TIMES_KEPT)

    def observe(self, samples: int, busy_s: float) -> None:
        """Take in one report."""
        if samples > 0 and busy_s > 0:
            self._times.append(busy_s / samples)
            if has_changed(self._times):
                newest = self._times[-1]
                self._times.clear()
                self._times.append(newest)

    @property
    def time_s(self) -> float | None:
        """Return seconds per sample, once there was a report."""
        return middle(self._times) if self._times else None

    @property
    def speed(self) -> float:
        """Return samples per second."""
        return 1 / self.time_s if self.time_s else self._guess


def trained_meanwhile(speeds: Mapping[int, float], node: int, samples: int) -> int:
    """Return how many samples all nodes train while one of them trains some."""
    return round(samples * sum(speeds.values()) / speeds[node]) if speeds[node] else samples


class Work(Protocol):
    """Hands out orders."""

    def join(self, node: int, speed: float) -> None:
        """Take a node in, with the speed that a probe found."""
        ...

    def leave(self, node: int) -> None:
        """Take a node out; what it had not finished is handed out again."""
        ...

    def order(self, node: int, done: int) -> Order | None:
        """Return what a node is to do next; None where there is nothing, for now at least."""
        ...

    def finish(self, node: int, order: Order, busy_s: float, exchange_s: float) -> int:
        """Note that what a node trained is in the weights; return how many samples that are.

        Args:
            node: who.
            order: what it did.
            busy_s: seconds of work for it.
            exchange_s: seconds that handing in cost it besides, before it could go on.
        """
        ...

    def void(self, node: int) -> None:
        """Note that what a node handed in was refused: its samples are handed out again."""
        ...

    def note_exchange(self, exchange_s: float, step_s: float) -> None:
        """Take in what an exchange and a local step took."""
        ...

    @property
    def is_over(self) -> bool:
        """Tell whether everything is trained."""
        ...

    @property
    def speeds(self) -> dict[int, float]:
        """Return the nodes' samples per second."""
        ...

    @property
    def every(self) -> int:
        """Return the local steps between two exchanges."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what must be known to go on after the service was lost, as plain values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        ...


class Stream:
    """The epochs one after the other, as stretches that are handed out, returned and finished."""

    def __init__(self, samples: int, epochs: int, start: int = 0) -> None:
        self._samples = samples
        self._next, self._end = start, samples * epochs
        self._returned: list[Span] = []
        self._out: dict[int, list[Span]] = {}

    @property
    def left(self) -> int:
        """Return how many samples have not been handed out, or have come back."""
        return self._end - self._next + count_samples(self._returned)

    @property
    def is_over(self) -> bool:
        """Tell whether everything was handed out and finished."""
        return self.left == 0 and not any(self._out.values())

    def take(self, node: int, count: int) -> tuple[Span, ...]:
        """Hand samples to a node: those that came back first."""
        spans, self._returned = cut_spans(self._returned, count)
        missing = min(count - count_samples(spans), self._end - self._next)
        while missing > 0:
            epoch, place = divmod(self._next, self._samples)
            stop = min(place + missing, self._samples)
            spans.append(Span(epoch, place, stop))
            self._next += stop - place
            missing -= stop - place
        self._out.setdefault(node, []).extend(spans)
        return tuple(spans)

    def finish(self, node: int, spans: Iterable[Span]) -> int:
        """Note that a node's samples are in the weights."""
        mine = self._out.get(node, [])
        finished = [span for span in spans if span in mine]
        for span in finished:
            mine.remove(span)
        return count_samples(finished)

    def give_back(self, node: int) -> None:
        """Take back what a node has not finished."""
        self._returned += self._out.pop(node, [])
        self._returned.sort()

    def state(self) -> dict[str, Any]:
        """Return what must be known to go on: what was handed out and not finished is open."""
        unfinished = [*self._returned, *itertools.chain.from_iterable(self._out.values())]
        return {"next": self._next, "returned": sorted(unfinished)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        self._next = state["next"]
        self._returned = [Span(*span) for span in state["returned"]]


@dataclass(frozen=True, slots=True)
class Terms:
    """How much work an order holds.

    Attributes:
        batch: samples of a step of all nodes together.
        local_batch: samples of each node's local step; 0: its share of the batch by speed.
        every: local steps between two exchanges; 0: as the link's speed suggests.
        overlap: one step of an order is done while what was handed in is under way.
        min_share: the smallest local step.
    """

    batch: int
    local_batch: int = 0
    every: int = 0
    overlap: bool = False
    min_share: int = 1


class StreamWork:
    """Work for nodes that can have any sample: stretches of the epochs, as many as suit each.

    With shares by speed all nodes finish their orders at the same moment.
    """

    def __init__(self, stream: Stream, terms: Terms) -> None:
        self._stream, self._terms = stream, terms
        self._paces: dict[int, Pace] = {}
        self._numbers: dict[int, int] = {}
        self._carried: dict[int, list[Span]] = {}
        self._exchanges: deque[float] = deque(maxlen=4 * _TIMES_KEPT)
        self._every = max(1, terms.every)

    def join(self, node: int, speed: float) -> None:
        """Take a node in."""
        self.leave(node)
        self._paces[node] = Pace(speed)

    def leave(self, node: int) -> None:
        """Take a node out."""
        self._stream.give_back(node)
        self._paces.pop(node, None)
        self._carried.pop(node, None)

    def void(self, node: int) -> None:
        """Hand a node's samples out again."""
        self._stream.give_back(node)
        self._carried.pop(node, None)

    @property
    def is_over(self) -> bool:
        """Tell whether everything is trained."""
        return self._stream.is_over

    def state(self) -> dict[str, Any]:
        """Return what is handed out and what is not."""
        return {**self._stream.state(), "every": self._every}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state."""
        self._stream.restore(state)
        self._every = state["every"]

    @property
    def speeds(self) -> dict[int, float]:
        """Return the nodes' samples per second."""
        return {node: pace.speed for node, pace in self._paces.items()}

    @property
    def every(self) -> int:
        """Return the local steps between two exchanges."""
        return self._every

    def order(self, node: int, done: int) -> Order | None:
        """Give a node its next stretches."""
        step = self._local_batch(node)
        ahead_steps = 1 if self._terms.overlap and self._every > 1 else 0
        main = self._stream.take(node, step * (self._every - ahead_steps))
        ahead = self._stream.take(node, step * ahead_steps)
        if not main and not self._carried.get(node):
            return None
        self._numbers[node] = self._numbers.get(node, 0) + 1
        total = count_samples([*main, *ahead])
        return Order(
            number=self._numbers[node],
            spans=(*main, *ahead),
            # With no samples left, only what was done ahead is still to be handed in.
            steps=max(1, round(count_samples(main) / step)) if main else 0,
            ahead=count_samples(ahead),
            carried=count_samples(self._carried.get(node, [])),
            done=done,
            meanwhile=trained_meanwhile(self.speeds, node, total),
        )

    def _local_batch(self, node: int) -> int:
        if self._terms.local_batch:
            return self._terms.local_batch
        nodes = list(self._paces)
        weights = [self._paces[n].speed for n in nodes]
        shares = apportion(weights, self._terms.batch, self._terms.min_share)
        return max(self._terms.min_share, shares[nodes.index(node)])

    def finish(self, node: int, order: Order, busy_s: float, exchange_s: float) -> int:
        """Note that an order's samples, but for the step ahead, are in the weights."""
        main, ahead = cut_spans(order.spans, order.samples - order.ahead)
        covered = [*self._carried.get(node, []), *main]
        self._carried[node] = ahead
        if node in self._paces:
            self._paces[node].observe(order.samples, busy_s + exchange_s)
        return self._stream.finish(node, covered)

    def note_exchange(self, exchange_s: float, step_s: float) -> None:
        """Take in what an exchange and a local step took, and fit the interval to them."""
        if self._terms.every or step_s <= 0:
            return
        self._exchanges.append(exchange_s / step_s)
        wanted = statistics.median(self._exchanges) / _EXCHANGE_PART
        if not 0.5 * self._every <= wanted <= self._every:  # every change costs: shapes are new
            self._every = min(max(1, math.ceil(wanted)), _STEPS_AT_MOST)


class FollowWork:
    """No work of its own: of several servers that share the weights, one hands it out.

    The others take in what nodes hand in, whatever order it was for.
    """

    def __init__(self) -> None:
        self._paces: dict[int, Pace] = {}
        self._numbers: dict[int, int] = {}

    is_over = False
    every = 1

    @property
    def speeds(self) -> dict[int, float]:
        """Return the nodes' samples per second."""
        return {node: pace.speed for node, pace in self._paces.items()}

    def join(self, node: int, speed: float) -> None:
        """Take a node in."""
        self._paces[node] = Pace(speed)

    def leave(self, node: int) -> None:
        """Take a node out."""
        self._paces.pop(node, None)

    def void(self, node: int) -> None:
        """Let the one who hands out work see to it."""

    def order(self, node: int, done: int) -> Order:
        """Return an order without samples: whatever comes next is welcome."""
        self._numbers[node] = self._numbers.get(node, 0) + 1
        return Order(self._numbers[node], (), 0, done=done)

    def finish(self, node: int, order: Order, busy_s: float, exchange_s: float) -> int:
        """Count nothing: the one who hands out work does."""
        del node, order, busy_s, exchange_s
        return 0

    def note_exchange(self, exchange_s: float, step_s: float) -> None:
        """Leave the interval to the one who hands out work."""

    def state(self) -> dict[str, Any]:
        """Return nothing: there is nothing to know."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on."""
