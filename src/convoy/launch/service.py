"""The lead's side of the wire: gRPC calls become items in one queue, read by one thread.

The token is compared before a message is decoded. Whatever a node says is put into the inbox with
the connection it came by; whatever the lead answers goes through that connection's own queue.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import grpc

from convoy.launch import wire_pb2 as wire
from convoy.launch.door import TokenGate, bytes_of, cut, open_server
from convoy.launch.reading import UnreadableError, checked, decoder, readable
from convoy.outer.crew import Serving

_CONNECTIONS_AT_MOST = 128


@dataclass(eq=False)
class Connection:
    """One node's call, while it lasts."""

    host: str
    outbox: "queue.SimpleQueue[wire.FromLead | Refusal | None]" = field(
        default_factory=queue.SimpleQueue
    )

    def tell(self, **content: Any) -> None:
        """Send one message."""
        self.outbox.put(wire.FromLead(**content))

    def refuse(self, reason: str) -> None:
        """End the call, for a reason."""
        self.outbox.put(Refusal(reason))

    def close(self) -> None:
        """End the call."""
        self.outbox.put(None)


@dataclass(frozen=True)
class Refusal:
    """Why a node may not take part."""

    reason: str


@dataclass(frozen=True, eq=False)
class Said:
    """A node said something; None: its call is over."""

    connection: Connection
    message: wire.FromNode | None


@dataclass(frozen=True, eq=False)
class Deposited:
    """A node handed over a checkpoint; the receipt is the problem with it, or nothing."""

    block: bytes
    reason: str
    receipt: "Future[str]"


Inbox = "queue.SimpleQueue[Said | Deposited]"


class LeadServer:
    """Listens for nodes.

    Args:
        serving: where to listen, the token, and the certificate.
        inbox: receives everything that nodes say.
        state: returns the state that a node starts from.
        block_at_most: the longest checkpoint that is taken.
        more_handlers: for what else can be asked at the same door.
    """

    def __init__(
        self,
        serving: Serving,
        inbox: "queue.SimpleQueue[Said | Deposited]",
        state: Callable[[], bytes],
        block_at_most: int,
        more_handlers: Sequence[grpc.GenericRpcHandler] = (),
    ) -> None:
        self._inbox = inbox
        self._state = state
        self._block_at_most = block_at_most
        self._connections = itertools.count(1)
        self._server, self.port = open_server(
            (serving.host, serving.port),
            serving.tls,
            TokenGate(serving.token),
            [self._handlers(), *more_handlers],
            calls_at_most=_CONNECTIONS_AT_MOST,
        )
        self._server.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.stop(grace=0.5).wait()

    def _handlers(self) -> grpc.GenericRpcHandler:
        methods = {
            "Attend": grpc.stream_stream_rpc_method_handler(
                self._attend, decoder(wire.FromNode), bytes_of
            ),
            "Deposit": grpc.stream_unary_rpc_method_handler(
                self._deposit, decoder(wire.Chunk), bytes_of
            ),
            "Fetch": grpc.unary_stream_rpc_method_handler(
                checked(self._fetch), decoder(wire.Nothing), bytes_of
            ),
        }
        return grpc.method_handlers_generic_handler("convoy.Lead", methods)

    def _attend(
        self, messages: Iterator[wire.FromNode], context: grpc.ServicerContext
    ) -> Iterator[wire.FromLead]:
        connection = Connection(host=_host_of(context.peer()))
        reader = threading.Thread(target=self._listen_to, args=(connection, messages), daemon=True)
        reader.start()
        while (item := connection.outbox.get()) is not None:
            if isinstance(item, Refusal):
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, item.reason)
            else:
                yield item

    def _listen_to(self, connection: Connection, messages: Iterator[wire.FromNode]) -> None:
        try:
            for message in readable(messages):
                self._inbox.put(Said(connection, message))
        except Exception:  # noqa: S110 - however a call ends, the node is gone
            pass
        self._inbox.put(Said(connection, None))
        connection.close()

    def _deposit(self, chunks: Iterator[wire.Chunk], context: grpc.ServicerContext) -> wire.Receipt:
        reason, parts, length = "", [], 0
        try:
            for chunk in readable(chunks):
                reason = chunk.reason or reason
                parts.append(chunk.data)
                length += len(chunk.data)
                if length > self._block_at_most:
                    raise UnreadableError("longer than the model's state")
        except UnreadableError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        deposited = Deposited(b"".join(parts), reason, Future())
        self._inbox.put(deposited)
        return wire.Receipt(problem=deposited.receipt.result())

    def _fetch(self, request: wire.Nothing, context: grpc.ServicerContext) -> Iterator[wire.Chunk]:
        del request, context
        for part in cut(self._state()):
            yield wire.Chunk(data=part)


def _host_of(peer: str) -> str:
    """Return the address in gRPC's name for a peer: "ipv4:10.0.0.7:4711"."""
    return (
        peer.split(":", 1)[1].rsplit(":", 1)[0].strip("[]").removeprefix("%5B").removesuffix("%5D")
    )
