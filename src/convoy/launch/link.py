"""A node's side of the wire: what the lead says becomes flags that the training loop reads."""

import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc

from convoy.errors import ConfigError, ConvoyError, EnvironmentProblem
from convoy.launch import wire_pb2 as wire
from convoy.launch.door import TOKEN_KEY, cut, open_channel
from convoy.launch.handshake import explain
from convoy.machine import versions
from convoy.monitor.events import Event, WarningEvent, as_record
from convoy.outer.membership import Group
from convoy.outer.state import pack
from convoy.storage.checkpoint import Checkpoint

_ALIVE_EVERY_S = 0.5
_ANSWER_WITHIN_S = 20.0
_REFUSALS = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
}


class LeadLostError(EnvironmentProblem):
    """The lead is gone."""


class RefusedError(ConfigError):
    """The lead will not have this node (exit code 2)."""


class Link:
    """The call that a node holds with its lead while it takes part.

    Args:
        address: "host:port".
        token: what the lead wants to hear.
        certificate: the only one that the lead may show; None where it does not use TLS.

    Attributes:
        wants_regroup: somebody waits to join.
        wants_stop: the run is to be saved and left.
        leaving: this node alone is to leave.
    """

    def __init__(self, address: str, token: str, certificate: bytes | None = None) -> None:
        self.wants_regroup = False
        self.wants_stop = False
        self.leaving = False
        self.group: Group | None = None
        self._metadata = ((TOKEN_KEY, token),)
        self._address = address
        self._certificate = certificate
        self._channel = open_channel(address, certificate)
        self._was_heard = False
        self._outbox: queue.SimpleQueue[wire.FromNode | None] = queue.SimpleQueue()
        self._welcome: queue.SimpleQueue[wire.Welcome | None] = queue.SimpleQueue()
        self._admitted = threading.Event()
        self._formed = threading.Event()
        self._lost: ConvoyError | None = None
        self._is_scribe = False
        self._speed, self._step = 0.0, 0
        self._deposits = _Depositor(self._channel, self._metadata)
        self._call = self._channel.stream_stream(
            "/convoy.Lead/Attend",
            request_serializer=wire.FromNode.SerializeToString,
            response_deserializer=wire.FromLead.FromString,
        )(self._outgoing(), metadata=self._metadata, wait_for_ready=False)
        threading.Thread(target=self._listen, name="link", daemon=True).start()

    # ------------------------------------------------------------ joining

    def join(self, name: str, slot: int) -> wire.Welcome:
        """Introduce ourselves; return what the lead tells us to begin with."""
        hello = wire.Hello(
            version=versions()["convoy-train"], name=name, pid=os.getpid(), slot=slot
        )
        self._say(hello=hello)
        try:
            welcome = self._welcome.get(timeout=_ANSWER_WITHIN_S)
        except queue.Empty:
            raise LeadLostError("the lead does not answer", got=self._address) from None
        self.check()
        assert welcome is not None
        threading.Thread(target=self._stay_alive, name="alive", daemon=True).start()
        return welcome

    def fetch_state(self) -> bytes:
        """Return the state to start from."""
        fetch = self._channel.unary_stream(
            "/convoy.Lead/Fetch",
            request_serializer=wire.Nothing.SerializeToString,
            response_deserializer=wire.Chunk.FromString,
        )
        try:
            return b"".join(c.data for c in fetch(wire.Nothing(), metadata=self._metadata))
        except grpc.RpcError as error:
            raise LeadLostError(f"the lead's state did not arrive: {_words(error)}") from None

    def prepared(self, data: str, model: str, device: str, threads: int) -> None:
        """Show what we have, and wait to be admitted."""
        self._say(prepared=wire.Prepared(data=data, model=model, device=device, threads=threads))
        while not self._admitted.wait(0.2):
            self.check()

    def ready(self, speed: float) -> None:
        """Say how fast we are, and wait until a group forms."""
        self._formed.clear()
        self._say(ready=wire.Ready(speed=speed))
        self._wait_for_form()

    def stand_aside(self, reason: str, speed: float) -> None:
        """Say that we cost more than we bring."""
        self._formed.clear()
        self.wants_regroup = False
        self._say(aside=wire.Aside(reason=reason, speed=speed))

    def wait_for_call(self, timeout_s: float) -> bool:
        """Wait until the lead calls a node back that stood aside; tell whether it did."""
        deadline = time.monotonic() + timeout_s
        while not self._formed.wait(0.2):
            self.check()
            if self.leaving or time.monotonic() > deadline:
                return False
        return True

    def _wait_for_form(self) -> None:
        while not self._formed.wait(0.2):
            self.check()
            if self.leaving or self.wants_stop:
                return

    # ------------------------------------------------------------ during training

    @property
    def requested(self) -> bool:
        """Tell whether the training loop should look up: the lead wants something."""
        return self.wants_regroup or self.wants_stop or self.leaving or self._lost is not None

    def check(self) -> None:
        """Raise if the lead is gone, or will not have us."""
        if self._lost is not None:
            raise self._lost

    def set_scribe(self, is_scribe: bool) -> None:
        """Say whether this node's events are the run's."""
        self._is_scribe = is_scribe

    def describe(self, speed: float, step: int) -> None:
        """Tell how fast this node is and how far."""
        self._speed, self._step = speed, step

    def deposit(self, checkpoint: Checkpoint, reason: str) -> None:
        """Have a checkpoint written, while training goes on."""
        self._deposits.put(pack(checkpoint), reason)

    def receive(self, event: Event, when: float) -> None:
        """Pass an event on, if this node is the one to tell of the run; what is wrong, always."""
        if self._is_scribe or isinstance(event, WarningEvent):
            self._say(event=json.dumps(as_record(event, when)))

    # ------------------------------------------------------------ the end

    def done(self, reason: str) -> None:
        """Say that training is over, once all that was deposited is safe."""
        self._deposits.drain()
        self._say(done=wire.Done(reason=reason))

    def leave(self, reason: str) -> None:
        """Say that we go on purpose."""
        self._deposits.drain()
        self._say(leaving=wire.Leaving(reason=reason))

    def fail(self, reason: str, exit_code: int, *, fatal: bool) -> None:
        """Say why we cannot go on."""
        self._say(failure=wire.Failure(reason=reason, exit_code=exit_code, fatal=fatal))

    def close(self) -> None:
        """End the call, after what was said has gone out."""
        self._outbox.put(None)
        with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError):
            self._call.result(timeout=2)
        self._call.cancel()
        self._channel.close()

    # ------------------------------------------------------------ threads

    def _say(self, **content: Any) -> None:
        self._outbox.put(wire.FromNode(**content))

    def _outgoing(self) -> Iterator[wire.FromNode]:
        while (message := self._outbox.get()) is not None:
            yield message

    def _stay_alive(self) -> None:
        stopped = threading.Event()
        while self._lost is None and not stopped.wait(_ALIVE_EVERY_S):
            self._say(alive=wire.Alive(speed=self._speed, step=self._step))

    def _listen(self) -> None:
        try:
            for message in self._call:
                self._was_heard = True
                self._obey(message)
            self._lost = LeadLostError("the lead has ended the run")
        except grpc.RpcError as error:
            self._lost = self._as_error(error)
        self._welcome.put(None)
        if self.group is not None:
            self.group.break_up()

    def _as_error(self, error: grpc.RpcError) -> ConvoyError:
        lead = f"the lead at {self._address}"
        if error.code() in _REFUSALS:
            return RefusedError(f"{lead} refused this node: {_words(error)}")
        if not self._was_heard and (why := explain(self._address, self._certificate)):
            return RefusedError(f"{lead} {why}")
        return LeadLostError(f"{lead} cannot be reached: {_words(error)}")

    def _obey(self, message: wire.FromLead) -> None:
        match message.WhichOneof("content"):
            case "welcome":
                self._welcome.put(message.welcome)
            case "admitted":
                self._admitted.set()
            case "form":
                self.wants_regroup = True
                self._formed.set()
            case "lost" if self.group is not None:
                self.group.break_up(because_of=message.lost)
            case "aside" if self.group is not None:
                self.group.leave()
            case "stop":
                self.wants_stop = True
            case "leave":
                self.leaving = True


class _Depositor:
    """Sends checkpoints one after the other, while training goes on."""

    def __init__(self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        self._send = channel.stream_unary(
            "/convoy.Lead/Deposit",
            request_serializer=wire.Chunk.SerializeToString,
            response_deserializer=wire.Receipt.FromString,
        )
        self._metadata = metadata
        self._pending: Any = None

    def put(self, block: bytes, reason: str) -> None:
        """Begin to send a checkpoint, after the one before has arrived."""
        self.drain()
        self._pending = self._send.future(_chunks(block, reason), metadata=self._metadata)

    def drain(self) -> None:
        """Wait until the lead has what was sent."""
        if self._pending is not None:
            with contextlib.suppress(grpc.RpcError):  # a lead that is gone is noticed elsewhere
                self._pending.result()
            self._pending = None


def _chunks(block: bytes, reason: str) -> Iterator[wire.Chunk]:
    yield wire.Chunk(reason=reason)
    for part in cut(block):
        yield wire.Chunk(data=part)


def _words(error: grpc.RpcError) -> str:
    return str(error.details() or error.code().name)


def host_name() -> str:
    """Return this machine's name, for people."""
    return socket.gethostname()
