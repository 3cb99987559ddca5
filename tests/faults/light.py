"""The real parameter service with clients that do not train: a fault costs milliseconds.

A light client does what a node does, with `Exchange` and all, but for the training: it hands in
a vector with a single 1, at a place that no other submission has. The rule `ADDING` adds what
comes in as it is, so that the weights say of every submission how often it was applied.
"""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import grpc
import psutil
import torch
from torch import Tensor

from convoy.config import Config
from convoy.errors import ConvoyError
from convoy.launch.door import TOKEN_KEY, open_channel
from convoy.launch.parameters import messages_pb2 as wire
from convoy.launch.parameters.exchange import Exchange, Given, Service
from convoy.launch.parameters.keeper import Keeper
from convoy.launch.parameters.process import ServiceLostError, ServiceOrder, ServiceProcess
from convoy.launch.parameters.record import Record
from convoy.launch.parameters.shell import ParameterShell
from convoy.launch.parameters.vectors import Arriving, Coding
from convoy.memory.shared import SharedRooms
from convoy.outer.crew import Tls
from convoy.outer.server import BehindError, FencedError, ParameterServer, Report
from convoy.outer.service_plan import make_server
from convoy.outer.work import Order, Span, cut_spans
from tests.faults.history import (
    Attempt,
    History,
    Story,
    applied_spans,
    find_faults,
    find_sample_faults,
    marks_in,
    retell,
    watch,
)

ADDING = "fedbuff:size=1,power=0"
RUN, MODEL = "a-run", "a-model"
NODE_TOKEN, LEAD_TOKEN = "node-token-0123456789abcdef", "lead-token-0123456789abcdef"
LOCAL_BATCH = 5
SIZE = 3000  # of the vector: room for so many submissions
SPEED = 100.0


def make_config(**options: Any) -> Config:
    """Return a config for the service: a submission for every `LOCAL_BATCH` samples."""
    chosen = {
        "strategy": "server",
        "rule": ADDING,
        "exchange_every": 1,
        "local_batch": LOCAL_BATCH,
        "overlap": False,
        "epochs": 1,
        "warmup_epochs": 0.0,
    }
    return Config(**{**chosen, **options})


class Leading(Protocol):
    """What a lead says to the service."""

    @property
    def address(self) -> str: ...

    def admit(self, node: int, incarnation: str, speed: float) -> None: ...

    def remove(self, node: int, incarnation: str) -> None: ...

    def standing(self) -> dict[str, Any]: ...

    def weights(self, epoch: int) -> tuple[int, Tensor]: ...


class Bench:
    """The service in this very process, on a port of its own.

    Args:
        submissions: how many make up the whole work.
        options: of the config.
    """

    def __init__(
        self,
        submissions: int = 200,
        *,
        nodes: int = 4,
        size: int = SIZE,
        folder: Path | None = None,
        tls: Tls | None = None,
        **options: Any,
    ) -> None:
        self.config = make_config(nodes=nodes, **options)
        self.samples, self.nodes, self.size = submissions * LOCAL_BATCH, nodes, size
        folder = folder or Path("bench")
        folder.mkdir(exist_ok=True)
        self.record = folder / "record.jsonl"
        self._rooms = SharedRooms()
        self.server = self.make(torch.zeros(size))
        self.rule = watch(self.server)
        self._file = Record(self.record)
        self._file.write("start", version=self.server.version, done=0, nodes=nodes)
        self.shell = ParameterShell(
            self.server,
            self._rooms,
            run=RUN,
            model=MODEL,
            tokens=(NODE_TOKEN, LEAD_TOKEN),
            keeper=Keeper(folder / "service"),
            record=self._file,
            journal=self.config.durability == "journal",
            write_every=self.config.durable_updates,
        )
        self.port = self.shell.listen("127.0.0.1", 0, tls)
        self.certificate = tls.certificate if tls else None
        self._channel = open_channel(self.address, self.certificate)
        self.call("Open", wire.Ask())

    def make(self, vector: Tensor, done: int = 0) -> ParameterServer:
        """Return such a server as this bench serves."""
        weights = vector.numel()
        return make_server(
            self.config, vector, weights, self.samples, self.nodes, done, rooms=self._rooms
        )

    def __enter__(self) -> "Bench":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()
        self.shell.close()
        self._file.__exit__(kind, error, trace)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    # ------------------------------------------------------------ as a lead

    def call(self, method: str, message: Any, token: str = LEAD_TOKEN) -> bytes:
        """Call one of the lead's methods."""
        stub = self._channel.unary_unary(
            f"/convoy.Parameters/{method}", request_serializer=lambda m: m.SerializeToString()
        )
        answer: bytes = stub(message, metadata=((TOKEN_KEY, token),), timeout=10)
        return answer

    def admit(self, node: int, incarnation: str, speed: float = SPEED) -> None:
        self.call("Admit", wire.Admission(node=node, incarnation=incarnation, speed=speed))

    def remove(self, node: int, incarnation: str) -> None:
        self.call("Remove", wire.Admission(node=node, incarnation=incarnation))

    def standing(self) -> dict[str, Any]:
        found = wire.Standing.FromString(self.call("Status", wire.Ask()))
        values: dict[str, Any] = json.loads(found.values)
        return values

    def weights(self, epoch: int = 0) -> tuple[int, Tensor]:
        stub = self._channel.unary_stream(
            "/convoy.Parameters/Weights",
            request_serializer=wire.Ask.SerializeToString,
            response_deserializer=wire.Down.FromString,
        )
        call = stub(wire.Ask(epoch=epoch), metadata=((TOKEN_KEY, LEAD_TOKEN),), timeout=10)
        told = next(call).told
        arriving = Arriving(self.size, torch.float32, "full")
        for message in call:
            arriving.add(message.data)
        return told.version, arriving.vector(told.checksum)

    def story(self) -> Story:
        """Return what the record tells."""
        return retell(self.record, self.make)


class GoneError(ConvoyError):
    """The test has ended a client."""


class Client:
    """A node that does not train.

    Args:
        lead: whom it joins.
        pause_s: how long an order takes.
        address: where it finds the service, if not where it is.
        check: is asked before each further try; raises to end the client.
    """

    def __init__(
        self,
        lead: Leading,
        history: History,
        node: int,
        *,
        size: int = SIZE,
        pause_s: float | Callable[[], float] = 0.0,
        address: str | None = None,
        coding: Coding = "full",
        certificate: bytes | None = None,
        value: float = 1.0,
    ) -> None:
        self._lead, self._history, self.node = lead, history, node
        self._pause_s = pause_s if callable(pause_s) else lambda: pause_s
        self._size, self._value = size, value
        self._service = Service(address or lead.address, NODE_TOKEN, RUN, certificate, 60.0)
        self._coding: Coding = coding
        self._starts = 0
        self._carried: list[Span] = []
        self.incarnation = ""
        self.is_ended = False
        self.fenced, self.behind, self.retries = 0, 0, 0
        self.acknowledged_at: list[float] = []
        self.joined_at: list[float] = []
        self.problem: BaseException | None = None
        self._exchange: Exchange | None = None
        self._thread = threading.Thread(target=self._run, name=f"client {node}", daemon=True)

    # ------------------------------------------------------------ from the test

    def start(self) -> "Client":
        self._thread.start()
        return self

    def end(self) -> None:
        """End it as if it had been killed: whatever it has not been told is lost to it."""
        self.is_ended = True

    def join(self, limit_s: float = 60.0) -> None:
        """Wait until it has no more to do."""
        self._thread.join(limit_s)
        assert not self._thread.is_alive(), f"client {self.node} still runs after {limit_s:g} s"
        if self.problem is not None:
            raise self.problem

    # ------------------------------------------------------------ in its thread

    def _check(self) -> None:
        if self.is_ended:
            raise GoneError("ended by the test")

    def _run(self) -> None:
        try:
            while not self.is_ended:
                try:
                    self._take_part()
                    return
                except FencedError:
                    self.fenced += 1
        except GoneError:
            return
        except BaseException as error:
            self.problem = error

    def _admit(self) -> None:
        """Join as a new start of this node, as soon as the service can hear of it."""
        self._starts += 1
        self.incarnation = f"{self.node:04d}-{self._starts:04d}"
        while True:
            try:
                self._lead.admit(self.node, self.incarnation, SPEED)
                return
            except (ServiceLostError, grpc.RpcError):
                self._check()
                time.sleep(0.02)

    def _take_part(self) -> None:
        self._admit()
        self._number, self._carried = 0, []
        exchange = self._exchange = Exchange(
            self._service,
            self.node,
            self.incarnation,
            model=MODEL,
            size=self._size,
            dtype=torch.float32,
            coding=self._coding,
            check=self._check,
        )
        try:
            given = exchange.pull()
            self.joined_at.append(time.monotonic())
            while not given.is_over:
                self._check()
                if given.order is None:
                    time.sleep(0.02)
                    given = exchange.pull()
                    continue
                given = self._do(exchange, given, given.order)
        finally:
            self.retries += exchange.retries
            exchange.close()

    def _do(self, exchange: Exchange, given: Given, order: Order) -> Given:
        time.sleep(self._pause_s())
        main, ahead = cut_spans(order.spans, order.samples - order.ahead)
        spans, self._carried = [*self._carried, *main], ahead
        self._number += 1
        attempt = self._history.attempt(
            self.node, self.incarnation, self._number, given.version, spans
        )
        samples = sum(span.samples for span in spans)
        pending = exchange.push(
            given.version,
            self.vector(attempt),
            Report(samples, correct=samples, busy_s=samples / SPEED, step_s=samples / SPEED),
        )
        try:
            answer = pending.result()
        except BehindError:
            self.behind += 1
            self._carried = []
            self._history.decline(attempt, "behind")
            return exchange.pull()
        if answer.refused:
            self._carried = []
            self._history.decline(attempt, answer.refused)
        else:
            self.acknowledged_at.append(time.monotonic())
            self._history.acknowledge(attempt, answer.version)
        return answer

    def vector(self, attempt: Attempt) -> Tensor:
        """Return what a submission hands in: its mark."""
        vector = torch.zeros(self._size)
        vector[attempt.place] = self._value
        return vector


@contextlib.contextmanager
def running(clients: Sequence[Client]) -> Iterator[None]:
    """Run clients; none outlives the test."""
    try:
        for client in clients:
            client.start()
        yield
    finally:
        for client in clients:
            client.end()
        for client in clients:
            client.join()


def find_all_faults(
    lead: Leading, history: History, samples: int, epochs: int = 1, *, lost_at_most: int = 0
) -> list[str]:
    """Check a run that is over: with `ADDING`, the weights tell what was applied."""
    version, weights = lead.weights(0)
    applied = marks_in(weights)
    faults = find_faults(history, applied, lost_at_most=lost_at_most)
    faults += find_sample_faults(applied_spans(history, applied), samples, epochs)
    if version - 1 != len(applied):
        faults.append(f"version {version} does not fit {len(applied)} submissions")
    return faults


# ---------------------------------------------------------------- as a process


class Child:
    """The service as a process, with a lead that starts it again and names its nodes.

    Attributes:
        kills: how often it was killed; `killed_early`: before it had started.
        resumed_s: from each kill until the service was serving again.
        announced: the newest version that it said was durable.
        lost: of each kill, how many submissions it took that had been acknowledged.
    """

    def __init__(
        self, submissions: int, history: History, *, nodes: int = 4, **options: Any
    ) -> None:
        self.config = make_config(nodes=nodes, **options)
        self.samples, self.nodes = submissions * LOCAL_BATCH, nodes
        self.record = Path("record.jsonl")
        self._history = history
        self.lost: list[int] = []
        self._missing: set[int] = set()
        self.kills, self.killed_early, self.announced = 0, 0, 0
        self.resumed_s: list[float] = []
        self.faults: list[str] = []
        self.died: Counter[str] = Counter()
        self._members: dict[int, tuple[str, float]] = {}
        self._lock = threading.RLock()
        self._process = ServiceProcess(
            ServiceOrder(
                config=self.config,
                run=RUN,
                vector=torch.zeros(SIZE),
                weights=SIZE,
                model=MODEL,
                samples=self.samples,
                nodes=nodes,
                done=0,
                folder=Path("service"),
                record=self.record,
                tokens=(NODE_TOKEN, LEAD_TOKEN),
                host="127.0.0.1",
            )
        )
        self._process.open()

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.end()

    @property
    def address(self) -> str:
        return self._process.address

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    @property
    def rss(self) -> int:
        """Return the memory that the service uses, in bytes."""
        return int(psutil.Process(self.pid).memory_info().rss)

    def admit(self, node: int, incarnation: str, speed: float = SPEED) -> None:
        with self._lock:
            self._process.admit(node, incarnation, speed)
            self._members[node] = (incarnation, speed)

    def remove(self, node: int, incarnation: str) -> None:
        with self._lock:
            self._members.pop(node, None)
            self._process.remove(node, incarnation)

    def standing(self) -> dict[str, Any]:
        with self._lock:
            found = self._process.standing()
        self.announced = max(self.announced, found["durable_version"])
        return found

    def weights(self, epoch: int = 0) -> tuple[int, Tensor]:
        with self._lock:
            return self._process.weights(epoch)

    def make(self, vector: Tensor, done: int = 0) -> ParameterServer:
        """Return such a server as the child serves."""
        weights = vector.numel()
        return make_server(self.config, vector, weights, self.samples, self.nodes, done)

    def story(self) -> Story:
        """Return what the record tells."""
        return retell(self.record, self.make)

    def kill(self) -> None:
        """Kill it without warning, and be the lead that notices."""
        os.kill(self.pid, signal.SIGKILL)
        self.kills += 1
        self.revive()

    def kill_twice(self) -> None:
        """Kill it, and kill it again before it has started."""
        first = self.pid

        def is_started() -> bool:
            with contextlib.suppress(ValueError):  # between two, there is none
                return self._process.pid not in (None, first)
            return False

        def kill_the_next() -> None:
            wait_until(is_started, "it is started again")
            os.kill(self.pid, signal.SIGKILL)
            self.kills += 1

        killer = threading.Thread(target=kill_the_next)
        killer.start()
        self.kill()
        killer.join(10)
        if self.died.total() < self.kills:  # it had been quicker
            self.revive()

    def revive(self) -> None:
        """Start it again and name those who take part, as a lead does."""
        since = time.monotonic()
        with self._lock:
            while not self._is_back():
                assert time.monotonic() - since < 10, "it does not come back"
                time.sleep(0.005)
            if self._process.version < self.announced:
                told = f"back at {self._process.version}, {self.announced} was told to be durable"
                self.faults.append(told)
            for node, (incarnation, speed) in self._members.items():
                self._process.admit(node, incarnation, speed)
            self._process.open()
            self.resumed_s.append(time.monotonic() - since)

    def _is_back(self) -> bool:
        """Look after the service, as a lead does; tell whether it answers."""
        how = self._process.revive()
        if how is not None:
            self.died[how] += 1
        with contextlib.suppress(ServiceLostError):
            self._note_lost()
            return self.died.total() == self.kills
        self.killed_early += how is not None
        return False

    def _note_lost(self) -> None:
        """Compare what clients were told with the weights, before anybody is served again."""
        _, weights = self._process.weights(0)
        missing = set(self._history.acknowledged) - set(marks_in(weights))
        self.lost.append(len(missing - self._missing))
        self._missing |= missing


def wait_until(holds: Callable[[], object], what: str, limit_s: float = 30.0) -> float:
    """Wait until something holds; return how long it took."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < limit_s, f"not within {limit_s:g} s: {what}"
        time.sleep(0.005)
    return time.monotonic() - started


def connect(address: str) -> socket.socket:
    """Return a bare connection to a service."""
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def stack_of(*contexts: Any) -> ExitStack:
    """Return some contexts as one."""
    with ExitStack() as stack:
        for one in contexts:
            stack.enter_context(one)
        return stack.pop_all()
