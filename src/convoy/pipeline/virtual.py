"""A pipeline's training on one device, for studies of accuracy: as fast as plain training."""

from typing import cast

from convoy.errors import Interrupted
from convoy.inner.eager import EagerExecutor
from convoy.inner.executor import Executor
from convoy.inner.fused import FusedExecutor, FusedForward
from convoy.inner.graph import GraphExecutor
from convoy.inner.optimizer import momentum_tensors, restore_momentum
from convoy.monitor.events import WarningEvent
from convoy.outer.job import Job
from convoy.outer.meter import Meter
from convoy.outer.single import finish_epoch, first_step_seed, is_checkpoint_step, reason_to_end
from convoy.pipeline.delayed import DelayedExecutor, make_delayed
from convoy.pipeline.layout import Layout
from convoy.pipeline.recipe import parse_recipe
from convoy.pipeline.segments import parse_switch, segment_steps
from convoy.randomness import seed_torch


class VirtualPipeline:
    """Trains a job as a pipeline of some stages would.

    Args:
        job: whose executor computes the plain part of a hybrid run.
        layout: where the network is cut.
    """

    def __init__(self, job: Job, layout: Layout) -> None:
        self._job, config = job, job.config
        self._plain = job.executor
        self._steps = job.schedule.steps_per_epoch
        total = config.epochs * self._steps
        self._switch = parse_switch(config.pipelined, total, plain_first=config.plain_first)
        self._first_seed = first_step_seed(config.seed)
        recipe = parse_recipe(config.recipe)
        parts = [layout.blocks_of(stage) for stage in range(layout.size)]
        leads, arithmetic = layout.leads(recipe), self._plain.arithmetic
        make = FusedForward if isinstance(self._plain, FusedExecutor) else EagerExecutor
        self._delayed = make_delayed(job.model, parts, leads, recipe, config, arithmetic, make)
        self._pipelined = self._recorded(self._delayed)

    def _recorded(self, delayed: DelayedExecutor) -> Executor:
        """Return an executor that records steps where the plain one does."""
        if not isinstance(self._plain, GraphExecutor):
            return cast(Executor, delayed)
        return GraphExecutor(delayed.model, delayed.optimizer, delayed.arithmetic, eager=delayed)

    def _warn(self, why: str) -> None:
        self._job.events.emit(WarningEvent(reason=why))

    def train(self) -> str:
        """Train until the job is done; return the reason it is, in words."""
        job = self._job
        while job.progress.epoch < job.config.epochs:
            self._train_epoch()
            if job.stop.requested:
                job.save("interrupted")
                job.require_saved()
                raise Interrupted(f"stopped at step {job.progress.updates}; all is saved")
            reason = reason_to_end(job, finish_epoch(job))
            if reason is not None:
                return reason
        return f"all {job.config.epochs} epochs are done"

    def _train_epoch(self) -> None:
        """Do the steps that are left of the current epoch, segment by segment."""
        job = self._job
        meter = Meter(job)
        while job.progress.step < self._steps and not job.stop.requested:
            self._train_segment(meter)
            if is_checkpoint_step(job):
                with meter.paused():
                    job.save(f"every {job.config.checkpoint_steps} steps")
        meter.read()

    def _train_segment(self, meter: Meter) -> None:
        job = self._job
        progress, config = job.progress, job.config
        accuracies = [record.test_accuracy for record in progress.history]
        self._use(self._switch.is_pipelined(progress.updates, accuracies))
        count = segment_steps(
            progress.step, progress.updates, self._steps, config.checkpoint_steps, self._switch
        )
        last = max(0, progress.updates - 1)
        rate = job.schedule.rate(last)
        self._delayed.optimizer.begin_segment(rate, last / self._steps)
        self._delayed.optimizer.drain(rate)
        epoch = job.train.epoch(progress.epoch, seed=config.seed, augmentation=job.augmentation)
        batches = epoch.batches(config.batch, first=progress.step)
        for _, batch in zip(range(count), batches, strict=False):
            if job.stop.requested:
                break
            seed_torch(self._first_seed + progress.updates, job.train.device)
            self._delayed.optimizer.begin_update(progress.updates / self._steps)
            sums = job.executor.step(batch, len(batch), job.schedule.rate(progress.updates))
            progress.step += 1
            progress.updates += 1
            progress.samples += sums.count
            meter.add(sums)

    def _use(self, pipelined: bool) -> None:
        """Let the next steps be pipelined or plain; momentum goes over."""
        job, chosen = self._job, self._pipelined if pipelined else self._plain
        if job.executor is not chosen:
            momentum = momentum_tensors(job.executor.optimizer, job.model)
            restore_momentum(chosen.optimizer, job.model, momentum)
            job.executor = chosen
