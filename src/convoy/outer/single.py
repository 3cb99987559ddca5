"""The strategy `single`: one node trains the whole batch."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from convoy.data.batches import Batches
from convoy.errors import ConvoyError, Interrupted
from convoy.inner.executor import Executor, Sums, count_correct
from convoy.monitor.events import EvaluationEvent, StepEvent
from convoy.outer.job import Job
from convoy.outer.progress import EpochRecord
from convoy.randomness import fold, seed_torch

_PENDING_AT_MOST = 256  # steps whose sums wait on the device, so that memory stays bounded


def train_single(job: Job) -> str:
    """Train until the job is done; return the reason it is, in words.

    Raises:
        Interrupted: the user asked to stop; the state is saved.
    """
    while job.progress.epoch < job.config.epochs:
        train_epoch(job)
        if job.stop.requested:
            job.save("interrupted")
            job.require_saved()
            raise Interrupted(f"stopped at step {job.progress.updates}; all is saved")
        record = finish_epoch(job)
        reason = reason_to_end(job, record)
        if reason is not None:
            return reason
    return f"all {job.config.epochs} epochs are done"


def reason_to_end(job: Job, record: EpochRecord) -> str | None:
    """Say why training ends before its last epoch, or None if it goes on."""
    config = job.config
    if config.target_accuracy and record.test_accuracy >= config.target_accuracy:
        return f"the test accuracy reached {config.target_accuracy:g}"
    if config.stop_after and record.epoch >= config.stop_after and record.epoch < config.epochs:
        return f"asked to stop after {config.stop_after} epochs; --resume goes on"
    return None


def train_epoch(job: Job) -> None:
    """Do the steps that are left of the current epoch, or as many as are done before a stop."""
    progress, config = job.progress, job.config
    epoch = job.train.epoch(progress.epoch, seed=config.seed, augmentation=job.augmentation)
    meter = _Meter(job)
    first_seed = fold(config.seed, 4) >> 1  # room for a step's number on top
    for batch in epoch.batches(config.batch, first=progress.step):
        if job.stop.requested:
            break
        seed_torch(first_seed + progress.updates, job.train.device)
        sums = job.executor.gradients(batch, len(batch))
        job.executor.update(job.schedule.rate(progress.updates))
        progress.step += 1
        progress.updates += 1
        progress.samples += sums.count
        meter.add(sums)
        if _is_checkpoint_step(job):
            with meter.paused():
                job.save(f"every {config.checkpoint_steps} steps")
    meter.read()


def _is_checkpoint_step(job: Job) -> bool:
    every, progress = job.config.checkpoint_steps, job.progress
    within_epoch = progress.step < job.schedule.steps_per_epoch
    return bool(every) and within_epoch and progress.updates % every == 0


class _Meter:
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

    def add(self, sums: Sums) -> None:
        """Take a step's sums, and report if an interval has passed."""
        self._pending.append(sums)
        if time.perf_counter() - self._since >= self._interval_s:
            self.read()
        elif len(self._pending) >= _PENDING_AT_MOST:
            self._drain()

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
            raise ConvoyError(
                f"the loss is {loss} at step {progress.updates}: training has diverged",
                hint="Try a smaller --lr, or a longer --warmup-epochs.",
            )
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


def finish_epoch(job: Job) -> EpochRecord:
    """Test the network, record the epoch and save."""
    progress = job.progress
    started = time.perf_counter()
    mirrored = job.config.mirrored_test
    test_loss, test_accuracy = evaluate(job.executor, job.test, mirrored=mirrored)
    progress.seconds += time.perf_counter() - started
    record = progress.finish_epoch(test_loss, test_accuracy)
    job.events.emit(
        EvaluationEvent(
            epoch=record.epoch,
            samples=record.samples,
            seconds=record.seconds,
            train_loss=record.train_loss,
            train_accuracy=record.train_accuracy,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            samples_per_s=progress.samples_per_s,
        )
    )
    started = time.perf_counter()
    job.save(f"epoch {record.epoch}", score=test_accuracy)
    progress.seconds += time.perf_counter() - started
    return record


def evaluate(
    executor: Executor, samples: Batches, *, mirrored: bool = False, size: int = 500
) -> tuple[float, float]:
    """Return a network's mean loss and its accuracy over a whole image set."""
    parts = [executor.evaluate(batch, mirrored=mirrored) for batch in samples.in_order(size)]
    loss = torch.stack([part.loss.double() for part in parts]).sum()
    return float(loss) / len(samples), count_correct(parts) / len(samples)
