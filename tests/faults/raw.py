"""Calls of the parameter service with any bytes at all, as nobody of Convoy's own makes them."""

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

import grpc
import torch
from torch import Tensor

from convoy.launch.door import TOKEN_KEY
from convoy.launch.parameters import messages_pb2 as wire
from convoy.launch.parameters.shell import PROTOCOL
from convoy.launch.parameters.vectors import Coding, checksum, encoded
from convoy.memory.shared import SharedVector, remove
from tests.faults.light import LOCAL_BATCH, MODEL, NODE_TOKEN, RUN, SIZE, Leading


class Outcome(NamedTuple):
    """How a call ended."""

    code: grpc.StatusCode
    details: str
    took_s: float
    answers: list[bytes]

    @property
    def is_fine(self) -> bool:
        return self.code is grpc.StatusCode.OK

    @property
    def told(self) -> wire.Told:
        """Return the answer of the service."""
        assert self.is_fine, self
        found = [wire.Down.FromString(answer) for answer in self.answers]
        told: wire.Told = next(d.told for d in found if d.WhichOneof("content") == "told")
        return told


class Caller:
    """Calls the service with bytes.

    Attributes:
        ended: how many calls ended how.
    """

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        self.ended: Counter[str] = Counter()

    def __enter__(self) -> "Caller":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._channel.close()

    def call(
        self,
        frames: bytes | Iterable[bytes],
        *,
        method: str = "Exchange",
        token: str | None = NODE_TOKEN,
        limit_s: float = 5.0,
        **options: Any,
    ) -> Outcome:
        """Send frames, and listen until the other side ends the call."""
        name = f"/convoy.Parameters/{method}"
        is_one = isinstance(frames, bytes)
        stub = self._channel.unary_stream(name) if is_one else self._channel.stream_stream(name)
        metadata = ((TOKEN_KEY, token),) if token is not None else ()
        started, answers, details = time.monotonic(), [], ""
        code = grpc.StatusCode.OK
        try:
            given = frames if is_one else iter(frames)
            for answer in stub(given, metadata=metadata, timeout=limit_s, **options):
                answers.append(answer)
        except grpc.RpcError as error:
            code, details = error.code(), str(error.details())
        self.ended[code.name.lower()] += 1
        return Outcome(code, details, time.monotonic() - started, answers)


class Speaker:
    """A node that is part of the run, and says whatever the test wants.

    Attributes:
        base, number: what its next submission has to name.
    """

    def __init__(
        self, lead: Leading, caller: Caller, node: int = 0, *, name: str = "raw", size: int = SIZE
    ) -> None:
        self._caller, self.node, self.size = caller, node, size
        self.incarnation = name
        self.base, self.number, self.turn = 0, 0, 0
        self._shared: SharedVector | None = None
        lead.admit(node, name, 100.0)

    def header(self, **changes: Any) -> wire.Push:
        """Return what a call begins with, right but for some changes."""
        right: dict[str, Any] = {
            "run": RUN,
            "node": self.node,
            "incarnation": self.incarnation,
            "model": MODEL,
            "coding": "full",
            "protocol": PROTOCOL,
        }
        return wire.Push(**{**right, **changes})

    def submission(self, vector: Tensor, coding: Coding = "full", /, **changes: Any) -> list[bytes]:
        """Return the frames of the next submission."""
        right: dict[str, Any] = {
            "number": self.number + 1,
            "base": self.base,
            "last": self.number,
            "coding": coding,
            "trained": wire.Trained(samples=LOCAL_BATCH, correct=1, rate=1.0, busy_s=0.1),
        }
        block = memoryview(b"")
        if coding == "shared":
            self.turn += 1
            right |= {"shared": self._placed(vector), "turn": self.turn}
        else:
            block = encoded(vector, coding)
            right |= {"length": len(block), "checksum": checksum(block)}
        data = [wire.Up(data=bytes(block))] if block else []
        head = wire.Up(push=self.header(**{**right, **changes}))
        return [message.SerializeToString() for message in (head, *data)]

    def _placed(self, vector: Tensor) -> str:
        if self._shared is None:
            self._shared = SharedVector.make(self.size, torch.float32)
        assert self._shared is not None
        self._shared.vector.copy_(vector)
        return self._shared.name

    def pull(self) -> wire.Told:
        """Ask for weights and work."""
        told = self._caller.call(frame(self.header(last=self.number))).told
        self.base = told.version
        return told

    def submit(self, vector: Tensor, coding: Coding = "full", /, **changes: Any) -> Outcome:
        """Hand in, and count on if it is answered."""
        outcome = self._caller.call(self.submission(vector, coding, **changes))
        if outcome.is_fine:
            self.number, self.base = outcome.told.number, outcome.told.version
        return outcome

    def close(self) -> None:
        if self._shared is not None:
            remove(self._shared.name)


def frame(push: wire.Push) -> bytes:
    """Return the bytes of a call's first message."""
    data: bytes = wire.Up(push=push).SerializeToString()
    return data


def mark(place: int, value: float = 1.0, size: int = SIZE) -> Tensor:
    """Return a vector that changes one number."""
    vector = torch.zeros(size)
    vector[place] = value
    return vector


def digest(lead: Leading) -> str:
    """Return a hash of the weights' version and numbers."""
    version, weights = lead.weights(0)
    return f"{version} {hashlib.sha256(weights.numpy().tobytes()).hexdigest()}"


def counted(standing: dict[str, Any]) -> int:
    """Return how many messages the service says that it refused."""
    refused: dict[str, int] = standing["refused"]
    return int(standing["undecodable"]) + sum(refused.values())


@contextlib.contextmanager
def speaking(lead: Leading, caller: Caller, node: int = 0, **options: Any) -> Iterator[Speaker]:
    """Let a node take part that has asked for its first work."""
    speaker = Speaker(lead, caller, node, **options)
    speaker.pull()
    try:
        yield speaker
    finally:
        speaker.close()
