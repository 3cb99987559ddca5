"""The strategy `pipeline`: each node computes some layers of every batch.

Between two segments every node has the whole network: then a group forms, the network is cut,
tested and saved. Within a segment a node trains its stage alone (flow.py). A node that dies takes
what was trained since the segment's start with it; the others go back there, cut the network
anew for those who are left, and go on.
"""

import time
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from convoy.inner.executor import Sums, grain_of
from convoy.inner.memory import free_memory
from convoy.inner.optimizer import hold_momentum
from convoy.inner.passes import Passes
from convoy.inner.tasks.passes import TaskPasses
from convoy.inner.tasks.step import Grain
from convoy.monitor.events import NodesEvent, NoteEvent, WarningEvent
from convoy.outer.groupwork import GroupWork, LeadLink, StandAside
from convoy.outer.job import Job
from convoy.outer.membership import Group, GroupLostError
from convoy.outer.meter import Meter
from convoy.outer.single import is_checkpoint_step
from convoy.outer.state import pack, unpack
from convoy.outer.tally import Tally
from convoy.pipeline.between import Between
from convoy.pipeline.costs import measure_blocks
from convoy.pipeline.cycle import cycle_event
from convoy.pipeline.flow import Cargo, Flow
from convoy.pipeline.forms import forms_of
from convoy.pipeline.gather import gather
from convoy.pipeline.layout import choose_bounds, lay_out, most_stages
from convoy.pipeline.partition import Bounds, Worker, rescaled, slowest_stage
from convoy.pipeline.passes import EagerPasses
from convoy.pipeline.recipe import parse_recipe
from convoy.pipeline.schedule import can_postpone, should_postpone
from convoy.pipeline.segments import parse_switch, segment_steps
from convoy.pipeline.stage import Stage

_PROBE_S = 1.5
_TRIALS = 3  # short segments at the start of a group: the cut is judged by what they took
_TRIAL_BATCHES = 10
# What a new cut must promise, as a part of what a batch takes now: little, while cuts are tried.
_WORTH_TRYING, _WORTH_IT = 0.98, 0.96
_CYCLE_EVERY_S = 30.0
_POSTPONING = "gradients are sent before those of a stage's own weights are computed"
_REGROUP, _STOP, _BATCHES, _PROGRESS = range(4)  # places in the numbers at a segment's end
_COUNTERS = ("step", "updates", "samples", "loss", "correct", "count", "train_seconds", "seconds")
_WHOLE = ("step", "updates", "samples", "correct", "count")


def settling_batches(stages: int) -> int:
    """Return how many batches a new group's trials take at most."""
    return _TRIALS * (_TRIAL_BATCHES + stages)


class Pipeline(GroupWork):
    """One node's part in a pipeline."""

    shares_of = "layers"

    def __init__(self, job: Job, group: Group, lead: LeadLink, speed: float) -> None:
        super().__init__(job, group, lead, speed)
        config, arithmetic = job.config, job.executor.arithmetic
        shape = job.data.train.shape_CHW
        self._recipe = parse_recipe(config.recipe)
        self._steps = job.schedule.steps_per_epoch
        total = config.epochs * self._steps
        self._switch = parse_switch(config.pipelined, total, plain_first=config.plain_first)
        self._forms = forms_of(job.model, shape, arithmetic)
        self._costs = measure_blocks(job.model, shape, config.batch, arithmetic, _PROBE_S)
        self._cycle_told_at = 0.0
        # The stage as tasks, where it is computed so: of which blocks, and what was recorded.
        self._recorded: tuple[tuple[int, int], TaskPasses] | None = None
        self._by_tasks = config.executor == "tasks"
        self._can_postpone = can_postpone(arithmetic.precision)
        # For which cut, and how far ahead, stages were seen to wait for each other.
        self._postponing: tuple[Bounds, list[int]] | None = None

    # ---------------------------------------------------------------- groups

    @property
    def _is_scribe(self) -> bool:
        """The last stage knows the losses: it tells."""
        return self.formation.rank == self.formation.size - 1

    def _begin_group(self) -> None:
        job, size = self._job, self.formation.size
        self._between = Between(
            self._group, self.formation, self._forms, job.config.batch, job.train.device
        )
        own = [free_memory(job.train.device), self._between.link_speed(), *self._costs.seconds]
        rows = torch.zeros(size, len(own), dtype=torch.float64)
        rows[self.formation.rank] = torch.tensor(own, dtype=torch.float64)
        self._workers = [
            Worker(tuple(seconds), int(memory), speed)
            for memory, speed, *seconds in self._shared(rows).tolist()
        ]
        self._trials = _TRIALS if size > 1 and not job.config.cuts else 0
        self._postponing = None
        self._tally = Tally(size)
        if size <= most_stages(job.model):
            self._cut(choose_bounds(job.config, self._costs, self._workers))

    def _cut(self, bounds: Bounds) -> None:
        self._layout = lay_out(self._job.model, bounds)
        self._between.meet(self._layout, self._layout.leads(self._recipe))

    def _step_aside_if_told(self) -> None:
        """Let those go for whom there is no stage."""
        most = most_stages(self._job.model)
        if self.formation.size <= most:
            return
        if self.formation.rank >= most:
            self._group.leave()
            raise StandAside(f"the network can be cut into {most} stages only")
        self._regroup("there are more nodes than stages")

    def _shares(self) -> Sequence[int]:
        """Return the weight layers of each stage."""
        if self.formation.size > most_stages(self._job.model):
            return [0] * self.formation.size  # some of them are about to go
        bounds = self._layout.bounds
        ends = [sum(block.layers for block in self._costs.blocks[:bound]) for bound in bounds]
        return [stop - start for start, stop in pairwise(ends)]

    def _speeds(self) -> Sequence[float]:
        """Return what each member's probe gave."""
        return [member.speed for member in self.formation.members]

    # ---------------------------------------------------------------- segments

    def _train_epoch(self) -> bool:
        job = self._job
        while job.progress.step < self._steps:
            self._lead.check()
            if self._lead.leaving and self.formation.size == 1:
                self._leave()
            try:
                wants_regroup, wants_stop = self._train_segment()
            except GroupLostError as error:
                job.take_over(unpack(self._kept), "the segment's start")
                self._regroup(str(error))
                continue
            if wants_stop:
                return False
            if is_checkpoint_step(job):
                self._save(f"every {job.config.checkpoint_steps} steps")
            if wants_regroup:
                self._change_group()
        return True

    def _change_group(self) -> None:
        if self._lead.leaving:
            self._leave()
        self._regroup("nodes join or leave")

    def _train_segment(self) -> tuple[bool, bool]:
        """Train until the pipeline must be empty; tell whether members come or go, or all stop."""
        job, formation = self._job, self.formation
        self._kept = pack(job.snapshot())
        cargo, leads = self._cargo(), self._leads()
        stage = self._make_stage(leads)
        self._meter = Meter(job)
        place = (formation.rank, formation.size)
        flow = Flow(stage, place, self._between.channels(), cargo, self._wishes, self._note)
        batches = flow.run()
        totals = self._close(flow, batches)
        self._account_for(cargo, batches)
        self._look_at_waits(totals[-formation.size :], leads, batches)
        self._recut(totals, batches)
        return totals[_REGROUP] > 0, totals[_STOP] > 0

    def _cargo(self) -> Cargo:
        job = self._job
        progress, config = job.progress, job.config
        count = segment_steps(
            progress.step, progress.updates, self._steps, config.checkpoint_steps, self._switch
        )
        if self._trials:
            count = min(count, settling_batches(self.formation.size) // _TRIALS)
        return Cargo(
            epoch=job.train.epoch(progress.epoch, seed=config.seed, augmentation=job.augmentation),
            first=progress.step,
            update=progress.updates,
            count=count,
            batch=config.batch,
            samples=len(job.train),
            seed=self._first_seed,
            rate=job.schedule.rate,
            steps=self._steps,
        )

    def _leads(self) -> list[int]:
        progress = self._job.progress
        accuracies = [record.test_accuracy for record in progress.history]
        if self._switch.is_pipelined(progress.updates, accuracies):
            return self._layout.leads(self._recipe)
        return [0] * self._layout.size

    def _make_stage(self, leads: list[int]) -> Stage:
        executor, rank = self._job.executor, self.formation.rank
        return Stage(
            self._layout.blocks_of(rank),
            leads[rank],
            self._recipe,
            self._job.config,
            executor.arithmetic,
            self._momentum(),
            self._passes_of(rank, leads),
        )

    def _passes_of(self, rank: int, leads: list[int]) -> Passes:
        """Return what computes a stage's blocks; what was recorded of them is kept."""
        config, arithmetic = self._job.config, self._job.executor.arithmetic
        part, is_first = nn.Sequential(*self._layout.blocks_of(rank)), rank == 0
        postpones = self._postponing == (self._layout.bounds, leads)
        eager = EagerPasses(part, arithmetic, is_first=is_first, postpones=postpones)
        if not self._by_tasks:
            return eager
        place = self._layout.bounds[rank], self._layout.bounds[rank + 1]
        if self._recorded is None or self._recorded[0] != place:
            grain = grain_of(config) or Grain(0, torch.get_num_threads())
            made = TaskPasses(
                part, arithmetic, eager, wants_error=not is_first, grain=grain, tell=self._warn
            )
            self._recorded = place, made
        found = self._recorded[1]
        found.plain = eager
        return found

    def _warn(self, why: str) -> None:
        self._job.events.emit(WarningEvent(reason=why))

    def _momentum(self) -> dict[nn.Parameter, Tensor]:
        """Return the momentum of every weight, as the whole network's optimizer holds it."""
        optimizer = self._job.executor.optimizer
        hold_momentum(optimizer, {})
        states = (
            (p, optimizer.state[p].get("momentum_buffer")) for p in self._job.model.parameters()
        )
        return {p: found for p, found in states if found is not None}

    def _wishes(self) -> bool:
        """Tell whether this node wants the pipeline to be emptied."""
        lead = self._lead
        return lead.wants_regroup or lead.wants_stop or lead.leaving

    def _note(self, sums: Sums, busy: list[float], waiting: list[float]) -> None:
        """Count a batch that the last stage has finished; only there is this called."""
        progress = self._job.progress
        progress.step += 1
        progress.updates += 1
        progress.samples += sums.count
        self._tally.add([sums.count] * self.formation.size, busy, waiting)
        reported = self._meter.reports
        self._meter.add(sums)
        if self._meter.reports != reported:
            self._flush()

    # ---------------------------------------------------------------- the end of a segment

    def _close(self, flow: Flow, batches: int) -> list[float]:
        """Give everyone the whole network and the same numbers."""
        self._meter.read()
        rank, size, progress = self.formation.rank, self.formation.size, self._job.progress
        gather(self._tensors_of_stages(), rank, self._shared)
        head = _PROGRESS + len(_COUNTERS)
        numbers = torch.zeros(head + 2 * size, dtype=torch.float64)
        numbers[_REGROUP] = float(self._lead.wants_regroup or self._lead.leaving)
        numbers[_STOP] = float(self._lead.wants_stop)
        numbers[head + rank] = flow.times.per_batch
        numbers[head + size + rank] = flow.times.waiting_part
        if self._is_scribe:
            numbers[_BATCHES] = batches
            counted = [float(getattr(progress, name)) for name in _COUNTERS]
            numbers[_PROGRESS:head] = torch.tensor(counted, dtype=torch.float64)
        totals: list[float] = self._shared(numbers).tolist()
        for name, value in zip(_COUNTERS, totals[_PROGRESS:head], strict=True):
            setattr(progress, name, round(value) if name in _WHOLE else value)
        self._tell_of_cycle(flow)
        self._flush()
        return totals

    def _shared(self, values: Tensor) -> Tensor:
        return self._sum(values).cpu() if self.formation.size > 1 else values

    def _tensors_of_stages(self) -> list[list[Tensor]]:
        momentum = self._momentum()
        found = []
        for stage in range(self._layout.size):
            blocks = self._layout.blocks_of(stage)
            weights = [p for block in blocks for p in block.parameters()]
            buffers = [b for block in blocks for b in block.buffers()]
            found.append([*weights, *buffers, *(momentum[p] for p in weights if p in momentum)])
        return found

    def _account_for(self, cargo: Cargo, batches: int) -> None:
        formation = self.formation
        teller = formation.members[-1].number
        for number in range(batches):
            self._account.note(cargo.update + number, formation.quorum, [teller])

    def _look_at_waits(self, waiting: list[float], leads: list[int], batches: int) -> None:
        """Let gradients be sent first from now on, where stages wait for each other."""
        found = (self._layout.bounds, leads)
        if batches < _TRIAL_BATCHES or self.formation.size == 1:
            return
        if self._can_postpone and self._postponing != found and should_postpone(waiting):
            self._postponing = found
            if self._is_scribe and not self._by_tasks:  # as tasks they always are
                text = f"all stages wait, {min(waiting):.0%} of the time and more: {_POSTPONING}"
                self._job.events.emit(NoteEvent(text=text))

    def _recut(self, totals: list[float], batches: int) -> None:
        """Cut the network anew where a segment has shown that this would be faster."""
        head = _PROGRESS + len(_COUNTERS)
        busy = totals[head : head + self.formation.size]
        worth = _WORTH_IT
        if self._trials:
            self._trials -= 1
            worth = _WORTH_TRYING
        if self._job.config.cuts or self.formation.size == 1 or batches < _TRIAL_BATCHES:
            return
        blocks, bounds = self._costs.blocks, self._layout.bounds
        self._workers = rescaled(self._workers, bounds, busy)
        better = choose_bounds(self._job.config, self._costs, self._workers)
        now = slowest_stage(blocks, self._workers, bounds)
        if better == bounds or slowest_stage(blocks, self._workers, better) > worth * now:
            self._trials = 0
            return
        self._cut(better)
        self._emit_shares("so they take equally long, as the last segment has shown")

    # ---------------------------------------------------------------- reports

    def _tell_of_cycle(self, flow: Flow) -> None:
        """Tell what each stage did last, now and then."""
        size, now = self.formation.size, time.monotonic()
        spans = torch.zeros(size, flow.times.spans.maxlen or 1, 4, dtype=torch.float64)
        own = torch.tensor(list(flow.times.spans), dtype=torch.float64).view(-1, 4)
        spans[self.formation.rank, : len(own)] = own
        rows = self._shared(spans).tolist()
        if self._is_scribe and now - self._cycle_told_at > _CYCLE_EVERY_S:
            self._cycle_told_at = now
            numbers = [member.number for member in self.formation.members]
            self._job.events.emit(cycle_event(rows, numbers, self._job.progress.updates))

    def _emit_nodes(self) -> None:
        samples, busy, waiting = self._tally.take()
        self._job.events.emit(
            NodesEvent(
                step=self._job.progress.updates,
                nodes=[member.number for member in self.formation.members],
                speeds=[round(speed, 2) for speed in self._speeds()],
                shares=list(self._shares()),
                samples=samples,
                busy_s=[round(value, 4) for value in busy],
                waiting_s=[round(value, 4) for value in waiting],
                exchange_s=0.0,
            )
        )
