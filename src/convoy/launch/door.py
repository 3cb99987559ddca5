"""How processes of a run reach each other: gRPC with the run's token, and TLS where asked for.

The token is compared before a message is decoded, and whoever connects without saying anything
is shown out.
"""

import hmac
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from convoy.errors import EnvironmentProblem
from convoy.outer.crew import LEAD_NAME, Tls

TOKEN_KEY = "convoy-token"  # noqa: S105 - where the token is found, not the token
CHUNK_BYTES = 1 << 20
_SILENT_AT_MOST_MS = 3000


def open_server(
    where: tuple[str, int],
    tls: Tls | None,
    gate: "TokenGate",
    handlers: Sequence[grpc.GenericRpcHandler],
    *,
    calls_at_most: int,
    idle_at_most_ms: int = _SILENT_AT_MOST_MS,
) -> tuple[grpc.Server, int]:
    """Listen on an address; return the server, which is not started yet, and its port."""
    server = grpc.server(
        ThreadPoolExecutor(calls_at_most, thread_name_prefix="door"),
        interceptors=[gate],
        options=[
            ("grpc.so_reuseport", 0),  # two leads on one port would each get half of the nodes
            ("grpc.max_receive_message_length", 4 * CHUNK_BYTES),
            # Who connects and says nothing is shown out: before the handshake is over, and after.
            ("grpc.server_handshake_timeout_ms", _SILENT_AT_MOST_MS),
            ("grpc.max_connection_idle_ms", idle_at_most_ms),
        ],
        maximum_concurrent_rpcs=calls_at_most,
    )
    server.add_generic_rpc_handlers(handlers)
    address = f"{where[0]}:{where[1]}"
    try:
        port = _add_port(server, address, tls)
    except RuntimeError:
        port = 0
    if port == 0:
        raise EnvironmentProblem(
            "the lead cannot listen there: the port is in use, or the address is not ours",
            got=address,
            hint="Give another --port or --host.",
        )
    return server, port


def _add_port(server: grpc.Server, address: str, tls: Tls | None) -> int:
    if tls is None:
        return int(server.add_insecure_port(address))
    credentials = grpc.ssl_server_credentials([(tls.key, tls.certificate)])
    return int(server.add_secure_port(address, credentials))


def open_channel(
    address: str, certificate: bytes | None, options: Sequence[tuple[str, Any]] = ()
) -> grpc.Channel:
    """Return a channel to a server; its certificate, where it has one, is its identity."""
    if certificate is None:
        return grpc.insecure_channel(address, list(options))
    return grpc.secure_channel(
        address,
        grpc.ssl_channel_credentials(root_certificates=certificate),
        [*options, ("grpc.ssl_target_name_override", LEAD_NAME)],
    )


class TokenGate(grpc.ServerInterceptor):  # type: ignore[misc]
    """Ends calls without the right token.

    gRPC decodes the one message of a simple call before it asks the method; this comes earlier.

    Args:
        token: that a call must bring.
        others: methods ("Admit") that need a token of their own.
    """

    def __init__(self, token: str, others: dict[str, str] | None = None) -> None:
        self._token = token.encode()
        self._others = {name: other.encode() for name, other in (others or {}).items()}

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Return what handles a call: the method that was called, or a refusal."""
        method = handler_call_details.method.rpartition("/")[2]
        expected = self._others.get(method, self._token)
        given = dict(handler_call_details.invocation_metadata).get(TOKEN_KEY)
        if given is None:
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, "a token is needed to join this run")
        if not hmac.compare_digest(str(given).encode(), expected):
            return _refusal(grpc.StatusCode.PERMISSION_DENIED, "this is not the run's token")
        return continuation(handler_call_details)


def _refusal(code: grpc.StatusCode, reason: str) -> grpc.RpcMethodHandler:
    def refuse(messages: Iterator[bytes], context: grpc.ServicerContext) -> None:
        del messages  # of a stream, none is waited for
        context.abort(code, reason)

    return grpc.stream_unary_rpc_method_handler(refuse)


def bytes_of(message: Any) -> bytes:  # noqa: ANN401 - any message
    """Encode a message."""
    data: bytes = message.SerializeToString()
    return data


def cut(block: "bytes | memoryview") -> Iterator[bytes]:
    """Cut a block into pieces of the size that travels best."""
    view = memoryview(block)
    for start in range(0, len(block), CHUNK_BYTES):
        yield bytes(view[start : start + CHUNK_BYTES])
