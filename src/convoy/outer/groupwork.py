"""One node's part in a run whose nodes form groups: they agree, test, report and save together.

What a group does with a batch is a strategy's own (lockstep.py, convoy.pipeline.runner). What is
common: a group forms from whoever is there, brings all its members to the same state, and one of
them, the scribe, tells the lead what happens and hands over checkpoints.
"""

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from convoy.errors import ConvoyError
from convoy.monitor.events import GroupEvent, LedgerEvent, SharesEvent
from convoy.outer.account import Account
from convoy.outer.allocation.shares import apportion
from convoy.outer.job import Job
from convoy.outer.membership import Formation, Group, GroupLostError
from convoy.outer.single import close_epoch, evaluate_part, first_step_seed, reason_to_end
from convoy.outer.state import as_tensor, pack, unpack
from convoy.storage.checkpoint import Checkpoint

# Much longer than connecting may take: whoever asks again just as a group forms without knowing
# it would let the others wait to connect, and then miss them in turn.
_ASK_FOR_S = 20.0


class StandAside(ConvoyError):  # noqa: N818 - it is a decision, not a fault
    """This node costs more than it brings; the others go on without it."""


class Left(ConvoyError):  # noqa: N818 - it is an outcome, not a fault
    """This node was asked to leave and has left; the others go on."""


class LeadLink(Protocol):
    """What a node needs of the lead of its run."""

    wants_regroup: bool
    """Somebody waits to join; set by the lead, cleared when a group forms."""

    wants_stop: bool
    """The run is to be saved and left."""

    leaving: bool
    """This node alone is to leave."""

    def check(self) -> None:
        """Raise if the lead is gone."""
        ...

    def set_scribe(self, is_scribe: bool) -> None:
        """Say whether this node's events are the run's."""
        ...

    def describe(self, speed: float, step: int) -> None:
        """Tell how fast this node is and how far."""
        ...

    def deposit(self, checkpoint: Checkpoint, reason: str) -> None:
        """Have a checkpoint written."""
        ...

    def fetch_state(self) -> bytes:
        """Return the newest checkpoint, packed."""
        ...


class GroupWork:
    """What a node does in a group, whatever the strategy."""

    shares_of = "samples"

    def __init__(self, job: Job, group: Group, lead: LeadLink, speed: float) -> None:
        self._job = job
        self._group = group
        self._lead = lead
        self._speed = speed
        self._formation: Formation | None = None
        steps = job.schedule.steps_per_epoch
        self._account = Account(steps, job.config.batch, len(job.train))
        self._first_seed = first_step_seed(job.config.seed)
        job.deposit = self._deposit

    # ---------------------------------------------------------------- what a strategy fills in

    def _begin_group(self) -> None:
        """Get ready to train with the members of a new group."""
        raise NotImplementedError

    def _shares(self) -> Sequence[int]:
        """Return what each member is given of the work."""
        raise NotImplementedError

    def _speeds(self) -> Sequence[float]:
        """Return the samples per second of each member, as far as they are known."""
        raise NotImplementedError

    def _train_epoch(self) -> bool:
        """Do what is left of the epoch; tell whether it is complete."""
        raise NotImplementedError

    def _step_aside_if_told(self) -> None:
        """Leave the group, or go on without others, where its members have so decided."""

    def _average_statistics(self) -> None:
        """Make the network the same on all members, and whole on the scribe."""

    def _go_back(self) -> None:
        """Return to what was saved, where a part of the network was lost with another member."""

    def _note_updates_done_alone(self) -> None:
        """Write down what is in the weights and not in the account yet."""

    def _emit_nodes(self) -> None:
        """Tell what the members did since the last time."""

    # ---------------------------------------------------------------- the run

    def train(self) -> str:
        """Train until the job is done; return the reason it is, in words."""
        self._regroup("the run starts")
        config = self._job.config
        while self._job.progress.epoch < config.epochs:
            if not self._train_epoch():
                self._finish_interrupted()
                return "interrupted"
            reason = self._finish_epoch()
            if reason is not None:
                return reason
        return f"all {config.epochs} epochs are done"

    # ---------------------------------------------------------------- groups

    @property
    def formation(self) -> Formation:
        """Return the group this node is in."""
        assert self._formation is not None
        return self._formation

    @property
    def _is_scribe(self) -> bool:
        return self.formation.rank == self.formation.source

    def _regroup(self, why: str) -> None:
        """Form a group with whoever is there, and bring all of it to the same state."""
        started = time.perf_counter()
        if self._formation is not None:
            self._flush()
        self._go_back()
        while True:
            self._lead.check()
            self._lead.wants_regroup = False
            try:
                position = self._job.progress.position
                self._formation = self._group.form(position, self._speed, _ASK_FOR_S)
                self._share_state()
                self._begin_group()
                break
            except (GroupLostError, TimeoutError):
                self._go_back()  # someone else was lost, or is not there yet: ask again
        self._lead.set_scribe(self._is_scribe)
        self._emit_group(why, time.perf_counter() - started)
        self._report_ledger()  # of updates whose teller may just have died
        self._step_aside_if_told()

    def _share_state(self) -> None:
        """Give the furthest member's state to those that are behind."""
        formation = self.formation
        if formation.rank == formation.source and formation.behind:
            state, told = pack(self._job.snapshot()), self._account.pack()
            lengths, block = torch.tensor([len(state), len(told)]), as_tensor(state + told)
            for rank in formation.behind:
                self._group.send(lengths, rank)
                self._group.send(block, rank)
        elif formation.rank in formation.behind:
            lengths = torch.zeros(2, dtype=torch.int64)
            self._group.receive(lengths, formation.source)
            block = torch.empty(int(lengths.sum()), dtype=torch.uint8)
            self._group.receive(block, formation.source)
            received = block.numpy().tobytes()
            self._job.take_over(unpack(received[: int(lengths[0])]), "the state of a peer")
            self._account.unpack(received[int(lengths[0]) :])

    def _emit_group(self, why: str, pause_s: float) -> None:
        formation, step = self.formation, self._job.progress.updates
        numbers = [member.number for member in formation.members]
        self._job.events.emit(
            GroupEvent(
                quorum=formation.quorum,
                step=step,
                nodes=numbers,
                pause_s=round(pause_s, 3),
                reason=why,
            )
        )
        self._emit_shares("from probes and earlier steps")

    def _emit_shares(self, reason: str) -> None:
        self._job.events.emit(
            SharesEvent(
                step=self._job.progress.updates,
                nodes=[member.number for member in self.formation.members],
                shares=list(self._shares()),
                speeds=[round(speed, 2) for speed in self._speeds()],
                reason=reason,
                of=self.shares_of,
            )
        )

    def _leave(self) -> None:
        self._flush()
        if self.formation.size == 1:
            self._job.save("the last node leaves")
        self._group.leave()
        raise Left("asked to leave")

    # ---------------------------------------------------------------- epochs

    def _finish_epoch(self) -> str | None:
        """Test the network together, record the epoch, save; say why training ends, if it does."""
        job = self._job
        started = time.perf_counter()
        while True:
            try:
                self._average_statistics()
                loss, correct = self._evaluate()
                break
            except GroupLostError as error:
                epoch = job.progress.epoch
                self._regroup(str(error))
                if job.progress.epoch != epoch:
                    return self._reason_to_end()  # the others had finished it
                if job.progress.step < job.schedule.steps_per_epoch:
                    return None  # they have gone back
        job.progress.seconds += time.perf_counter() - started
        count = len(job.test)
        record = close_epoch(job, loss / count, correct / count)
        started = time.perf_counter()
        self._report_ledger()
        if self._is_scribe:
            job.save(f"epoch {record.epoch}", score=record.test_accuracy)
        job.progress.seconds += time.perf_counter() - started
        return self._reason_to_end()

    def _reason_to_end(self) -> str | None:
        history = self._job.progress.history
        return reason_to_end(self._job, history[-1]) if history else None

    def _finish_interrupted(self) -> None:
        self._flush()
        try:
            self._save("interrupted")
        except GroupLostError:  # the others are gone already: what we have is as good
            self._job.save("interrupted")

    def _save(self, reason: str) -> None:
        self._average_statistics()
        if self._is_scribe:
            self._report_ledger()
            self._job.save(reason)

    def _evaluate(self) -> tuple[float, int]:
        """Test the network, each node on a part in proportion to its speed."""
        job, formation = self._job, self.formation
        mirrored = job.config.mirrored_test
        parts = apportion(self._speeds(), len(job.test))
        start = sum(parts[: formation.rank])
        stop = start + parts[formation.rank]
        loss, correct = evaluate_part(job.executor, job.test, start, stop, mirrored=mirrored)
        if formation.size == 1:
            return loss, correct
        sums = self._sum(torch.tensor([loss, float(correct)], dtype=torch.float64)).tolist()
        return float(sums[0]), round(sums[1])

    def _sum(self, values: Tensor) -> Tensor:
        """Add up a tensor over all members."""
        on_gpu = self.formation.backend == "nccl"
        values = values.to(self._job.train.device) if on_gpu else values
        self._group.sum(values)
        return values

    # ---------------------------------------------------------------- reports

    def _flush(self) -> None:
        """Tell the lead what happened since the last time."""
        self._report_ledger()
        self._emit_nodes()
        self._lead.describe(self._speed, self._job.progress.updates)

    def _deposit(self, checkpoint: Checkpoint, reason: str) -> None:
        """Hand a checkpoint to the lead, after the ledger of everything that is in it."""
        self._note_updates_done_alone()
        self._report_ledger()
        self._lead.deposit(checkpoint, reason)

    def _report_ledger(self) -> None:
        if self._formation is None or not self._is_scribe:
            return
        news = self._account.take_news()
        if news:
            self._job.events.emit(LedgerEvent(updates=news))
