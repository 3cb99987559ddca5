"""The strategy `lockstep`: every node trains a share of each batch, in proportion to its speed.

A step on n nodes:

    node j takes its stretch of the batch      share_j samples, sum = batch
    gradients of (sum of losses / batch)       they add up to the gradient of one machine
    one all-reduce                             gradients, count, loss, correct, flags, times
    the same update everywhere                 weights stay equal without being exchanged
    the same new shares everywhere             from the same reduced times, by a pure function

A node that dies breaks the all-reduce. Whoever had not finished it forms a new group and does
the same batch again; whoever had finished is one step ahead and hands its state to the others.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from convoy.config import Config
from convoy.data.batches import Epoch
from convoy.inner.executor import Sums
from convoy.monitor.events import NodesEvent
from convoy.outer.allocation.plan import Rules, make_plan
from convoy.outer.allocation.speeds import SpeedBook
from convoy.outer.groupwork import GroupWork, LeadLink, StandAside
from convoy.outer.job import Job
from convoy.outer.membership import Group, GroupLostError
from convoy.outer.meter import Meter
from convoy.outer.reduction import Reduction, StepSums
from convoy.outer.single import is_checkpoint_step, train_epoch
from convoy.outer.tally import Tally
from convoy.randomness import fold, seed_torch

_HOLD_STEPS = 3  # a plan is tried for so long: every change costs, for shapes are new
_SETTLE_S, _SETTLE_STEPS = 2.0, 8  # a group trains at least so long before a node is sent away
_COUNT, _LOSS, _CORRECT, _REGROUP, _STOP, _TIMES = range(6)  # places in the reduced numbers


class Lockstep(GroupWork):
    """One node's part in a lockstep run."""

    def __init__(self, job: Job, group: Group, lead: LeadLink, speed: float) -> None:
        super().__init__(job, group, lead, speed)
        self._rules = rules_of(job.config)
        self._reduction: StepSums | None = None
        self._buffers = [b for b in job.model.buffers() if b.is_floating_point()]
        self._kept = [torch.empty_like(buffer) for buffer in self._buffers]
        self._alone_from: int | None = None  # updates from here on were done alone, unnoted

    # ---------------------------------------------------------------- groups

    def _begin_group(self) -> None:
        self._begin_plan()
        if self.formation.size > 1:
            self._begin_reduction(self._job.model)

    def _begin_plan(self) -> None:
        """Start with shares by what is known of the members so far."""
        members = self.formation.members
        self._book = SpeedBook([member.speed for member in members])
        self._plan = make_plan(self._book.speeds, self._group_rules())
        self._held = 0  # steps since the plan was made
        self._tally = Tally(len(members))
        self._began_at = time.perf_counter()
        self._waited = 0.0
        if self._reduction is not None:
            self._reduction.close()
            self._reduction = None

    def _begin_reduction(self, shared: nn.Module) -> None:
        """Get ready to add up the gradients of what all members have."""
        config = self._job.config
        self._reduction = reduction = Reduction(
            shared,
            extras=_TIMES + 2 * self.formation.size,
            wire=torch.bfloat16 if config.wire == "bf16" else None,
            on_gpu=self.formation.backend == "nccl",
            overlap=config.overlap,
            same_layout=self.formation.same_layout,
        )
        reduction.watch()
        dtype = self._job.executor.arithmetic.dtype
        self._group.choose_way(self.formation, reduction.last_message, dtype)

    def _shares(self) -> Sequence[int]:
        """Return each member's samples of a batch."""
        return self._plan.shares

    def _speeds(self) -> Sequence[float]:
        """Return the samples per second of each member."""
        return self._book.speeds

    def _group_rules(self) -> Rules:
        """Return the rules with the fixed proportions of those nodes that are here."""
        if self._rules.policy != "fixed":
            return self._rules
        known = self._rules.proportions
        numbers = [member.number for member in self.formation.members]
        weights = tuple(known[n] if n < len(known) else min(known) for n in numbers)
        return replace(self._rules, proportions=weights)

    def _step_aside_if_told(self) -> None:
        """Leave if the plan says so; all members read the same plan at the same moment."""
        out = {left.node: left.reason for left in self._plan.left_out}
        if not out:
            return
        if self.formation.rank in out:
            self._group.leave()
            raise StandAside(out[self.formation.rank])
        self._regroup(f"{len(out)} of {self.formation.size} nodes cost more than they bring")

    # ---------------------------------------------------------------- steps

    def _train_epoch(self) -> bool:
        """Do what is left of the epoch; tell whether it is complete."""
        job = self._job
        steps = job.schedule.steps_per_epoch
        while job.progress.step < steps:
            self._lead.check()
            if self._lead.leaving and self.formation.size == 1:
                self._leave()
            if self._lead.wants_stop and self.formation.size == 1:
                return False
            if self.formation.size == 1:
                self._train_alone()
            elif not self._train_together():
                return False
        return True

    def _train_alone(self) -> None:
        """Train like a single node until the epoch is over or someone wants something."""
        job = self._job
        self._alone_from = job.progress.updates
        started, done = time.perf_counter(), job.progress.samples
        train_epoch(job)
        self._note_updates_done_alone()
        self._alone_from = None
        elapsed, samples = time.perf_counter() - started, job.progress.samples - done
        if samples:
            self._speed = samples / elapsed
            self._tally.add((samples,), [elapsed], [0.0])
            self._flush()
        if self._lead.wants_regroup and not self._lead.leaving:
            self._regroup("a node joins")

    def _note_updates_done_alone(self) -> None:
        if self._alone_from is not None:
            for step in range(self._alone_from, self._job.progress.updates):
                self._note_update(step)
            self._alone_from = self._job.progress.updates

    def _train_together(self) -> bool:
        """Do steps until the epoch is over or the group changes; False where all must stop."""
        job = self._job
        epoch = self._make_epoch()
        meter = Meter(job)
        self._ready_at = time.perf_counter()
        try:
            while job.progress.step < job.schedule.steps_per_epoch:
                totals = self._step(epoch)
                self._commit(totals, meter)
                if totals[_STOP] > 0:
                    return False
                if is_checkpoint_step(job):
                    with meter.paused():
                        self._save(f"every {job.config.checkpoint_steps} steps")
                if totals[_REGROUP] > 0 or not self._replan():
                    meter.read()
                    self._change_group()
                    return True
        except GroupLostError as error:
            meter.read()
            self._regroup(str(error))
            return True
        finally:
            meter.read()
        self._flush()
        return True

    def _make_epoch(self) -> Epoch:
        job = self._job
        return job.train.epoch(
            job.progress.epoch, seed=job.config.seed, augmentation=job.augmentation
        )

    def _step(self, epoch: Epoch) -> list[float]:
        """Compute this node's share and add up everyone's; nothing is committed yet."""
        job, formation, reduction = self._job, self.formation, self._reduction
        assert reduction is not None
        start, shares = self._stretch()
        self._keep_buffers()
        numbers = torch.zeros(_TIMES + 2 * formation.size, dtype=job.executor.arithmetic.dtype)
        try:
            sums = self._gradients(epoch, start, shares, reduction)
            if sums is not None:
                self._fill(numbers, sums)
            numbers[_REGROUP] = float(self._lead.wants_regroup or self._lead.leaving)
            numbers[_STOP] = float(self._lead.wants_stop)
            arrived = time.perf_counter()
            blocked = self._take_blocked_s()
            numbers[_TIMES + formation.rank] = arrived - self._ready_at - blocked
            numbers[_TIMES + formation.size + formation.rank] = self._waited
            totals: list[float] = reduction.finish(numbers).tolist()
            self._check_count(totals, sum(shares))
        except GroupLostError:
            if self._buffers:
                torch._foreach_copy_(self._buffers, self._kept)
            raise
        self._ready_at = time.perf_counter()
        self._waited = self._ready_at - arrived + blocked
        return totals

    def _gradients(
        self, epoch: Epoch, start: int, shares: tuple[int, ...], reduction: StepSums
    ) -> Sums | None:
        """Compute the gradients of this node's share of a batch; None where it has none."""
        job = self._job
        reduction.begin(self._group)
        offset, share = self._seed_share(start, shares)
        if not share:
            job.executor.optimizer.zero_grad(set_to_none=True)
            return None
        return job.executor.gradients(epoch.batch(offset, offset + share), sum(shares))

    def _seed_share(self, start: int, shares: tuple[int, ...]) -> tuple[int, int]:
        """Return where this node's share begins and how large it is; what is random follows it."""
        rank = self.formation.rank
        offset = start + sum(shares[:rank])
        if shares[rank]:
            seed = fold(self._first_seed + self._job.progress.updates, offset)
            seed_torch(seed >> 1, self._job.train.device)
        return offset, shares[rank]

    def _take_blocked_s(self) -> float:
        """Return how long this node waited for others while it computed its last gradients."""
        return 0.0

    def _keep_buffers(self) -> None:
        """Remember batch-norm's statistics: if the step fails, the batch passes through again."""
        if self._buffers:
            torch._foreach_copy_(self._kept, self._buffers)

    def _stretch(self) -> tuple[int, tuple[int, ...]]:
        """Return where the next batch starts in the epoch's order, and how it is shared."""
        job = self._job
        start = job.progress.step * job.config.batch
        total = min(job.config.batch, len(job.train) - start)
        return start, self._plan.shares_of(total, self._rules.smallest)

    def _fill(self, numbers: Tensor, sums: Sums) -> None:
        parts = (sums.loss, sums.count_correct())
        found = torch.stack([part.to(numbers.dtype) for part in parts]).cpu()
        numbers[_COUNT] = sums.count
        numbers[_LOSS], numbers[_CORRECT] = found[0], found[1]

    def _check_count(self, totals: list[float], expected: int) -> None:
        if round(totals[_COUNT]) != expected:
            raise GroupLostError(f"the nodes trained {round(totals[_COUNT])} samples of {expected}")

    def _commit(self, totals: list[float], meter: Meter) -> None:
        """Move the weights; from here on the step is done."""
        job, progress = self._job, self._job.progress
        _, shares = self._stretch()
        self._note_update(progress.updates, shares)
        self._update(job.schedule.rate(progress.updates))
        progress.step += 1
        progress.updates += 1
        count = round(totals[_COUNT])
        progress.samples += count
        size = self.formation.size
        times = totals[_TIMES : _TIMES + size]
        waits = totals[_TIMES + size :]
        self._tally.add(shares, times, waits)
        if self._tally.steps == 1:
            self._began_at = time.perf_counter()  # a group's first step is cold
        else:
            self._book.observe(shares, times)
        if self._tally.steps > 2:  # what was waited is told one step later
            self._book.observe_waits(waits)
        reported = meter.reports
        meter.add_numbers(totals[_LOSS], round(totals[_CORRECT]), count)
        if meter.reports != reported:
            self._flush()

    def _update(self, rate: float) -> None:
        """Apply the gradients of the whole batch to the weights."""
        self._job.executor.update(rate)

    def _note_update(self, step: int, shares: tuple[int, ...] = ()) -> None:
        numbers = [member.number for member in self.formation.members]
        self._account.note(step, self.formation.quorum, numbers, shares)

    def _replan(self) -> bool:
        """Adapt the shares; tell whether everybody stays."""
        self._held += 1
        if self._held < _HOLD_STEPS:
            return True
        plan = make_plan(
            self._book.speeds,
            self._group_rules(),
            exchange_s=self._book.exchange_s,
            current=self._plan,
        )
        if plan.left_out and self._is_settled():
            self._plan = plan
            return False
        if not plan.left_out and plan.shares != self._plan.shares:
            self._plan, self._held = plan, 0
            self._emit_shares("measured speeds have changed")
        self._speed = self._book.speeds[self.formation.rank]
        return True

    def _is_settled(self) -> bool:
        """Tell whether enough was measured to send a node away: a slow moment proves nothing."""
        long_enough = time.perf_counter() - self._began_at >= _SETTLE_S
        return long_enough and self._tally.steps >= _SETTLE_STEPS

    def _change_group(self) -> None:
        """Form another group: somebody joins, leaves or had better stand aside."""
        self._speed = self._book.speeds[self.formation.rank]
        if self._lead.leaving:
            self._leave()
        elif self._plan.left_out:
            self._emit_shares(self._words_for_left_out())
            self._flush()
            self._step_aside_if_told()
        else:
            self._regroup("nodes join or leave")

    def _words_for_left_out(self) -> str:
        members = self.formation.members
        return "; ".join(
            f"node {members[left.node].number + 1} stands aside: {left.reason}"
            for left in self._plan.left_out
        )

    # ---------------------------------------------------------------- epochs

    def _average_statistics(self) -> None:
        """Make batch-norm's running statistics the sample-weighted mean over all nodes."""
        if self.formation.size == 1 or not self._buffers:
            return
        weight = self._plan.shares[self.formation.rank] / sum(self._plan.shares)
        flat = torch.cat([buffer.flatten() for buffer in self._buffers]).cpu() * weight
        flat = self._sum(flat)
        for buffer, part in zip(
            self._buffers, flat.split([b.numel() for b in self._buffers]), strict=True
        ):
            buffer.copy_(part.view_as(buffer))

    def _emit_nodes(self) -> None:
        samples, busy, waiting = self._tally.take()
        speeds = self._book.speeds if self.formation.size > 1 else (self._speed,)
        self._job.events.emit(
            NodesEvent(
                step=self._job.progress.updates,
                nodes=[member.number for member in self.formation.members],
                speeds=[round(speed, 2) for speed in speeds],
                shares=list(self._plan.shares),
                samples=samples,
                busy_s=[round(value, 4) for value in busy],
                waiting_s=[round(value, 4) for value in waiting],
                exchange_s=round(self._book.exchange_s, 5),
            )
        )


def rules_of(config: Config) -> Rules:
    """Return what shares must keep to."""
    return Rules(config.batch, config.min_share, config.allocation, config.shares, config.min_nodes)
