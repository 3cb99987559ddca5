"""The strategy `single`: one node trains the whole batch."""

import time

from convoy.data.batches import Batches
from convoy.errors import Interrupted
from convoy.inner.executor import Executor, add_up
from convoy.monitor.events import EvaluationEvent
from convoy.outer.crew import Crew
from convoy.outer.job import Job
from convoy.outer.meter import Meter
from convoy.outer.progress import EpochRecord
from convoy.randomness import fold, seed_torch


def train_single(job: Job, crew: Crew) -> str:
    """Train until the job is done; return the reason it is, in words.

    Args:
        job: what to train.
        crew: this process alone.

    Raises:
        Interrupted: the user asked to stop; the state is saved.
    """
    del crew
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
    meter = Meter(job)
    first_seed = first_step_seed(config.seed)
    for batch in epoch.batches(config.batch, first=progress.step):
        if job.stop.requested:
            break
        seed_torch(first_seed + progress.updates, job.train.device)
        sums = job.executor.step(batch, len(batch), job.schedule.rate(progress.updates))
        progress.step += 1
        progress.updates += 1
        progress.samples += sums.count
        meter.add(sums)
        if is_checkpoint_step(job):
            with meter.paused():
                job.save(f"every {config.checkpoint_steps} steps")
    meter.read()


def first_step_seed(seed: int) -> int:
    """Return the seed for what a user's own layers draw in step 0; the step's number is added."""
    return fold(seed, 4) >> 1  # room for a step's number on top


def is_checkpoint_step(job: Job) -> bool:
    """Tell whether the step just done is one to save at, within an epoch."""
    every, progress = job.config.checkpoint_steps, job.progress
    within_epoch = progress.step < job.schedule.steps_per_epoch
    return bool(every) and within_epoch and progress.updates % every == 0


def finish_epoch(job: Job) -> EpochRecord:
    """Test the network, record the epoch and save."""
    progress = job.progress
    started = time.perf_counter()
    mirrored = job.config.mirrored_test
    test_loss, test_accuracy = evaluate(job.executor, job.test, mirrored=mirrored)
    progress.seconds += time.perf_counter() - started
    record = close_epoch(job, test_loss, test_accuracy)
    started = time.perf_counter()
    job.save(f"epoch {record.epoch}", score=test_accuracy)
    progress.seconds += time.perf_counter() - started
    return record


def close_epoch(job: Job, test_loss: float, test_accuracy: float) -> EpochRecord:
    """Record an epoch that has been tested, and tell of it."""
    record = job.progress.finish_epoch(test_loss, test_accuracy)
    job.events.emit(
        EvaluationEvent(
            epoch=record.epoch,
            samples=record.samples,
            seconds=record.seconds,
            train_loss=record.train_loss,
            train_accuracy=record.train_accuracy,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            samples_per_s=job.progress.samples_per_s,
        )
    )
    return record


def evaluate(
    executor: Executor, samples: Batches, *, mirrored: bool = False, size: int = 500
) -> tuple[float, float]:
    """Return a network's mean loss and its accuracy over a whole image set."""
    loss, correct = evaluate_part(executor, samples, 0, len(samples), mirrored=mirrored, size=size)
    return loss / len(samples), correct / len(samples)


def evaluate_part(
    executor: Executor,
    samples: Batches,
    start: int,
    stop: int,
    *,
    mirrored: bool = False,
    size: int = 500,
) -> tuple[float, int]:
    """Return the sum of losses and the number of correct answers over a part of an image set."""
    batches = samples.in_order(size, start, stop)
    return add_up([executor.evaluate(batch, mirrored=mirrored) for batch in batches])
