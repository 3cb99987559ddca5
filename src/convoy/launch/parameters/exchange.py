"""A node's side of the parameter service: hand in, wait, take over; again until it is answered.

A call may be lost on its way, in the middle or on its way back: it is made again with the same
number, and the service takes it in once. Whoever is told that it is behind asks for the weights
anew; whoever is told that it is no longer part of the run has to join again.
"""

import contextlib
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import torch
from torch import Tensor

from convoy.errors import ConvoyError, EnvironmentProblem
from convoy.launch.door import CHUNK_BYTES, TOKEN_KEY, cut, open_channel
from convoy.launch.parameters import messages_pb2 as wire
from convoy.launch.parameters.shell import PROTOCOL
from convoy.launch.parameters.vectors import Arriving, Coding, DamagedError, checksum, encoded
from convoy.memory.shared import SharedVector, remove
from convoy.outer.server import BehindError, FencedError, Report, ShutOutError
from convoy.outer.work import Order

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_SILENCE_AT_MOST_S = 5.0  # the service says every second that it is still there
_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 2 * CHUNK_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, slots=True)
class Service:
    """Where the parameter service is, and what it must be told.

    Attributes:
        address: "host:port".
        token: that a node must know.
        run: the run's identity.
        certificate: PEM of the service's certificate, where it uses TLS.
        patience_s: how long a service that cannot be reached is tried.
    """

    address: str
    token: str = field(repr=False)
    run: str
    certificate: bytes | None = None
    patience_s: float = 300.0


@dataclass(frozen=True, slots=True, eq=False)
class Given:
    """What the service answered.

    Attributes:
        vector: to be read until the next call, which gives its memory back.
    """

    number: int
    version: int
    vector: Tensor
    order: Order | None
    is_over: bool
    refused: str


class Exchange:
    """Hands vectors to the parameter service and takes others over.

    Args:
        service: whom to call.
        node, incarnation: who calls.
        model, size, dtype: what the vectors are like.
        coding: how they travel: in full, rounded to bf16 on the way up, or in shared memory.
        check: raises where there is no sense in trying again.
    """

    def __init__(
        self,
        service: Service,
        node: int,
        incarnation: str,
        *,
        model: str,
        size: int,
        dtype: torch.dtype,
        coding: Coding,
        check: Callable[[], None],
    ) -> None:
        self._service, self._node, self._incarnation = service, node, incarnation
        self._model, self._size, self._dtype = model, size, dtype
        self._check = check
        self._number = 0
        self._turn = 0
        self._shared = SharedVector.make(size, dtype) if coding == "shared" else None
        self._looks = self._shared is not None
        self._seen: dict[str, SharedVector] = {}  # the service's own vectors, which it uses in turn
        self._coding: Coding = "full" if coding == "shared" and self._shared is None else coding
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        self._metadata = ((TOKEN_KEY, service.token),)
        self.exchange_s = 0.0  # of the last exchange, waiting for others not counted
        self.bytes_up, self.bytes_down, self.retries = 0, 0, 0
        self._connect()

    def _connect(self) -> None:
        service = self._service
        self._channel = open_channel(service.address, service.certificate, _CHANNEL_OPTIONS)
        self._call = self._channel.stream_stream(
            "/convoy.Parameters/Exchange",
            request_serializer=wire.Up.SerializeToString,
            response_deserializer=wire.Down.FromString,
        )

    def close(self) -> None:
        """End."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._channel.close()
        if self._shared is not None:
            remove(self._shared.name)

    @property
    def room(self) -> Tensor | None:
        """Return where a vector is best made that is handed in next, if there is such a place.

        It must not be touched from a push until its answer.
        """
        return self._shared.vector if self._shared is not None else None

    def pull(self) -> Given:
        """Ask for weights and work."""
        return self._try(self._push(0, 0), None)

    def rest(self) -> None:
        """Let nobody wait for this node: it has nothing to do for now."""
        push = self._push(0, 0)
        push.rests = True
        with contextlib.suppress(grpc.RpcError):  # it is only for the others' comfort
            for _ in self._call(iter([wire.Up(push=push)]), metadata=self._metadata, timeout=5):
                pass

    def push(self, base: int, vector: Tensor, report: Report) -> "Future[Given]":
        """Begin to hand in what was trained from some version; the answer comes later.

        The vector must not change before that.
        """
        self._number += 1
        push = self._push(self._number, base)
        push.trained.CopyFrom(
            wire.Trained(
                samples=report.samples,
                correct=report.correct,
                loss=report.loss,
                rate=report.rate,
                busy_s=report.busy_s,
                step_s=report.step_s,
                exchange_s=self.exchange_s,
            )
        )
        return self._pool.submit(self._try, push, vector)

    def _push(self, number: int, base: int) -> wire.Push:
        return wire.Push(
            run=self._service.run,
            node=self._node,
            incarnation=self._incarnation,
            number=number,
            base=base,
            model=self._model,
            coding=self._coding,
            shared=self._shared.name if self._shared is not None else "",
            protocol=PROTOCOL,
            last=self._number,
        )

    # ------------------------------------------------------------ one call, and again

    def _try(self, push: wire.Push, vector: Tensor | None) -> Given:
        """Call until there is an answer."""
        block = memoryview(b"")
        if vector is not None and self._shared is not None:
            if vector.data_ptr() != self._shared.vector.data_ptr():
                self._shared.vector.copy_(vector)
        elif vector is not None:
            block = encoded(vector, self._coding)
            push.length, push.checksum = len(block), checksum(block)
        pause_s, started = _FIRST_PAUSE_S, time.monotonic()
        while True:
            try:
                return self._once(push, block)
            except grpc.RpcError as error:
                self._sort_out(error)
            except DamagedError:
                pass  # the answer was damaged on its way: it is given again
            self.retries += 1
            self._check()
            if time.monotonic() - started > self._service.patience_s:
                raise EnvironmentProblem(
                    "the parameter service cannot be reached", got=self._service.address
                )
            time.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - not for secrets
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _sort_out(self, error: grpc.RpcError) -> None:
        """Raise what trying again does not mend."""
        code, words = error.code(), str(error.details())
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            raise FencedError(words) from None
        if code is grpc.StatusCode.ABORTED:
            raise BehindError(words) from None
        if code is grpc.StatusCode.PERMISSION_DENIED:
            raise ShutOutError(f"the parameter service refused this node: {words}") from None
        if code is grpc.StatusCode.UNAUTHENTICATED:
            raise ConvoyError(f"the parameter service refused this node: {words}") from None
        if code is grpc.StatusCode.INVALID_ARGUMENT and "damaged" not in words:
            raise ConvoyError(f"the parameter service refused this node: {words}") from None

    def _once(self, push: wire.Push, block: memoryview) -> Given:
        started = time.monotonic()
        self._turn += 1
        push.turn, push.looks = self._turn, self._looks
        call = self._call(_messages(push, block), metadata=self._metadata)
        with _Watchdog(call) as watchdog:
            told, vector = self._read(call, watchdog)
        self.bytes_up += len(block)
        self.bytes_down += told.length
        self.exchange_s = max(0.0, time.monotonic() - started - told.waited_s)
        return Given(
            number=told.number,
            version=told.version,
            vector=vector,
            order=Order.from_dict(json.loads(told.order)) if told.order else None,
            is_over=told.over,
            refused=told.refused,
        )

    def _read(self, call: Iterator[wire.Down], watchdog: "_Watchdog") -> tuple[wire.Told, Tensor]:
        told: wire.Told | None = None
        arriving: Arriving | None = None
        for message in call:
            watchdog.heard()
            kind = message.WhichOneof("content")
            if kind == "told":
                told = message.told
                if told.coding == "shared":
                    return told, self._look_at(told.shared)
                arriving = Arriving(self._size, self._dtype, "full")
            elif kind == "data" and arriving is not None:
                arriving.add(message.data)
        if told is None or arriving is None:
            raise DamagedError("the answer is missing")
        return told, arriving.vector(told.checksum)

    def _look_at(self, name: str) -> Tensor:
        """Return a vector in the service's memory."""
        if name not in self._seen:
            found = SharedVector.look_at(name, self._size, self._dtype)
            if found is None:
                self._looks = False
                raise DamagedError("the answer's shared memory cannot be opened")
            self._seen[name] = found
        return self._seen[name].vector


class _Watchdog:
    """Ends a call whose other side has fallen silent, for example behind a cut link."""

    def __init__(self, call: grpc.Call) -> None:
        self._call = call
        self._heard_at = time.monotonic()
        self._done = threading.Event()

    def heard(self) -> None:
        """Note a sign of life."""
        self._heard_at = time.monotonic()

    def __enter__(self) -> "_Watchdog":
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(0.5):
            if time.monotonic() - self._heard_at > _SILENCE_AT_MOST_S:
                self._call.cancel()
                return


def _messages(push: wire.Push, block: memoryview) -> Iterator[wire.Up]:
    yield wire.Up(push=push)
    for piece in cut(block):
        yield wire.Up(data=piece)
