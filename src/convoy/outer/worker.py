"""What a node does with an order: local steps from the weights it was given, and what they changed.

What comes out follows from the weights, the orders and the node's own momentum alone, not from
clocks or from who else is there: a replay does the same orders again and gets the same bits.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from convoy.data.batches import Batch, Epoch, join_batches
from convoy.inner.executor import SUMS_KEPT, Sums, add_up
from convoy.outer.allocation.shares import apportion
from convoy.outer.flat import Flat
from convoy.outer.job import Job
from convoy.outer.server import Report
from convoy.outer.single import first_step_seed
from convoy.outer.work import Order, Span, count_samples, cut_spans
from convoy.randomness import epoch_order, fold, seed_torch

_EPOCHS_KEPT = 2  # orders may reach over the end of one
_HOLDING = 5  # tells the seed of a pass over one's own samples from other seeds


@dataclass(frozen=True, slots=True)
class _Done:
    """What some local steps gave."""

    samples: int = 0
    correct: int = 0
    loss: float = 0.0
    rate: float = 0.0
    busy_s: float = 0.0
    steps: int = 0

    def __add__(self, other: "_Done") -> "_Done":
        return _Done(
            self.samples + other.samples,
            self.correct + other.correct,
            self.loss + other.loss,
            self.rate + other.rate,
            self.busy_s + other.busy_s,
            self.steps + other.steps,
        )


class Worker:
    """One node's local training.

    Args:
        job: the network, its data and the recipe.
        node: its number in the run, which its own random numbers derive from.
    """

    def __init__(self, job: Job, node: int) -> None:
        self._job = job
        self._node = node
        config = job.config
        self.flat = Flat(job.model, statistics=config.norms == "average")
        self._keeps_momentum = config.momentum_on_pull == "keep"
        self._first_seed = first_step_seed(config.seed)
        self._base: Tensor | None = None
        self._local: Tensor | None = None
        self._ahead: Tensor | None = None  # what the step ahead has changed
        self._ahead_done = _Done()
        self._epochs: dict[object, Epoch] = {}

    def take(self, vector: Tensor, order: Order) -> None:
        """Go on from the weights that came with an order.

        What a step ahead has changed since is added, if the order counts on it.
        """
        if order.carried != self._ahead_done.samples:
            self.forget()
        weights = self.flat.weights
        self._base = vector[:weights]
        if self._ahead is not None:
            vector = vector.clone()
            vector[:weights] += self._ahead
            self._ahead = None
        if not self._keeps_momentum:
            self._job.executor.optimizer.state.clear()
        self.flat.write(vector)

    def forget(self) -> None:
        """Drop what was done and not handed in: it starts from weights that nobody has."""
        self._ahead, self._ahead_done = None, _Done()

    def start_over(self) -> None:
        """Drop the momentum too: what was handed in was no good."""
        self.forget()
        self._job.executor.optimizer.state.clear()

    def run(self, order: Order, room: Tensor | None = None) -> tuple[Tensor, Report]:
        """Do an order; return what it changed, with the statistics as they are, and a report.

        Args:
            order: what to do.
            room: where to put what it changed; None: anywhere.
        """
        assert self._base is not None
        main, _ = cut_spans(order.spans, order.samples - order.ahead)
        done = self._ahead_done + self._steps(order, main, order.steps, 0)
        self._ahead_done = _Done()
        self._local = self.flat.read()
        vector = torch.empty_like(self._local) if room is None else room
        weights = self.flat.weights
        torch.sub(self._local[:weights], self._base, out=vector[:weights])
        vector[weights:] = self._local[weights:]
        report = Report(
            samples=done.samples,
            correct=done.correct,
            loss=done.loss,
            rate=done.rate,
            busy_s=done.busy_s,
            step_s=done.busy_s / max(1, done.steps),
        )
        return vector, report

    def run_ahead(self, order: Order) -> None:
        """Do one more step, while what was handed in is under way; it counts with the next."""
        if order.ahead == 0:
            return
        assert self._local is not None
        _, rest = cut_spans(order.spans, order.samples - order.ahead)
        self._ahead_done = self._steps(order, rest, 1, order.steps)
        weights = self.flat.weights
        self._ahead = self.flat.read()[:weights] - self._local[:weights]

    def _steps(self, order: Order, spans: Sequence[Span], steps: int, first: int) -> _Done:
        job, started = self._job, time.perf_counter()
        if not spans:
            return _Done()
        sums: list[Sums] = []
        done, rates = _Done(), 0.0
        rest = list(spans)
        for number, size in enumerate(apportion([1.0] * steps, count_samples(spans)), first):
            part, rest = cut_spans(rest, size)
            if not part:
                continue
            seed_torch(fold(self._first_seed, self._node, order.number, number), job.train.device)
            rate = self._rate(order, number)
            sums.append(job.executor.step(self._batch(order, part), size, rate))
            rates += rate
            if len(sums) == SUMS_KEPT:
                done += _read(sums)
                sums.clear()
        done += _read(sums)
        elapsed = time.perf_counter() - started
        return done + _Done(samples=count_samples(spans), rate=rates, busy_s=elapsed)

    def _rate(self, order: Order, number: int) -> float:
        """Return the learning rate of an order's local step: all nodes go on meanwhile.

        What all of them did ahead is not in the weights yet, but was a step all the same.
        """
        steps = order.steps + (order.ahead > 0)
        samples = order.done + order.meanwhile * (number + (order.carried > 0)) / steps
        return self._job.schedule.rate(samples / self._job.config.batch)

    def _batch(self, order: Order, spans: Sequence[Span]) -> Batch:
        parts = [self._epoch(order, span.epoch).batch(span.start, span.stop) for span in spans]
        return join_batches(parts)

    def _epoch(self, order: Order, number: int) -> Epoch:
        key = (number, order.holding)
        if key not in self._epochs:
            job = self._job
            while len(self._epochs) >= _EPOCHS_KEPT:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[key] = job.train.epoch(
                number,
                seed=job.config.seed,
                augmentation=job.augmentation,
                order=pass_order(job.config.seed, number, len(job.train), order.holding),
            )
        return self._epochs[key]

    def samples_of(self, order: Order) -> Tensor:
        """Return the numbers of all samples that an order may touch, in this machine's memory."""
        if order.holding:
            return held_samples(self._job.config.seed, len(self._job.train), order.holding)
        parts = [self._epoch(order, s.epoch).order[s.start : s.stop] for s in order.spans]
        return torch.cat(parts).cpu() if parts else torch.arange(0)


def _read(sums: Sequence[Sums]) -> _Done:
    """Wait for some steps; return what they add up to."""
    loss, correct = add_up(sums)
    return _Done(loss=loss, correct=correct, steps=len(sums))


def pass_order(
    seed: int, number: int, count: int, holding: Sequence[tuple[int, int]]
) -> Tensor | None:
    """Return the order of a pass over what a node holds; None: over everything, as usual."""
    if not holding:
        return None
    held = held_samples(seed, count, holding)
    first = holding[0][0]  # no two nodes hold the same: their orders differ
    generator = torch.Generator().manual_seed(fold(seed, number, first, _HOLDING))
    return held[torch.randperm(len(held), generator=generator)]


def held_samples(seed: int, count: int, holding: Sequence[tuple[int, int]]) -> Tensor:
    """Return the samples in some stretches of the data set, which is shuffled once for it."""
    shuffled = epoch_order(fold(seed, _HOLDING), 0, count)
    return torch.cat([shuffled[start:stop] for start, stop in holding])
