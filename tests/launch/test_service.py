"""The lead's door: who gets in, how soon others are turned away, and what they learn."""

import contextlib
import queue
import re
import select
import signal
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from convoy.launch import door, service
from convoy.launch import wire_pb2 as wire
from convoy.launch.certificate import CERTIFICATE_FILE, read_or_make_tls
from convoy.launch.door import TOKEN_KEY
from convoy.launch.link import LeadLostError, Link, RefusedError
from convoy.launch.service import Deposited, LeadServer, Said
from convoy.outer.crew import Serving, Tls
from tests.conftest import Outcome
from tests.faults.proxy import ChaosProxy

SECRET = "0123456789abcdef0123456789abcdef"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
METHODS = ("Attend", "Deposit", "Fetch")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return read_or_make_tls(tmp_path_factory.mktemp("lead"), "127.0.0.1")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return read_or_make_tls(tmp_path_factory.mktemp("other"), "127.0.0.1")


@pytest.fixture(params=["plain", "tls"])
def either(request: pytest.FixtureRequest, tls: Tls) -> Tls | None:
    """Return what a lead has to show, for leads with and without TLS."""
    return tls if request.param == "tls" else None


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """Put back the handlers that a node sets in its process, which here is this one."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


class Doorman:
    """A lead that welcomes everybody who knows the token, and does nothing else."""

    def __init__(self, tls: Tls | None) -> None:
        self.inbox: queue.SimpleQueue[Said | Deposited | None] = queue.SimpleQueue()
        self.heard: list[Said | Deposited] = []
        serving = Serving(token=SECRET, tls=tls)
        self.server = LeadServer(serving, self.inbox, lambda: b"state", 100)  # type: ignore[arg-type]
        self.address = f"127.0.0.1:{self.server.port}"
        self._thread = threading.Thread(target=self._welcome)
        self._thread.start()

    def _welcome(self) -> None:
        while (item := self.inbox.get()) is not None:
            self.heard.append(item)
            if isinstance(item, Deposited):
                item.receipt.set_result("")
            elif item.message is not None and item.message.WhichOneof("content") == "hello":
                item.connection.tell(welcome=wire.Welcome(number=7))

    def close(self) -> None:
        self.server.close()
        self.inbox.put(None)
        self._thread.join(5)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=10)


@contextmanager
def doorman(tls: Tls | None) -> Iterator[Doorman]:
    with closing(Doorman(tls)) as lead:
        yield lead


def join(lead: Doorman, certificate: bytes | None, token: str = SECRET) -> wire.Welcome:
    with closing(Link(lead.address, token, certificate)) as link:
        return link.join("x", -1)


def certificate_of(tls: Tls | None) -> bytes | None:
    return tls.certificate if tls else None


# ---------------------------------------------------------------- with and without TLS


def test_a_node_gets_in_and_takes_the_state(either: Tls | None) -> None:
    with doorman(either) as lead:
        with closing(Link(lead.address, SECRET, certificate_of(either))) as link:
            assert link.join("x", -1).number == 7
            assert link.fetch_state() == b"state"
        assert any(isinstance(said, Said) and said.message for said in lead.heard)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_it_does_not_matter_by_which_address_a_lead_is_reached(tmp_path: Path, host: str) -> None:
    with doorman(read_or_make_tls(tmp_path, "192.0.2.7")) as lead:
        pinned = (tmp_path / CERTIFICATE_FILE).read_bytes()
        with closing(Link(f"{host}:{lead.server.port}", SECRET, pinned)) as link:
            assert link.join("x", -1).number == 7


def test_a_bit_that_changes_on_the_way_is_noticed_over_tls(tls: Tls) -> None:
    with doorman(tls) as lead, ChaosProxy("127.0.0.1", lead.server.port) as proxy:
        with closing(Link(proxy.address, SECRET, tls.certificate)) as link:
            assert link.join("x", -1).number == 7
            proxy.flip("down", after=20)
            with contextlib.suppress(LeadLostError):  # or it comes by a new connection, whole
                assert link.fetch_state() == b"state"
            with pytest.raises(LeadLostError, match="cannot be reached"):
                link.prepared("", "", "", 1)
        assert proxy.hits["flip"] == 1


# ---------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    ("lead_has", "node_has", "words"),
    [
        ("tls", "other", r"shows another certificate.*Copy its certificate\.pem anew"),
        ("tls", "nothing", r"uses TLS\. Give --certificate"),
        ("nothing", "tls", r"does not use TLS.*Start it with --tls"),
    ],
)
def test_what_does_not_fit_is_told_at_once(
    request: pytest.FixtureRequest,
    convoy: Callable[..., Outcome],
    lead_has: str,
    node_has: str,
    words: str,
) -> None:
    holds = {"nothing": None, **{n: request.getfixturevalue(n) for n in ("tls", "other")}}
    with doorman(holds[lead_has]) as lead:
        started = time.monotonic()
        with pytest.raises(RefusedError, match=words) as caught:
            join(lead, certificate_of(holds[node_has]))
        assert time.monotonic() - started < 2
        assert caught.value.exit_code == 2
        assert SECRET not in str(caught.value)

        Path("token").write_text(SECRET)
        Path("token").chmod(0o600)
        held = holds[node_has]
        options = ("--certificate", held.path) if held else ()
        started = time.monotonic()
        outcome = convoy("join", lead.address, "--token-file", "token", *options)
        assert time.monotonic() - started < 5
        assert outcome.code == 2
        assert re.search(words, " ".join(outcome.err.split()))
        assert "Traceback" not in outcome.err
        assert SECRET not in outcome.err + outcome.out
        assert lead.heard == []


def test_a_lead_that_is_gone_is_not_a_wrong_one(either: Tls | None) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    link = Link(f"127.0.0.1:{port}", SECRET, certificate_of(either))
    with closing(link), pytest.raises(LeadLostError, match="cannot be reached"):
        link.join("x", -1)


def test_a_lead_that_goes_in_the_handshake_is_not_a_wrong_one(tls: Tls) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port, over = server.getsockname()[1], threading.Event()

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while not over.is_set():
                    server.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        for certificate in (None, tls.certificate):
            link = Link(f"127.0.0.1:{port}", SECRET, certificate)
            with closing(link), pytest.raises(LeadLostError, match="cannot be reached"):
                link.join("x", -1)
        over.set()
        socket.create_connection(("127.0.0.1", port)).close()
        thread.join(5)


# ---------------------------------------------------------------- tokens


class CountingWire:
    """The messages of a service, with every decoding of one counted."""

    def __init__(self, messages: Any = wire) -> None:
        self._messages = messages
        self.decoded: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        kind = getattr(self._messages, name)
        counter = self.decoded

        class Counted:
            def __new__(cls, **content: Any) -> Any:
                return kind(**content)

            @staticmethod
            def FromString(data: bytes) -> Any:  # noqa: N802 - its name in protobuf
                counter[name] += 1
                return kind.FromString(data)

        return Counted


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counting = CountingWire()
    monkeypatch.setattr(service, "wire", counting)
    return counting.decoded


def call(lead: Doorman, tls: Tls | None, method: str, token: str | None) -> grpc.StatusCode:
    """Call a method without Convoy's own client, and go on speaking; return how it ended."""
    metadata = ((TOKEN_KEY, token),) if token is not None else ()
    over = threading.Event()

    def speak() -> Iterator[bytes]:
        yield b""
        over.wait(5)  # a call whose one side is silent is not over

    if tls is None:
        channel = grpc.insecure_channel(lead.address)
    else:
        name = ("grpc.ssl_target_name_override", "convoy")
        credentials = grpc.ssl_channel_credentials(tls.certificate)
        channel = grpc.secure_channel(lead.address, credentials, options=[name])
    with closing(channel):
        stub = channel.stream_stream(f"/convoy.Lead/{method}")
        try:
            for _ in stub(speak(), metadata=metadata, timeout=5):
                over.set()
        except grpc.RpcError as error:
            return error.code()
        finally:
            over.set()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", [*METHODS, "Unknown"])
@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (None, grpc.StatusCode.UNAUTHENTICATED),
        ("", grpc.StatusCode.PERMISSION_DENIED),
        ("f" * 32, grpc.StatusCode.PERMISSION_DENIED),
    ],
)
def test_without_the_token_a_call_ends_before_anything_is_decoded(
    either: Tls | None,
    decoded: Counter[str],
    method: str,
    token: str | None,
    expected: grpc.StatusCode,
) -> None:
    with doorman(either) as lead:
        started = time.monotonic()
        assert call(lead, either, method, token) == expected
        assert time.monotonic() - started <= 1
        assert decoded == {}
        assert lead.heard == []


def test_with_the_token_messages_are_decoded(either: Tls | None, decoded: Counter[str]) -> None:
    with doorman(either) as lead:
        assert join(lead, certificate_of(either)).number == 7
        assert decoded == {"FromNode": 1}
        # As one message only, which is what the method expects.
        assert call(lead, either, "Fetch", SECRET) == grpc.StatusCode.OK
        assert decoded == {"FromNode": 1, "Nothing": 1}


def test_a_wrong_token_is_refused_in_words_over_tls(tls: Tls) -> None:
    with doorman(tls) as lead:
        with pytest.raises(RefusedError, match="not the run's token") as caught:
            join(lead, tls.certificate, "f" * 32)
        assert "f" * 32 not in str(caught.value)
        assert SECRET not in str(caught.value)


# ---------------------------------------------------------------- the silent


def wait_for_closing(sockets: list[socket.socket], limit_s: float) -> list[float]:
    """Return when each connection was closed from the other side, of those that were."""
    started = time.monotonic()
    left, closed = list(sockets), []
    while left and time.monotonic() - started < limit_s:
        readable, _, _ = select.select(left, [], [], 0.05)
        for one in readable:
            with contextlib.suppress(ConnectionResetError):
                if one.recv(4096):
                    continue
            left.remove(one)
            closed.append(time.monotonic() - started)
    return closed


def test_fifty_silent_connections_keep_nobody_out_and_are_closed(either: Tls | None) -> None:
    with doorman(either) as lead, ExitStack() as stack:
        silent = [stack.enter_context(closing(lead.connect())) for _ in range(50)]
        started = time.monotonic()
        assert join(lead, certificate_of(either)).number == 7
        took = time.monotonic() - started
        assert took < 1
        closed = wait_for_closing(silent, limit_s=5 - took)
        print(f"joined in {took * 1000:.0f} ms; closed after {closed[0]:.2f} to {closed[-1]:.2f} s")
        assert len(closed) == 50


def test_who_falls_silent_after_the_handshake_is_closed_too(either: Tls | None) -> None:
    with doorman(either) as lead, ExitStack() as stack:
        half, whole = (stack.enter_context(closing(speaker(lead, either))) for _ in range(2))
        half.sendall(PREFACE[:10])
        whole.sendall(PREFACE)
        closed = wait_for_closing([half, whole], limit_s=5)
        print(f"closed after {closed} s")
        assert len(closed) == 2


def speaker(lead: Doorman, tls: Tls | None) -> socket.socket:
    """Return a connection that HTTP/2 can be spoken over."""
    plain = lead.connect()
    if tls is None:
        return plain
    context = ssl.create_default_context(cadata=tls.certificate.decode())
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(plain, server_hostname="convoy")


def test_a_node_that_has_joined_may_be_silent_for_longer(either: Tls | None) -> None:
    with doorman(either) as lead:
        link = Link(lead.address, SECRET, certificate_of(either))
        with closing(link):
            link.join("x", -1)
            time.sleep(door._SILENT_AT_MOST_MS / 1000 + 1)
            link.check()
            assert link.fetch_state() == b"state"
