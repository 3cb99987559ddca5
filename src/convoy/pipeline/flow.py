"""A segment's batches on their way through one stage, in the order of its schedule.

    first stage          stage s                     last stage
    images ->  F  -----> F(m)  ---------- ... -----> F(m)
                                                     loss
               B  <----- B(m - lead) <--- ... <----- B(m)

While a stage computes, its messages travel: the next input is expected before it is needed, and
an output is sent without waiting, a gradient before the stage's own weights get theirs. A forward
message says whether it is the last of the segment, a backward message whether some stage wishes
that no further batch is let in.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from convoy.data.batches import Batch, Epoch
from convoy.inner.executor import Sums
from convoy.pipeline.stage import Stage
from convoy.pipeline.traffic import Channel
from convoy.randomness import seed_torch

_SPANS_KEPT = 12  # of a stage's last jobs: what a picture of a cycle needs


@dataclass(frozen=True, slots=True, eq=False)
class Neighbours:
    """The ways to and from the stages on both sides; None where there is no stage."""

    from_left: Channel | None = None
    to_left: Channel | None = None
    from_right: Channel | None = None
    to_right: Channel | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Cargo:
    """The batches of a segment, as every stage knows them.

    Attributes:
        epoch: that they are of.
        first: the number of the first one in its epoch.
        update: its number in the run.
        count: of batches, unless fewer are wanted.
        batch: samples of one.
        samples: of the epoch.
        seed: of what a user's own layers draw in update 0.
        rate: of an update.
        steps: of an epoch.
    """

    epoch: Epoch
    first: int
    update: int
    count: int
    batch: int
    samples: int
    seed: int
    rate: Callable[[int], float]
    steps: int

    def span(self, number: int) -> tuple[int, int]:
        """Return where a batch begins and ends in its epoch."""
        start = (self.first + number) * self.batch
        return start, min(start + self.batch, self.samples)

    def size(self, number: int) -> int:
        """Return how many samples a batch has."""
        start, stop = self.span(number)
        return stop - start

    def images(self) -> Iterator[Batch]:
        """Yield the batches themselves, for the first stage."""
        return self.epoch.batches(self.batch, first=self.first)


@dataclass(slots=True, eq=False)
class Times:
    """What a stage did with its time.

    Attributes:
        busy: seconds of each batch's two passes.
        done: when each batch's backward pass had ended.
        waiting: seconds spent without anything to do.
        spans: of the last jobs: is it a backward pass, the batch, start and end.
    """

    busy: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    waiting: float = 0.0
    spans: deque[tuple[int, int, float, float]] = field(
        default_factory=lambda: deque(maxlen=_SPANS_KEPT)
    )

    @property
    def per_batch(self) -> float:
        """Return what a batch usually takes; the first ones find cold caches and new memory."""
        found = list(self.busy.values())
        return statistics.median(found[len(found) // 2 :]) if found else 0.0

    @property
    def waiting_part(self) -> float:
        """Return the part of its time that the stage waited, once the pipeline was full."""
        first, *others = list(self.done)[len(self.done) // 2 :] or [0]
        if not others:
            return 0.0
        span = self.done[others[-1]] - self.done[first]
        return max(0.0, 1 - sum(self.busy[number] for number in others) / span)


class Flow:
    """Lets a segment's batches through a stage.

    Args:
        stage: computes.
        place: which of how many stages it is.
        neighbours: send and take what goes between stages.
        cargo: the batches.
        wishes: tells whether no further batch should be let in.
        note: is told of each batch that the last stage has finished: its sums, and how long each
            stage was busy and waiting since it told before.
    """

    def __init__(
        self,
        stage: Stage,
        place: tuple[int, int],
        neighbours: Neighbours,
        cargo: Cargo,
        wishes: Callable[[], bool],
        note: Callable[[Sums, list[float], list[float]], None],
    ) -> None:
        self._stage, self._cargo = stage, cargo
        self._rank, self._size = place
        self._ways = neighbours
        self._wishes, self._note = wishes, note
        self._images = cargo.images() if self._rank == 0 else iter(())
        self._entered = self._done = 0  # batches that have come in, and those that are out
        self._is_complete = False  # no more will
        self._wish = False
        self._told = [0.0] * (2 * self._size)  # what came with the last message
        self._untold = [0.0, 0.0]  # busy and waiting
        self._started = time.perf_counter()
        self.times = Times()

    def run(self) -> int:
        """Let all batches through and out; return how many there were."""
        cargo = self._cargo
        last = max(0, cargo.update - 1)
        self._stage.fill(cargo.rate(last), last / cargo.steps)
        while not self._is_complete or self._done < self._entered:
            if not self._is_complete:
                self._forward(self._entered)
            if self._is_complete or self._entered - self._done > self._stage.lead:
                self._backward(self._done)
                self._done += 1
        for way in (self._ways.to_left, self._ways.to_right):
            if way is not None:
                way.flush()
        return self._done

    # ---------------------------------------------------------------- forward

    def _forward(self, number: int) -> None:
        cargo, ways = self._cargo, self._ways
        x = self._take_in(number)
        self._entered += 1
        _, keys = cargo.epoch.marks(*cargo.span(number))
        with _Clock(self, number, is_backward=False):
            seed_torch(cargo.seed + cargo.update + number, x.device)
            y = self._stage.forward(number, x, keys)
            if ways.to_right is not None:
                ways.to_right.send(y, self._message(), self._stage.lead + 1)
        if ways.from_right is not None:
            ways.from_right.expect(cargo.size(self._done))

    def _take_in(self, number: int) -> Tensor:
        """Return a batch's images, or what the stage before has made of them."""
        cargo, way = self._cargo, self._ways.from_left
        if way is None:
            images = next(self._images).images_NCHW
            self._is_complete = number + 1 == cargo.count or self._wish or self._wishes()
            return images
        x, told = self._wait(way, cargo.size(number))
        self._is_complete, self._told = told[0] > 0, told[1:]
        if not self._is_complete:
            way.expect(cargo.size(number + 1))
        return x

    def _message(self) -> list[float]:
        """Return the numbers that go with a forward message."""
        self._tell()
        return [float(self._is_complete), *self._told]

    def _tell(self) -> None:
        """Put this stage's times beside those of the stages before it."""
        self._told[2 * self._rank : 2 * self._rank + 2] = self._untold
        self._untold = [0.0, 0.0]

    # ---------------------------------------------------------------- backward

    def _backward(self, number: int) -> None:
        cargo, ways, stage = self._cargo, self._ways, self._stage
        update = cargo.update + number
        epochs_done = update / cargo.steps
        if ways.from_right is not None:
            gradient, told = self._wait(ways.from_right, cargo.size(number))
            self._wish |= told[0] > 0
            if number + 1 < self._entered:
                ways.from_right.expect(cargo.size(number + 1))
            with _Clock(self, number, is_backward=True):
                self._send_back(stage.backward(number, gradient, epochs_done))
                stage.update(cargo.rate(update))
            return
        labels, _ = cargo.epoch.marks(*cargo.span(number))
        with _Clock(self, number, is_backward=True):
            sums, found = stage.finish(number, labels, len(labels), epochs_done)
            self._send_back(found)
            stage.update(cargo.rate(update))
        self._tell()
        self._note(sums, self._told[0::2], self._told[1::2])

    def _send_back(self, gradient: Tensor | None) -> None:
        """Send what the stage before waits for, before the work that nobody waits for."""
        if self._ways.to_left is not None and gradient is not None:
            wish = float(self._wish or self._wishes())
            # As many as can be on their way in any order: it never waits here.
            self._ways.to_left.send(gradient, [wish], self._stage.lead + 3)

    def _wait(self, way: Channel, samples: int) -> tuple[Tensor, list[float]]:
        started = time.perf_counter()
        found = way.receive(samples)
        waited = time.perf_counter() - started
        self.times.waiting += waited
        self._untold[1] += waited
        return found

    def count_work(self, number: int, is_backward: bool, start: float, end: float) -> None:
        """Note that a job was done from one moment to another."""
        self._untold[0] += end - start
        self.times.busy[number] = self.times.busy.get(number, 0.0) + end - start
        if is_backward:
            self.times.done[number] = end
        span = (int(is_backward), number, start - self._started, end - self._started)
        self.times.spans.append(span)


class _Clock:
    """Times one job."""

    def __init__(self, flow: Flow, number: int, *, is_backward: bool) -> None:
        self._flow, self._number, self._is_backward = flow, number, is_backward

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        end = time.perf_counter()
        self._flow.count_work(self._number, self._is_backward, self._start, end)
