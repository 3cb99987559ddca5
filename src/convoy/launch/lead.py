"""The lead of a run: lets nodes in, watches over them, and sees them off.

The lead does not train. It is the one place that people talk to, and the one that keeps what
must last. One thread does all of it, from one queue. What nodes do together, and so what the
lead hears from them, depends on the strategy: see lockstep_lead.py and server_lead.py.
"""

import json
import queue
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import grpc

from convoy.config import Config
from convoy.errors import ConvoyError, Interrupted, NotEnoughNodes
from convoy.launch import wire_pb2 as wire
from convoy.launch.choose import config_of_others
from convoy.launch.lab import Lab, parse_speed_changes
from convoy.launch.links import Links
from convoy.launch.local import LocalNodes
from convoy.launch.node import Order, model_digest
from convoy.launch.roster import NodeRecord, Roster, summarise_nodes
from convoy.launch.service import Connection, LeadServer, Said
from convoy.machine import versions
from convoy.monitor.events import (
    Event,
    JoinEvent,
    LeaveEvent,
    NoteEvent,
    PausedEvent,
    WarningEvent,
    from_record,
)
from convoy.outer.crew import Crew
from convoy.outer.job import Job
from convoy.outer.state import pack

_TICK_S = 0.05
_START_GRACE_S = 8.0  # from the first node that is ready, for the others to be ready too
_STOP_PATIENCE_S = 15.0  # for nodes to finish their step and hand over their state
_END_GRACE_S = 3.0
_WRONGS_AT_MOST = 100  # things that are wrong, each told once of a node
_STATE_SLACK = 64 << 20  # a deposit may be so much longer than weights and momentum


class Lead:
    """Leads one run; a strategy's own lead fills in what nodes are told and what they tell."""

    def __init__(self, job: Job, crew: Crew, stack: ExitStack) -> None:
        self._job = job
        self._crew = crew
        self._links = stack.enter_context(Links(job.config.links)) if job.config.links else None
        self._host = self._links.lead_address if self._links else crew.serving.host
        self._model_digest = model_digest(job.model)
        self._roster = Roster()
        job.describe_nodes = lambda: summarise_nodes(self._roster)
        self._state = pack(job.snapshot())
        self._formed = False  # nodes were told to begin
        self._stopping, self._stopping_since = False, 0.0
        self._outcome: str | None = None
        self._enough_at = time.monotonic()
        self._first_ready_at: float | None = None
        self._told_paused = False
        self._wrongs: set[str] = set()  # what nodes have said to be wrong
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._begin(stack)
        self._server = LeadServer(
            replace(crew.serving, host=self._host),
            self._inbox,
            lambda: self._state,
            len(self._state) * 2 + _STATE_SLACK,
            self._handlers(),
        )
        stack.callback(self._server.close)
        self._lab = self._start_lab(stack)
        self._local = self._start_local(stack)

    # ------------------------------------------------------------ what a strategy fills in

    def _begin(self, stack: ExitStack) -> None:
        """Start what nodes need besides the lead."""

    def _handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        """Return what else can be asked at the lead's door."""
        return ()

    def _directions(self) -> dict[str, Any]:
        """Return what a node is told when it is welcomed, besides who it is."""
        return {}

    def _let_in(self, node: NodeRecord) -> None:
        """Let a node begin that is ready; others have begun already."""
        raise NotImplementedError

    def _note_lost(self, node: NodeRecord) -> None:
        """Tell whoever must know that a node does not work any more."""

    def _note_fewer(self) -> None:
        """Look at things anew: there is one node less."""

    def _note_done(self, node: NodeRecord, done: wire.Done) -> None:
        """Take in that a node is done."""
        del done
        node.state, node.connection = "gone", None

    def _take_event(self, node: NodeRecord, event: Event) -> None:
        """Take in what a node tells of the run."""

    def _note_aside(self, node: NodeRecord, aside: wire.Aside) -> None:
        """Take in that a node stands aside."""

    def _take(self, item: Any) -> None:  # noqa: ANN401 - what a strategy has put into the inbox
        """Take in what did not come from a node's call."""

    def _watch(self) -> None:
        """Look after whatever the strategy has to look after."""

    def _take_over(self) -> None:
        """Bring the job to the state that was trained."""

    # ------------------------------------------------------------ what a run needs

    def _start_lab(self, stack: ExitStack) -> Lab | None:
        config = self._job.config
        if not config.speeds:
            return None
        changes = parse_speed_changes(config.speed_changes) if config.speed_changes else ()
        return stack.enter_context(Lab(config.speeds, changes=changes))

    def _start_local(self, stack: ExitStack) -> LocalNodes:
        crew = self._crew
        orders = [
            Order(
                lead="",
                token="",
                name=f"node {slot + 1}",
                slot=slot,
                device=device,
                threads=crew.threads,
                model=crew.model,
                data=crew.data,
                namespace=self._links.namespace(slot) if self._links else None,
            )
            for slot, device in enumerate(crew.devices)
        ]
        nodes = LocalNodes(orders, self._job.config.restarts)
        stack.callback(nodes.end, 0.0)
        tls = crew.serving.tls
        nodes.start(self.address, crew.serving.token, tls.certificate if tls else None)
        return nodes

    @property
    def address(self) -> str:
        """Return where nodes can join."""
        return f"{self._host}:{self._server.port}"

    @property
    def mechanism(self) -> str | None:
        """Return how the lab holds nodes to their speeds, if it does."""
        return self._lab.mechanism if self._lab is not None else None

    # ------------------------------------------------------------ the loop

    def run(self) -> str:
        """Lead until training is over."""
        self._announce()
        while self._outcome is None:
            self._take_one()
            self._watch_processes()
            self._watch_silence()
            self._watch_stop()
            self._watch_numbers()
            self._watch_start()
            self._watch()
        return self._finish()

    def _announce(self) -> None:
        if self._lab is not None:
            self._tell(f"emulating {len(self._lab.speeds)} nodes by {self._lab.mechanism}")
        if self._links is not None:
            rates = ", ".join(f"{rate:g}" for rate in self._job.config.links)
            self._tell(f"emulating links of {rates} Mbit/s by network namespaces")
        if self._crew.serving.open_to_others:
            tls = self._crew.serving.tls
            how = f", with --certificate and a copy of {tls.path}" if tls and tls.path else ""
            self._tell(f"nodes can join at {self.address}{how}")

    def _tell(self, text: str) -> None:
        self._job.events.emit(NoteEvent(text=text))

    def _take_one(self) -> None:
        try:
            item = self._inbox.get(timeout=_TICK_S)
        except queue.Empty:
            return
        if not isinstance(item, Said):
            self._take(item)
        elif item.message is None:
            self._lose(self._roster.by_connection(item.connection), "its connection is gone")
        else:
            self._hear(item.connection, item.message)

    def _hear(self, connection: Connection, message: wire.FromNode) -> None:
        kind = message.WhichOneof("content")
        if kind == "hello":
            self._welcome(connection, message.hello)
            return
        node = self._roster.by_connection(connection)
        if node is None or node.state == "gone":
            return
        node.heard_at = time.monotonic()
        if node.state == "silent":
            self._greet_back(node)
        handlers: dict[str, Callable[[NodeRecord, Any], None]] = {
            "prepared": self._admit,
            "ready": self._note_ready,
            "alive": self._note_alive,
            "event": self._take_report,
            "aside": self._note_aside,
            "failure": self._note_failure,
            "leaving": self._see_off,
            "done": self._note_done,
        }
        if kind is not None:  # else it says something that we do not know
            handlers[kind](node, getattr(message, kind))

    def _take_report(self, node: NodeRecord, text: str) -> None:
        try:
            event = from_record(json.loads(text))
        except ValueError as error:
            self._job.events.emit(WarningEvent(reason=f"{node.label} sent nonsense: {error}"))
            return
        if not isinstance(event, WarningEvent):
            self._take_event(node, event)
            return
        told = f"{node.label}: {event.reason}"
        if told not in self._wrongs and len(self._wrongs) < _WRONGS_AT_MOST:
            self._wrongs.add(told)
            self._job.events.emit(WarningEvent(reason=told))

    # ------------------------------------------------------------ nodes come

    def _welcome(self, connection: Connection, hello: wire.Hello) -> None:
        if hello.version != versions()["convoy-train"]:
            reason = f"it runs Convoy {hello.version}, the lead {versions()['convoy-train']}"
            self._refuse(connection, hello.name, reason)
            return
        number = self._roster.next_number(hello.slot, hello.name)
        node = NodeRecord(
            number=number,
            identity=f"{number:04d}-{secrets.token_hex(4)}",
            name=hello.name,
            slot=hello.slot,
            pid=hello.pid,
            connection=connection,
            heard_at=time.monotonic(),
        )
        self._roster.add(node)
        welcome = wire.Welcome(
            number=number,
            identity=node.identity,
            config=json.dumps(self._config_for(node).as_dict()),
            address=connection.host,
            has_state=True,
            **self._directions(),
        )
        connection.tell(welcome=welcome)

    def _config_for(self, node: NodeRecord) -> Config:
        """Return a node's config: like nodes compute alike, others choose their arithmetic."""
        config = self._job.config
        alike = len({device.split(":")[0] for device in self._crew.devices}) == 1
        if node.slot >= 0 and alike:
            return config
        return config_of_others(config, self._crew.requested)

    def _refuse(self, connection: Connection, name: str, reason: str) -> None:
        self._job.events.emit(WarningEvent(reason=f"refused {name}: {reason}"))
        connection.refuse(reason)

    def _admit(self, node: NodeRecord, prepared: wire.Prepared) -> None:
        assert node.connection is not None
        wrong = []
        if prepared.data != self._job.data.digest:
            wrong.append("its data is not the run's data")
        if prepared.model != self._model_digest:
            wrong.append("its model is not the run's model")
        if wrong:
            self._roster.records.remove(node)  # it was never part of the run
            self._refuse(node.connection, node.name, "; ".join(wrong))
            return
        node.device, node.threads = prepared.device.split(" ")[0], prepared.threads
        if self._lab is not None and 0 <= node.slot < len(self._lab.speeds):
            self._lab.place(node.slot, node.pid)
        node.connection.tell(admitted=wire.Nothing())

    def _note_alive(self, node: NodeRecord, alive: wire.Alive) -> None:
        node.speed = alive.speed or node.speed

    def _note_ready(self, node: NodeRecord, ready: wire.Ready) -> None:
        node.state, node.speed, node.probed = "ready", ready.speed, ready.speed
        self._job.events.emit(
            JoinEvent(
                node=node.number,
                name=node.name,
                pid=node.pid,
                device=node.device,
                reason=f"{ready.speed:,.0f} samples/s in a probe",
            )
        )
        self._first_ready_at = self._first_ready_at or time.monotonic()
        if self._formed:
            self._let_in(node)

    def _watch_start(self) -> None:
        """Call the first group together once everybody who is expected is there.

        Nodes that take long to measure themselves are slow: the others need not wait for them.
        """
        if self._formed or self._outcome is not None or self._first_ready_at is None:
            return
        ready = self._roster.in_state("ready")
        waited = time.monotonic() - self._first_ready_at
        enough = len(ready) >= self._job.config.min_nodes
        if len(ready) >= self._crew.expect or (enough and waited > _START_GRACE_S):
            self._formed = True
            if self._lab is not None:
                self._lab.start_clock()
            self._call_together()

    def _call_together(self) -> None:
        for node in self._roster.in_state("ready", "training"):
            if node.connection is not None:
                node.connection.tell(form=wire.Nothing())

    # ------------------------------------------------------------ nodes go

    def _lose(self, node: NodeRecord | None, reason: str) -> None:
        """Note that a node is gone, and tell those who may be waiting for it."""
        if node is None or node.state == "gone":
            return
        was_training = node.state in ("training", "ready", "silent")
        node.state, node.why = "gone", reason
        node.connection = None
        node.faults += 1
        self._job.events.emit(
            LeaveEvent(node=node.number, fault=True, reason=f"{node.label} is lost: {reason}")
        )
        self._note_fewer()
        if was_training:
            self._note_lost(node)

    def _see_off(self, node: NodeRecord, leaving: wire.Leaving) -> None:
        node.state, node.why = "gone", leaving.reason
        node.connection = None
        self._note_fewer()
        reason = f"{node.label} left: {leaving.reason}"
        self._job.events.emit(LeaveEvent(node=node.number, fault=False, reason=reason))

    def _note_failure(self, node: NodeRecord, failure: wire.Failure) -> None:
        """Take in why a node cannot go on; end the run if no other could either."""
        node.why = failure.reason
        if failure.fatal and (node.slot >= 0 or node.state == "training"):
            raise _failure(failure.reason, failure.exit_code)
        self._lose(node, failure.reason)

    def _watch_processes(self) -> None:
        """Start nodes of this machine again that ended without being asked to."""
        for slot, how in self._local.collect_dead().items():
            node = self._roster.by_slot(slot)
            if node is not None and node.state != "gone":
                self._lose(node, how)
            if self._outcome is not None or self._stopping or (node and not node.faults):
                continue
            if not self._local.plan_restart(slot):
                self._job.events.emit(
                    WarningEvent(reason=f"node {slot + 1} is not started again ({how})")
                )
        self._local.start_due()

    def _watch_silence(self) -> None:
        """Leave nodes behind that give no sign of life, although their connections stand."""
        limit = time.monotonic() - self._job.config.node_timeout_s
        for node in self._roster.in_state("training", "ready", "aside"):
            if node.heard_at < limit:
                node.state = "silent"
                node.faults += 1
                reason = f"{node.label} gives no sign of life"
                self._job.events.emit(LeaveEvent(node=node.number, fault=True, reason=reason))
                self._note_lost(node)

    def _greet_back(self, node: NodeRecord) -> None:
        node.state = "ready"
        self._job.events.emit(
            JoinEvent(
                node=node.number,
                name=node.name,
                pid=node.pid,
                device=node.device,
                reason="gives signs of life again",
            )
        )
        self._call_together()

    def _watch_stop(self) -> None:
        if self._stopping and time.monotonic() - self._stopping_since > _STOP_PATIENCE_S:
            raise Interrupted(f"stopped; the nodes did not answer. {self._resume_hint() or ''}")
        if self._job.stop.requested and not self._stopping:
            self._stopping, self._stopping_since = True, time.monotonic()
            if not self._formed:
                raise Interrupted("stopped before the first step; nothing was trained")
            for node in self._roster.in_state("training", "ready"):
                if node.connection is not None:
                    node.connection.tell(stop=wire.Nothing())

    def _watch_numbers(self) -> None:
        """Give up where there are not enough nodes for too long."""
        config = self._job.config
        here = self._present()
        if len(here) >= config.min_nodes and here:
            self._enough_at = time.monotonic() if self._formed else self._enough_at
            self._told_paused = False
            return
        if not self._local.any_left and not self._crew.serving.open_to_others:
            why = "; ".join(r.why for r in self._roster.latest() if r.why)
            raise NotEnoughNodes(f"no node is left: {why}", hint=self._resume_hint())
        if self._formed and not self._told_paused:
            self._told_paused = True
            reason = f"paused: {len(here)} of at least {config.min_nodes} nodes are here"
            self._job.events.emit(PausedEvent(reason=reason))
        if time.monotonic() - self._enough_at > config.quorum_timeout_s:
            raise NotEnoughNodes(
                "there were not enough nodes for too long",
                got=len(here),
                allowed=f"at least {config.min_nodes}",
                hint=self._resume_hint(),
            )

    def _present(self) -> list[NodeRecord]:
        """Return the nodes that count as here."""
        return [node for node in self._roster.records if node.is_here]

    def _resume_hint(self) -> str | None:
        saved = self._job.last_saved
        return f"Go on with --resume {saved.parents[1]}." if saved is not None else None

    # ------------------------------------------------------------ the end

    def _finish(self) -> str:
        """Let the nodes go, and take over what they trained."""
        assert self._outcome is not None
        for node in self._roster.records:
            if node.connection is not None:
                node.connection.close()
        self._local.end(_END_GRACE_S)
        self._take_over()
        if self._outcome == "interrupted":
            self._job.require_saved()
            raise Interrupted(f"stopped at step {self._job.progress.updates}; all is saved")
        return self._outcome


def _failure(reason: str, exit_code: int) -> ConvoyError:
    error = ConvoyError(reason)
    error.exit_code = exit_code
    return error
