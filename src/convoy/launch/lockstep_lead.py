"""The lead of a lockstep run: calls nodes together, and writes what one of them reports.

Training does not ask the lead: nodes agree among themselves. It passes on the events of the
group's scribe, and keeps the checkpoints and the ledger that it hands over.
"""

import socket
import time
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from convoy.errors import ConvoyError
from convoy.launch import wire_pb2 as wire
from convoy.launch.lead import Lead
from convoy.launch.ledger_file import LedgerFile
from convoy.launch.roster import NodeRecord
from convoy.launch.service import Deposited
from convoy.monitor.events import (
    Event,
    GroupEvent,
    LeaveEvent,
    LedgerEvent,
    NodesEvent,
    SharesEvent,
    WarningEvent,
)
from convoy.outer.allocation.plan import worth_calling
from convoy.outer.crew import Crew
from convoy.outer.job import Job
from convoy.outer.lockstep import rules_of
from convoy.outer.membership import start_lighthouse
from convoy.outer.progress import Progress
from convoy.outer.state import unpack

_CALL_AGAIN_S = 5.0


def lead_lockstep(job: Job, crew: Crew) -> str:
    """Lead a lockstep run to its end; return in words why it ended."""
    with ExitStack() as stack:
        return LockstepLead(job, crew, stack).run()


class LockstepLead(Lead):
    """Leads one lockstep run."""

    def _begin(self, stack: ExitStack) -> None:
        """Start what groups form by: torchft's lighthouse, and a store for addresses."""
        self._scribe: NodeRecord | None = None
        self._newest = (-1, -1)  # quorum and step of the newest group
        self._rules = rules_of(self._job.config)
        self._called_at = 0.0
        self._ledger = stack.enter_context(LedgerFile(self._crew.ledger))
        self._lighthouse = self._start_lighthouse(stack)
        self._store = self._start_store()

    def _directions(self) -> dict[str, Any]:
        """Return where groups form."""
        return {"lighthouse": self._lighthouse, "store": self._store}

    def _start_lighthouse(self, stack: ExitStack) -> str:
        server = start_lighthouse(self._host, self._job.config.min_nodes)
        stack.callback(server.shutdown)
        return f"http://{self._host}:{server.address().rsplit(':', 1)[1]}"

    def _start_store(self) -> str:
        # A socket of our own, because the store would listen on every interface.
        listener = socket.create_server((self._host, 0))
        port = listener.getsockname()[1]
        self._store_server = TCPStore(
            self._host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=30),
            master_listen_fd=listener.detach(),
        )
        return f"{self._host}:{port}"

    def _let_in(self, node: NodeRecord) -> None:
        """Call a node that comes late into the group, unless it would slow the others down."""
        called = worth_calling([node.speed], self._speeds(), self._rules, self._roster.exchange_s)
        if called or len(self._roster.in_state("training")) < self._job.config.min_nodes:
            self._call_together()
            return
        assert node.connection is not None
        node.connection.tell(aside=wire.Nothing())
        reason = f"a step is not clearly shorter with its {node.speed:,.3g} samples/s"
        self._note_aside(node, wire.Aside(reason=reason, speed=node.speed))

    def _speeds(self) -> list[float]:
        return [node.speed for node in self._roster.in_state("training") if node.speed > 0]

    def _note_lost(self, node: NodeRecord) -> None:
        """Tell those who may be waiting for a node that is gone."""
        for other in self._roster.in_state("training", "ready"):
            if other.connection is not None:
                other.connection.tell(lost=node.identity)

    def _note_aside(self, node: NodeRecord, aside: wire.Aside) -> None:
        first = node.state != "aside"
        node.state, node.speed, node.why = "aside", aside.speed, aside.reason
        node.share = 0
        if first:
            node.rest(time.monotonic())
            reason = f"{node.label} stands aside: {aside.reason}"
            self._job.events.emit(
                LeaveEvent(node=node.number, fault=False, reason=reason, aside=True)
            )

    def _note_done(self, node: NodeRecord, done: wire.Done) -> None:
        """All nodes end together; the word of the one that reports is the run's."""
        if node is self._scribe:
            self._outcome = done.reason
        else:
            node.state, node.connection = "gone", None

    # ------------------------------------------------------------ spares

    def _watch(self) -> None:
        """Call back nodes that stood aside where they would now be worth it."""
        now = time.monotonic()
        spares = [node for node in self._roster.in_state("aside") if node.rests_until <= now]
        if not spares or now - self._called_at < _CALL_AGAIN_S or not self._formed:
            return
        self._called_at = now
        called = worth_calling(
            [node.speed for node in spares], self._speeds(), self._rules, self._roster.exchange_s
        )
        for node in (spares[i] for i in called):
            node.state = "ready"
            self._tell(f"{node.label} is called back: it would now make steps shorter")
        if called:
            self._call_together()

    def _note_fewer(self) -> None:
        """Let nodes that stood aside be looked at anew: one that was faster is gone."""
        for node in self._roster.in_state("aside"):
            node.rests_until = 0.0

    # ------------------------------------------------------------ what nodes report

    def _take_event(self, node: NodeRecord, event: Event) -> None:
        if isinstance(event, GroupEvent) and (event.quorum, event.step) >= self._newest:
            self._note_group(node, event)
        if node is not self._scribe:
            return  # a group that has been overtaken
        if isinstance(event, LedgerEvent):
            self._ledger.write(event.updates)
            return
        self._note_numbers(event)
        self._job.events.emit(event)

    def _note_group(self, node: NodeRecord, event: GroupEvent) -> None:
        # The same members again have the same quorum; another of them may be the one to tell.
        self._scribe, self._newest = node, (event.quorum, event.step)
        if event.step == self._job.progress.updates:
            self._ledger.go_back()  # it may start from there, whatever others did since
        for number in event.nodes:
            member = self._roster.by_number(number)
            if member is not None and member.state == "ready":
                member.state = "training"
        if self._roster.in_state("ready"):
            self._call_together()  # someone came too late for this group

    def _note_numbers(self, event: Event) -> None:
        if isinstance(event, NodesEvent):
            self._roster.exchange_s = event.exchange_s or self._roster.exchange_s
            for j, number in enumerate(event.nodes):
                record = self._roster.by_number(number)
                if record is not None:
                    record.speed, record.share = event.speeds[j], event.shares[j]
                    record.samples += event.samples[j]
                    record.busy_s += event.busy_s[j]
                    record.waiting_s += event.waiting_s[j]
        elif isinstance(event, SharesEvent):
            for number, share in zip(event.nodes, event.shares, strict=True):
                record = self._roster.by_number(number)
                if record is not None:
                    record.share = share

    def _take(self, item: Any) -> None:  # noqa: ANN401 - a deposit is all that comes
        """Have a checkpoint written that a node has handed over."""
        deposited: Deposited = item
        problem = ""
        try:
            checkpoint = unpack(deposited.block)
            progress = Progress.from_dict(checkpoint.progress)
            if progress.position >= self._job.progress.position:  # else a node that was away
                self._job.keep(checkpoint, deposited.reason)
                self._job.progress, self._state = progress, deposited.block
                self._ledger.keep(progress.updates)
        except (ConvoyError, KeyError, TypeError) as error:
            problem = f"a checkpoint that arrived is damaged: {error}"
            self._job.events.emit(WarningEvent(reason=problem))
        deposited.receipt.set_result(problem)

    def _take_over(self) -> None:
        """Take over the last checkpoint."""
        self._job.take_over(unpack(self._state), "the last checkpoint")
