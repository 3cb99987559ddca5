"""The parameter service's shell: calls, threads and files around `ParameterServer`.

A call of a node hands in a vector and waits for its answer. Everything that happens to the
server happens under one lock, in an order that is written to the record first. Vectors are
received and sent outside of it.
"""

import json
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NoReturn

import grpc
from torch import Tensor

from convoy.errors import ConvoyError
from convoy.launch.door import TokenGate, bytes_of, cut, open_server
from convoy.launch.parameters import messages_pb2 as wire
from convoy.launch.parameters.durability import Durability
from convoy.launch.parameters.keeper import Keeper
from convoy.launch.parameters.lending import Block, Lending, OvertakenError, Owner
from convoy.launch.parameters.record import Record
from convoy.launch.parameters.vectors import (
    Arriving,
    Coding,
    DamagedError,
    checksum,
    encoded,
    encoded_bytes,
)
from convoy.launch.reading import UnreadableError, checked, decoder, readable
from convoy.memory.shared import SharedRooms
from convoy.outer.crew import Tls
from convoy.outer.server import (
    Answer,
    BehindError,
    FencedError,
    ParameterServer,
    Report,
    ShutOutError,
    is_sensible,
)

PROTOCOL = 2
_CALLS_AT_MOST = 160
_STILL_HERE_S = 1.0  # a node that waits hears from us so often
_IDLE_WRITE_S = 5.0  # what is not on disk yet is written after so long, however little it is
_IDLE_AT_MOST_MS = 4_000  # a node that computes for longer connects anew by itself
_REFUSALS: dict[type[ConvoyError], grpc.StatusCode] = {
    OvertakenError: grpc.StatusCode.CANCELLED,
    DamagedError: grpc.StatusCode.INVALID_ARGUMENT,
    BehindError: grpc.StatusCode.ABORTED,
    FencedError: grpc.StatusCode.FAILED_PRECONDITION,
    ShutOutError: grpc.StatusCode.PERMISSION_DENIED,
}
_LEAD_ONLY = ("Admit", "Remove", "Open", "Pause", "Status", "Weights")


class ParameterShell:
    """Serves one `ParameterServer`.

    Args:
        server: what is served.
        rooms: where the server's vectors are.
        run: the run's identity; calls of another run are refused.
        model: digest of the vector's layout.
        tokens: what a node, and what the lead must know.
        journal: every answer waits until what it tells is on disk.
        write_every: versions between two writes, otherwise.
    """

    def __init__(
        self,
        server: ParameterServer,
        rooms: SharedRooms,
        *,
        run: str,
        model: str,
        tokens: tuple[str, str],
        keeper: Keeper,
        record: Record,
        journal: bool,
        write_every: int,
    ) -> None:
        self._server = server
        self._run, self._model = run, model
        self._tokens = tokens
        self._keeper, self._record = keeper, record
        self._size, self._dtype = server.vector.numel(), server.vector.dtype
        self._lending = Lending(rooms, self._size, self._dtype)
        self._changed = threading.Condition()
        self._durability = Durability(journal, write_every, server.version)
        self._closing = False
        self._open, self._paused = False, False
        self._calls: dict[Owner, set[grpc.ServicerContext]] = {}
        self._moved = 0  # bytes of vectors, in shared memory too
        self._decode_failures = 0
        self._threads = [
            threading.Thread(target=target, daemon=True) for target in (self._tick, self._keep)
        ]
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------ listening

    def listen(self, host: str, port: int, tls: Tls | None) -> int:
        """Begin to serve; return the port."""
        gate = TokenGate(self._tokens[0], dict.fromkeys(_LEAD_ONLY, self._tokens[1]))
        self._grpc, found = open_server(
            (host, port),
            tls,
            gate,
            [self._handlers()],
            calls_at_most=_CALLS_AT_MOST,
            idle_at_most_ms=_IDLE_AT_MOST_MS,
        )
        self._grpc.start()
        return found

    def close(self) -> None:
        """Write what is not on disk, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._threads[1].join()
        self._record.write("end", **self._fingerprint())
        self._grpc.stop(grace=0.5).wait()
        self._lending.close()

    def _handlers(self) -> grpc.GenericRpcHandler:
        def reads(message: Any) -> Callable[[bytes], Any]:  # noqa: ANN401 - a message class
            return decoder(message, self._count_unreadable)

        def unary(call: Callable[..., Any], message: Any) -> grpc.RpcMethodHandler:  # noqa: ANN401
            return grpc.unary_unary_rpc_method_handler(checked(call), reads(message), bytes_of)

        methods = {
            "Exchange": grpc.stream_stream_rpc_method_handler(
                self._exchange, reads(wire.Up), bytes_of
            ),
            "Admit": unary(self._admit, wire.Admission),
            "Remove": unary(self._remove, wire.Admission),
            "Open": unary(self._let_in, wire.Ask),
            "Pause": unary(self._pause, wire.Ask),
            "Status": unary(self._status, wire.Ask),
            "Weights": grpc.unary_stream_rpc_method_handler(
                checked(self._weights), reads(wire.Ask), bytes_of
            ),
        }
        return grpc.method_handlers_generic_handler("convoy.Parameters", methods)

    def _count_unreadable(self) -> None:
        self._decode_failures += 1

    # ------------------------------------------------------------ nodes

    def _exchange(
        self, messages: Iterator[wire.Up], context: grpc.ServicerContext
    ) -> Iterator[wire.Down]:
        if not self._open:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the service does not know its nodes yet")
        try:
            messages = readable(messages)
            push = self._first(messages)
            with self._under_way(push, context):
                block = None
                if push.shared:
                    block = self._lending.begin(push.shared, _owner(push), push.turn)
                vector = None
                if push.number:
                    vector = yield from self._receive(push, block, messages)
                self._happen(push, block, vector)
                if not push.rests:
                    yield from self._wait_and_answer(push, block, context)
        except UnreadableError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except tuple(_REFUSALS) as error:
            self._refuse(context, _REFUSALS[type(error)], str(error))

    @contextmanager
    def _under_way(self, push: wire.Push, context: grpc.ServicerContext) -> Iterator[None]:
        """Let a call end with its node's part in the run: who is cut off cannot end it."""
        with self._changed:
            self._server.check(push.node, push.incarnation)
            calls = self._calls.setdefault(_owner(push), set())
            calls.add(context)
        try:
            yield
        finally:
            calls.discard(context)

    def _refuse(
        self, context: grpc.ServicerContext, code: grpc.StatusCode, reason: str
    ) -> NoReturn:
        if context.is_active():  # a call that has ended was given up by the other side
            with self._changed:
                self._server.count_refusal(code.name.lower())
        context.abort(code, reason)
        raise AssertionError("abort raises")

    def _first(self, messages: Iterator[wire.Up]) -> wire.Push:
        """Return what a call begins with, if it fits this run; nothing is set aside before."""
        first = next(messages, None)
        if first is None or first.WhichOneof("content") != "push":
            raise DamagedError("a call begins with what it is about")
        push = first.push
        if push.protocol != PROTOCOL:
            raise DamagedError(f"it speaks protocol {push.protocol}, the service {PROTOCOL}")
        if push.run != self._run:
            raise DamagedError(f"it belongs to run '{push.run[:80]}', the service to '{self._run}'")
        if push.model != self._model:
            raise DamagedError(f"its model is {push.model[:80]}, the service's {self._model}")
        if push.coding not in ("full", "bf16", "shared"):
            raise DamagedError("its coding is not known")
        if push.number < 0:
            raise DamagedError("its number is below 0")
        expected = 0
        if push.number and push.coding != "shared":
            expected = encoded_bytes(self._size, self._dtype, _coding(push))
        if push.length != expected:
            raise DamagedError(f"it has {push.length} bytes where {expected} are right")
        return push

    def _receive(
        self, push: wire.Push, block: Block | None, messages: Iterator[wire.Up]
    ) -> Generator[wire.Down, None, Tensor]:
        """Return a vector; over a slow link, let the node know that it arrives."""
        if push.coding == "shared":
            if block is None:
                raise DamagedError("it names no shared memory")
            self._moved += block.up.vector.nbytes
            return block.up.vector  # the node does not touch it before it has its answer
        arriving, told_at = Arriving(self._size, self._dtype, _coding(push)), time.monotonic()
        for message in messages:
            if not message.data:  # with such, a call would never end
                raise DamagedError("a piece of it is empty")
            arriving.add(message.data)
            self._moved += len(message.data)
            if time.monotonic() - told_at > _STILL_HERE_S:
                told_at = time.monotonic()
                yield wire.Down(wait=wire.Done())
        return arriving.vector(push.checksum)

    def _happen(self, push: wire.Push, block: Block | None, vector: Tensor | None) -> None:
        """Let the server take in a pull or a submission."""
        with self._changed:
            if block is not None:
                block.check(push.turn)
            now = time.monotonic()
            node, incarnation = push.node, push.incarnation
            self._server.check(node, incarnation)
            if push.rests:
                self._record.write("rest", node=node, incarnation=incarnation, now=now)
                self._server.rest(node, incarnation, now)
            elif vector is None:
                last = push.last
                self._record.write("pull", node=node, incarnation=incarnation, last=last, now=now)
                self._server.pull(node, incarnation, last, now)
            else:
                report = _report(push.trained)
                if not self._server.is_known(node, push.number):
                    self._record.write(
                        "submit",
                        node=node,
                        incarnation=incarnation,
                        number=push.number,
                        base=push.base,
                        coding=push.coding,
                        now=now,
                        report=asdict(report),
                    )
                self._server.submit(node, incarnation, push.number, push.base, vector, report, now)
            self._note_change()

    def _note_change(self) -> None:
        self._durability.changes += 1
        self._changed.notify_all()

    def _wait_and_answer(
        self,
        push: wire.Push,
        block: Block | None,
        context: grpc.ServicerContext,
    ) -> Iterator[wire.Down]:
        told_at = time.monotonic()
        change: int | None = None  # what must be on disk before the answer goes out
        paused_s = 0.0
        while context.is_active():
            with self._changed:
                answer = self._server.answer_to(push.node, push.incarnation, push.number)
                is_held_up = answer is not None and self._paused
                if answer is not None:
                    change = self._durability.changes if change is None else change
                    answer = answer if self._may_tell(answer, change) else None
                if answer is None:
                    since = time.monotonic()
                    self._changed.wait(_STILL_HERE_S)
                    paused_s += time.monotonic() - since if is_held_up else 0.0
            if answer is not None:
                yield from self._told(answer, push, block, paused_s)
                return
            if time.monotonic() - told_at > _STILL_HERE_S:
                told_at = time.monotonic()
                yield wire.Down(wait=wire.Done())

    def _may_tell(self, answer: Answer, change: int) -> bool:
        if self._paused and not answer.is_over:
            return False
        return self._durability.may_tell(answer.version, change, is_over=answer.is_over)

    def _told(
        self, answer: Answer, push: wire.Push, block: Block | None, paused_s: float
    ) -> Iterator[wire.Down]:
        told = wire.Told(
            number=answer.number,
            version=answer.version,
            order=json.dumps(answer.order.as_dict()) if answer.order is not None else "",
            over=answer.is_over,
            refused=answer.refused,
            waited_s=answer.waited_s + paused_s,
        )
        name = None
        if block is not None and push.looks:
            name = self._lending.lend(answer.vector, block, push.turn)
        if name is not None:
            self._moved += answer.vector.nbytes
            told.coding, told.shared = "shared", name
            yield wire.Down(told=told)
            return
        yield from self._sent_vector(told, answer.vector)

    def _sent_vector(self, told: wire.Told, vector: Tensor) -> Iterator[wire.Down]:
        block = encoded(vector, "full")
        told.coding, told.length, told.checksum = "full", len(block), checksum(block)
        yield wire.Down(told=told)
        for piece in cut(block):
            self._moved += len(piece)
            yield wire.Down(data=piece)

    # ------------------------------------------------------------ the lead

    def _admit(self, admission: wire.Admission, context: grpc.ServicerContext) -> wire.Done:
        if not is_sensible(admission.speed):
            self._refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "its speed makes no sense")
        with self._changed:
            now = time.monotonic()
            self._record.write(
                "admit",
                node=admission.node,
                incarnation=admission.incarnation,
                speed=admission.speed,
                threads=admission.threads,
                now=now,
            )
            self._server.admit(admission.node, admission.incarnation, admission.speed, now)
            self._note_change()
        return wire.Done()

    def _remove(self, admission: wire.Admission, context: grpc.ServicerContext) -> wire.Done:
        del context
        with self._changed:
            now = time.monotonic()
            values = {"node": admission.node, "incarnation": admission.incarnation}
            self._record.write("remove", **values, now=now)
            self._server.remove(admission.node, admission.incarnation, now)
            self._forget(_owner(admission))
            self._note_change()
        return wire.Done()

    def _forget(self, owner: Owner) -> None:
        for call in list(self._calls.pop(owner, ())):
            call.cancel()
        self._lending.forget(owner)

    def _let_in(self, ask: wire.Ask, context: grpc.ServicerContext) -> wire.Done:
        del ask, context
        self.let_nodes_in()
        return wire.Done()

    def let_nodes_in(self) -> None:
        """Serve nodes: all that take part have been named."""
        with self._changed:
            self._open, self._paused = True, False
            self._changed.notify_all()

    def _pause(self, ask: wire.Ask, context: grpc.ServicerContext) -> wire.Done:
        """Take in what nodes have trained, but give nobody more to do: too few are here."""
        del ask, context
        with self._changed:
            self._paused = True
        return wire.Done()

    def _status(self, ask: wire.Ask, context: grpc.ServicerContext) -> wire.Standing:
        del ask, context
        with self._changed:
            return wire.Standing(values=json.dumps(self.standing()))

    def standing(self) -> dict[str, Any]:
        """Return how the run stands, as plain values."""
        server = self._server
        return {
            "version": server.version,
            "durable_version": self._durability.version,
            "done": server.done,
            "over": server.is_over,
            "epochs": sorted(server.epochs),
            "every": server.work.every,
            "speeds": server.work.speeds,
            "numbers": {node: member.number for node, member in server.members.items()},
            "totals": asdict(server.totals),
            "refused": dict(server.refused),
            "undecodable": self._decode_failures,
            "moved_bytes": self._moved,
            "problem": self._durability.problem,
        }

    def _weights(self, ask: wire.Ask, context: grpc.ServicerContext) -> Iterator[wire.Down]:
        del context
        with self._changed:
            version, vector = self._server.version, self._server.vector
            if ask.epoch in self._server.epochs:
                version, vector = self._server.epochs[ask.epoch]
                for epoch in [e for e in self._server.epochs if e <= ask.epoch]:
                    del self._server.epochs[epoch]
        yield from self._sent_vector(wire.Told(version=version), vector)

    # ------------------------------------------------------------ time and disk

    def _tick(self) -> None:
        """End beats whose time is over."""
        with self._changed:
            while not self._closing:
                deadline, now = self._server.deadline, time.monotonic()
                if deadline is not None and now >= deadline:
                    self._record.write("tick", now=now)
                    self._server.tick(now)
                    self._note_change()
                    continue
                self._changed.wait(0.5 if deadline is None else min(0.5, deadline - now))

    def _keep(self) -> None:
        """Bring the state to disk: before every answer, or now and then."""
        last, durability = time.monotonic(), self._durability
        while True:
            with self._changed:
                while not self._closing and not self._is_due(last):
                    self._changed.wait(0.1)
                if self._closing and durability.changes == durability.written:
                    return
                changes, version = durability.changes, self._server.version
                state = self._server.state()
                number = self._keeper.count + 1
                self._record.write("saved", **self._fingerprint(), state=number)
            last = time.monotonic()
            try:
                self._keeper.write(*state)
                problem = ""
            except OSError as error:
                problem = f"the service's state could not be written: {error}"
            with self._changed:
                durability.note_written(changes, version, problem)
                self._changed.notify_all()
            if problem:
                time.sleep(_STILL_HERE_S)

    def _is_due(self, last: float) -> bool:
        is_idle = time.monotonic() - last > _IDLE_WRITE_S
        server = self._server
        return self._durability.is_due(server.version, is_over=server.is_over, is_idle=is_idle)

    def _fingerprint(self) -> dict[str, Any]:
        """Return what tells the state of this moment from any other."""
        server = self._server
        return {
            "version": server.version,
            "done": server.done,
            "checksum": checksum(encoded(server.vector, "full")),
        }


def _owner(message: wire.Push | wire.Admission) -> Owner:
    return message.node, message.incarnation


def _coding(push: wire.Push) -> Coding:
    return "bf16" if push.coding == "bf16" else "full"


def _report(trained: wire.Trained) -> Report:
    return Report(
        samples=max(0, trained.samples),
        correct=max(0, trained.correct),
        loss=trained.loss,
        rate=trained.rate,
        busy_s=trained.busy_s,
        step_s=trained.step_s,
        exchange_s=trained.exchange_s,
    )
