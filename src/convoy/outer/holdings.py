"""Work for nodes that keep what they are given: IDPA's batches, and passes over what one holds.

The data set is shuffled once and handed out in batches (allocation/idpa.py). A node trains on
what it holds while more arrives: an iteration is a pass over its samples in an order of its
own. The next batch is handed out as soon as every node has finished an iteration of the one
before, which no node waits for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from convoy.outer.allocation.idpa import Holding, Mode, allocate, batch_volumes, hand_out
from convoy.outer.work import Order, Pace, Span, count_samples, trained_meanwhile

EVERY_PASS = -1  # as an interval: once for each pass over what a node holds


@dataclass(eq=False)
class _Held:
    """What one node holds, and how far it is in its own passes."""

    pace: Pace
    nominal: float
    ranges: list[range] = field(default_factory=list)
    told: int = 0  # of the ranges, so many were announced
    number: int = 0
    epoch: int = 0
    place: int = 0
    size: int = 0  # of the pass under way: what arrives meanwhile is part of the next
    passes: int = 0  # finished since the last batch was handed out

    @property
    def samples(self) -> int:
        return sum(len(part) for part in self.ranges)


class HeldWork:
    """Hands the data set out in batches, and lets each node pass over its own.

    Args:
        samples: in the data set.
        epochs: so many times as many samples are trained altogether.
        batches: of the allocation.
        mode: how a batch is divided.
        local_batch: samples of a local step.
        every: local steps between two exchanges; EVERY_PASS: one exchange a pass.
        expect: nodes to wait for before the first batch is handed out.
        sent: samples must be sent to the nodes: what is new is announced, so that it can
            travel during a pass over what a node has, and is part of the pass after.
    """

    def __init__(
        self,
        samples: int,
        epochs: int,
        *,
        batches: int,
        mode: Mode,
        local_batch: int,
        every: int,
        expect: int = 1,
        sent: bool = False,
    ) -> None:
        self._sent = sent
        self._volumes = list(batch_volumes(samples, batches))
        self._mode: Mode = mode
        self._local_batch, self._every, self._expect = local_batch, every, expect
        self._place = 0  # in the shuffled data set: all before it is handed out
        self._free: list[range] = []  # came back from nodes that are gone
        self._nodes: dict[int, _Held] = {}
        self._finished, self._enough = 0, samples * epochs

    @property
    def is_over(self) -> bool:
        """Tell whether as many samples were trained as all epochs have."""
        return self._finished >= self._enough

    @property
    def speeds(self) -> dict[int, float]:
        """Return the nodes' samples per second."""
        return {node: held.pace.speed for node, held in self._nodes.items()}

    @property
    def every(self) -> int:
        """Return the local steps between two exchanges."""
        return self._every

    @property
    def held(self) -> dict[int, int]:
        """Return how many samples each node holds."""
        return {node: held.samples for node, held in self._nodes.items()}

    def join(self, node: int, speed: float) -> None:
        """Take a node in; it holds something from the next batch on."""
        self.leave(node)
        self._nodes[node] = _Held(Pace(speed), max(speed, 1e-9))
        self._hand_out()

    def leave(self, node: int) -> None:
        """Take a node out; its samples form an extra batch for the others."""
        gone = self._nodes.pop(node, None)
        if gone is not None:
            self._free += gone.ranges
            self._hand_out()

    def void(self, node: int) -> None:
        """Let a node do its pass again."""
        held = self._nodes.get(node)
        if held is not None:
            held.place = 0

    def order(self, node: int, done: int) -> Order | None:
        """Let a node go on with its pass, or begin the next with all it holds now."""
        held = self._nodes[node]
        coming: tuple[tuple[int, int], ...] = ()
        if held.place >= held.size:
            before = held.told if self._sent and held.told else len(held.ranges)
            size = sum(len(part) for part in held.ranges[:before])
            held.epoch, held.place, held.size = held.epoch + (held.size > 0), 0, size
            coming = tuple((part.start, part.stop) for part in held.ranges[before:])
            held.told = len(held.ranges)
        if held.size == 0 or self.is_over:
            return None
        count = held.size - held.place
        if self._every != EVERY_PASS:
            count = min(count, self._every * self._local_batch)
        span = Span(held.epoch, held.place, held.place + count)
        held.number += 1
        holding = tuple((part.start, part.stop) for part in _first(held.ranges, held.size))
        return Order(
            number=held.number,
            spans=(span,),
            steps=max(1, -(-count // self._local_batch)),
            done=done,
            meanwhile=trained_meanwhile(self.speeds, node, count),
            holding=holding,
            coming=coming,
        )

    def finish(self, node: int, order: Order, busy_s: float, exchange_s: float) -> int:
        """Note that a stretch of a node's pass is in the weights."""
        del exchange_s  # IDPA goes by the time of the work alone
        samples = count_samples(order.spans)
        self._finished += samples
        held = self._nodes.get(node)
        if held is not None:
            held.pace.observe(samples, busy_s)
            held.place = order.spans[-1].stop
            if held.place >= held.size:
                held.passes += 1
                self._hand_out()
        return samples

    def note_exchange(self, exchange_s: float, step_s: float) -> None:
        """Leave the interval as it was asked for."""

    def _hand_out(self) -> None:
        """Hand out the next batch if it is time: everybody has finished a pass since the last."""
        holders = [held for held in self._nodes.values() if held.samples]
        first = self._place == 0
        if len(self._nodes) < (self._expect if first else 1) or not self._nodes:
            return
        if first or all(held.passes > 0 for held in holders):
            for part in [*self._next_batch(), *self._free]:
                self._divide(part)
            self._free = []
            for held in self._nodes.values():
                held.passes = 0

    def _next_batch(self) -> list[range]:
        if not self._volumes:
            return []
        volume = self._volumes.pop(0)
        self._place += volume
        return [range(self._place - volume, self._place)]

    def _divide(self, part: range) -> None:
        nodes = sorted(self._nodes)
        holdings = [
            Holding(held.samples, held.nominal, held.pace.time_s)
            for held in (self._nodes[node] for node in nodes)
        ]
        increments = allocate(holdings, len(part), self._mode)
        given = hand_out(dict(zip(nodes, increments, strict=True)), part.start)
        for node, stretch in given.items():
            if stretch:
                self._nodes[node].ranges.append(stretch)

    def state(self) -> dict[str, Any]:
        """Return what must be known to go on: after that, everything is handed out anew."""
        return {"finished": self._finished, "nodes": len(self._nodes)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from such a state; the nodes that were there then are waited for."""
        self._finished = state["finished"]
        self._expect = max(1, state["nodes"])


def _first(ranges: Sequence[range], count: int) -> list[range]:
    """Return the first so many places of some stretches."""
    found = []
    for part in ranges:
        if count <= 0:
            break
        found.append(part[:count])
        count -= len(found[-1])
    return found
