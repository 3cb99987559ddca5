"""Keeps count of a run's steps, and reports once an interval."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from convoy.errors import Diverged
from convoy.inner.executor import SUMS_KEPT, Sums, count_correct
from convoy.monitor.events import StepEvent
from convoy.outer.job import Job


class Meter:
    """Collects the steps' sums and reads them, which waits for the device, once an interval.

    The sums are added one by one in the order of the steps, so that the moments at which they
    are read do not change their last bits.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._progress = job.progress
        self._interval_s = job.config.log_interval_s
        self._pending: list[Sums] = []
        self._samples = 0
        self._since = time.perf_counter()
        self.reports = 0  # how many were given

    def add(self, sums: Sums) -> None:
        """Take a step's sums, and report if an interval has passed."""
        self._pending.append(sums)
        if time.perf_counter() - self._since >= self._interval_s:
            self.read()
        elif len(self._pending) >= SUMS_KEPT:
            self._drain()

    def add_numbers(self, loss: float, correct: int, count: int) -> None:
        """Take a step's sums that are known already, and report if an interval has passed."""
        self._progress.loss += loss
        self._progress.correct += correct
        self._progress.count += count
        self._samples += count
        if time.perf_counter() - self._since >= self._interval_s:
            self.read()

    def read(self) -> None:
        """Bring the progress up to date, and report."""
        self._drain()
        if self._samples == 0:
            return
        now = time.perf_counter()
        elapsed, self._since = now - self._since, now
        self._progress.train_seconds += elapsed
        self._progress.seconds += elapsed
        samples, self._samples = self._samples, 0
        self.reports += 1
        self._report(samples / elapsed)

    def _drain(self) -> None:
        if not self._pending:
            return
        for loss in torch.stack([sums.loss for sums in self._pending]).tolist():
            self._progress.loss += loss
        self._progress.correct += count_correct(self._pending)
        samples = sum(sums.count for sums in self._pending)
        self._progress.count += samples
        self._samples += samples
        self._pending.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Bring the progress up to date and count what happens inside as no training time."""
        self.read()
        yield
        now = time.perf_counter()
        self._progress.seconds += now - self._since
        self._since = now

    def _report(self, samples_per_s: float) -> None:
        progress = self._progress
        loss = progress.loss / progress.count
        if not math.isfinite(loss):
            raise Diverged(
                f"the loss is {loss} at step {progress.updates}: training has diverged",
                hint="Try a smaller --lr, or a longer --warmup-epochs.",
            )
        self._job.timelines.tell(self._job.executor, progress.updates, self._job.events)
        self._job.events.emit(
            StepEvent(
                epoch=progress.epoch + 1,
                step=progress.step,
                steps=self._job.schedule.steps_per_epoch,
                samples=progress.samples,
                loss=loss,
                accuracy=progress.correct / progress.count,
                samples_per_s=samples_per_s,
                learning_rate=self._job.schedule.rate(progress.updates - 1),
            )
        )
