"""The lead's side of the wire: gRPC calls become items in one queue, read by one thread.

The token is compared before a message is decoded. Whatever a node says is put into the inbox with
the connection it came by; whatever the lead answers goes through that connection's own queue.
"""

import hmac
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from convoy.errors import EnvironmentProblem
from convoy.launch import wire_pb2 as wire
from convoy.outer.crew import Serving, Tls

TOKEN_KEY = "convoy-token"  # noqa: S105 - where the token is found, not the token
CHUNK_BYTES = 1 << 20
_CONNECTIONS_AT_MOST = 128
_SILENT_AT_MOST_MS = 3000
_OPTIONS = [
    ("grpc.so_reuseport", 0),  # two leads on one port would each get half of the nodes
    ("grpc.max_receive_message_length", 4 * CHUNK_BYTES),
    # Who connects and says nothing is shown out: before the handshake is over, and after it.
    ("grpc.server_handshake_timeout_ms", _SILENT_AT_MOST_MS),
    ("grpc.max_connection_idle_ms", _SILENT_AT_MOST_MS),
]


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
    """

    def __init__(
        self,
        serving: Serving,
        inbox: "queue.SimpleQueue[Said | Deposited]",
        state: Callable[[], bytes],
        block_at_most: int,
    ) -> None:
        self._inbox = inbox
        self._state = state
        self._block_at_most = block_at_most
        self._connections = itertools.count(1)
        pool = ThreadPoolExecutor(_CONNECTIONS_AT_MOST, thread_name_prefix="lead")
        self._server = grpc.server(
            pool,
            interceptors=[_TokenGate(serving.token)],
            options=_OPTIONS,
            maximum_concurrent_rpcs=_CONNECTIONS_AT_MOST,
        )
        self._server.add_generic_rpc_handlers([self._handlers()])
        self.port = self._listen(serving)
        self._server.start()

    def _listen(self, serving: Serving) -> int:
        where = f"{serving.host}:{serving.port}"
        try:
            port = self._open(where, serving.tls)
        except RuntimeError:
            port = 0
        if port == 0:
            raise EnvironmentProblem(
                "the lead cannot listen there: the port is in use, or the address is not ours",
                got=where,
                hint="Give another --port or --host.",
            )
        return port

    def _open(self, where: str, tls: Tls | None) -> int:
        if tls is None:
            return int(self._server.add_insecure_port(where))
        credentials = grpc.ssl_server_credentials([(tls.key, tls.certificate)])
        return int(self._server.add_secure_port(where, credentials))

    def close(self) -> None:
        """Stop listening."""
        self._server.stop(grace=0.5).wait()

    def _handlers(self) -> grpc.GenericRpcHandler:
        def bytes_of(message: Any) -> bytes:  # noqa: ANN401 - any message
            data: bytes = message.SerializeToString()
            return data

        methods = {
            "Attend": grpc.stream_stream_rpc_method_handler(
                self._attend, wire.FromNode.FromString, bytes_of
            ),
            "Deposit": grpc.stream_unary_rpc_method_handler(
                self._deposit, wire.Chunk.FromString, bytes_of
            ),
            "Fetch": grpc.unary_stream_rpc_method_handler(
                self._fetch, wire.Nothing.FromString, bytes_of
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
            for message in messages:
                self._inbox.put(Said(connection, message))
        except Exception:  # noqa: S110 - however a call ends, the node is gone
            pass
        self._inbox.put(Said(connection, None))
        connection.close()

    def _deposit(self, chunks: Iterator[wire.Chunk], context: grpc.ServicerContext) -> wire.Receipt:
        reason, parts, length = "", [], 0
        for chunk in chunks:
            reason = chunk.reason or reason
            parts.append(chunk.data)
            length += len(chunk.data)
            if length > self._block_at_most:
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "longer than the model's state")
        deposited = Deposited(b"".join(parts), reason, Future())
        self._inbox.put(deposited)
        return wire.Receipt(problem=deposited.receipt.result())

    def _fetch(self, request: wire.Nothing, context: grpc.ServicerContext) -> Iterator[wire.Chunk]:
        del request, context
        for part in cut(self._state()):
            yield wire.Chunk(data=part)


class _TokenGate(grpc.ServerInterceptor):  # type: ignore[misc]
    """Ends calls without the run's token.

    gRPC decodes the one message of a simple call before it asks the method; this comes earlier.
    """

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Return what handles a call: the method that was called, or a refusal."""
        given = dict(handler_call_details.invocation_metadata).get(TOKEN_KEY)
        if given is None:
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, "a token is needed to join this run")
        if not hmac.compare_digest(str(given).encode(), self._token):
            return _refusal(grpc.StatusCode.PERMISSION_DENIED, "this is not the run's token")
        return continuation(handler_call_details)


def _refusal(code: grpc.StatusCode, reason: str) -> grpc.RpcMethodHandler:
    def refuse(messages: Iterator[bytes], context: grpc.ServicerContext) -> None:
        del messages  # of a stream, none is waited for
        context.abort(code, reason)

    return grpc.stream_unary_rpc_method_handler(refuse)


def cut(block: bytes) -> Iterator[bytes]:
    """Cut a block into pieces of the size that travels best."""
    view = memoryview(block)
    for start in range(0, len(block), CHUNK_BYTES):
        yield bytes(view[start : start + CHUNK_BYTES])


def _host_of(peer: str) -> str:
    """Return the address in gRPC's name for a peer: "ipv4:10.0.0.7:4711"."""
    return (
        peer.split(":", 1)[1].rsplit(":", 1)[0].strip("[]").removeprefix("%5B").removesuffix("%5D")
    )
