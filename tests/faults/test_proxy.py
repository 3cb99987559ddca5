"""The misbehaving network itself: every fault strikes, is counted, and does what it says."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from tests.faults.proxy import RANDOM_FAULTS, ChaosProxy

NOISE = bytes(i * i % 251 for i in range(4000))


class Echo:
    """A target that says everything back, and keeps what it heard by each connection."""

    def __init__(self) -> None:
        self.heard: list[bytearray] = []
        self._ends: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._thread = threading.Thread(target=self._accept)
        self._speakers: list[threading.Thread] = []
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                self.heard.append(bytearray())
                speaker = threading.Thread(target=self._speak, args=(client, self.heard[-1]))
                self._speakers.append(speaker)
                speaker.start()

    def _speak(self, client: socket.socket, heard: bytearray) -> None:
        with closing(client), contextlib.suppress(OSError):
            while data := client.recv(65536):
                heard.extend(data)
                client.sendall(data)
        self._ends.append(client)

    @property
    def ended(self) -> int:
        """Return how many connections are over."""
        return len(self._ends)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in (self._thread, *self._speakers):
            thread.join(5)
            assert not thread.is_alive()


@pytest.fixture
def echo() -> Iterator[Echo]:
    with closing(Echo()) as server:
        yield server


@pytest.fixture
def proxy(echo: Echo) -> Iterator[ChaosProxy]:
    with ChaosProxy("127.0.0.1", echo.port) as made:
        yield made


Connect = Callable[[], socket.socket]


@pytest.fixture
def connect(proxy: ChaosProxy) -> Iterator[Connect]:
    with contextlib.ExitStack() as stack:

        def call() -> socket.socket:
            client = socket.create_connection(("127.0.0.1", proxy.port), timeout=5)
            return stack.enter_context(closing(client))

        yield call


def read(client: socket.socket, size: int) -> bytes:
    """Read so many bytes, or what came before the connection was closed."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while len(data) < size and (more := client.recv(size - len(data))):
            data += more
    return data


def ask(client: socket.socket, data: bytes) -> bytes:
    """Send something and return what comes back, which is less if the connection was closed."""
    with contextlib.suppress(ConnectionError):
        client.sendall(data)
    return read(client, len(data))


def is_silent(client: socket.socket, for_s: float = 0.3) -> bool:
    """Tell whether nothing comes, not even the end."""
    client.settimeout(for_s)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(5)
    return False


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def faults(proxy: ChaosProxy) -> dict[str, int]:
    return {name: count for name, count in proxy.hits.items() if name != "exchange"}


# ---------------------------------------------------------------- no fault


def test_without_faults_everything_arrives(proxy: ChaosProxy, connect: Connect, echo: Echo) -> None:
    first, second = connect(), connect()
    for client in (first, second, first):
        assert ask(client, NOISE) == NOISE
    assert faults(proxy) == {}
    assert proxy.hits["exchange"] == 3
    assert proxy.connections == 2
    big = NOISE * 1000
    sender = threading.Thread(target=first.sendall, args=(big,))
    sender.start()
    assert read(first, len(big)) == big
    sender.join()
    second.shutdown(socket.SHUT_WR)
    assert read(second, 1) == b""
    wait_until(lambda: echo.ended == 1)
    wait_until(lambda: proxy.connections == 1)


def test_a_target_that_is_gone_ends_the_connection() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
    with (
        ChaosProxy("127.0.0.1", port) as proxy,
        closing(socket.create_connection(("127.0.0.1", proxy.port), timeout=5)) as client,
    ):
        assert read(client, 1) == b""


def test_a_proxy_can_be_left_with_connections_that_hang(echo: Echo) -> None:
    with ChaosProxy("127.0.0.1", echo.port) as proxy:
        proxy.cut()
        with closing(socket.create_connection(("127.0.0.1", proxy.port), timeout=5)) as client:
            client.sendall(NOISE)
            wait_until(lambda: proxy.hits["cut up"] == 1)
    assert "proxy" not in [thread.name for thread in threading.enumerate()]


# ---------------------------------------------------------------- slowness


def test_delay(proxy: ChaosProxy, connect: Connect) -> None:
    client = connect()
    assert ask(client, b"a") == b"a"
    proxy.delay(0.1)
    started = time.monotonic()
    assert ask(client, b"b") == b"b"
    assert 0.2 <= time.monotonic() - started < 2
    assert faults(proxy) == {"delay": 2}


def test_delay_one_way_does_not_limit_the_rate(proxy: ChaosProxy, connect: Connect) -> None:
    client = connect()
    proxy.delay(0.2, "down")
    started = time.monotonic()
    assert ask(client, NOISE * 500) == NOISE * 500
    assert 0.2 <= time.monotonic() - started < 2  # one piece after the other: over 6 s
    assert proxy.hits["delay"] > 30


def test_throttle_is_shared_by_all(proxy: ChaosProxy, connect: Connect) -> None:
    first, second = connect(), connect()
    proxy.throttle(16_000, "up")
    started = time.monotonic()
    for client in (first, second):
        client.sendall(NOISE)
    assert read(first, 4000) == read(second, 4000) == NOISE
    assert 0.45 <= time.monotonic() - started < 2
    assert proxy.hits["throttle"] >= 10
    assert set(faults(proxy)) == {"throttle"}


# ---------------------------------------------------------------- cuts


def test_cut_holds_everything_back_and_closes_nothing(
    proxy: ChaosProxy, connect: Connect, echo: Echo
) -> None:
    client, leaver = connect(), connect()
    assert ask(client, b"a") == ask(leaver, b"a") == b"a"
    proxy.cut()
    client.sendall(b"bc")
    leaver.close()
    late = connect()  # the proxy answers, but the target never hears of it
    late.sendall(b"late")
    assert is_silent(client)
    assert (bytes(echo.heard[0]), len(echo.heard), echo.ended) == (b"a", 2, 0)
    assert faults(proxy) == {"cut up": 3}
    proxy.heal()
    assert read(client, 2) == b"bc"
    assert read(late, 4) == b"late"
    wait_until(lambda: echo.ended == 1)


def test_cut_one_way(proxy: ChaosProxy, connect: Connect, echo: Echo) -> None:
    client = connect()
    assert ask(client, b"a") == b"a"
    proxy.cut("down")
    client.sendall(b"b")
    assert is_silent(client)
    assert bytes(echo.heard[0]) == b"ab"
    assert faults(proxy) == {"cut down": 1}
    proxy.heal()
    assert read(client, 1) == b"b"
    proxy.cut("up")
    client.sendall(b"c")
    assert is_silent(client)
    assert bytes(echo.heard[0]) == b"ab"
    assert faults(proxy) == {"cut down": 1, "cut up": 1}
    proxy.heal()
    assert read(client, 1) == b"c"


# ---------------------------------------------------------------- ends


def test_close_all(proxy: ChaosProxy, connect: Connect, echo: Echo) -> None:
    clients = [connect() for _ in range(3)]
    assert [ask(client, b"a") for client in clients] == [b"a"] * 3
    proxy.close_all()
    assert [read(client, 1) for client in clients] == [b""] * 3
    assert faults(proxy) == {"close": 3}
    wait_until(lambda: echo.ended == 3)
    assert ask(connect(), NOISE) == NOISE


def test_close_all_ends_what_a_cut_holds(proxy: ChaosProxy, connect: Connect, echo: Echo) -> None:
    client = connect()
    assert ask(client, b"a") == b"a"
    proxy.cut()
    client.sendall(b"b")
    wait_until(lambda: proxy.hits["cut up"] == 1)
    proxy.close_all()
    assert read(client, 1) == b""
    wait_until(lambda: echo.ended == 1)
    assert bytes(echo.heard[0]) == b"a"


def test_refuse(proxy: ChaosProxy, connect: Connect, echo: Echo) -> None:
    before = connect()
    assert ask(before, b"a") == b"a"
    proxy.refuse()
    with pytest.raises(ConnectionResetError):
        connect().recv(1)
    assert ask(before, b"b") == b"b"
    assert faults(proxy) == {"refuse": 1}
    assert len(echo.heard) == 1
    proxy.refuse(False)
    assert ask(connect(), b"c") == b"c"


@pytest.mark.parametrize("after", [0, 1, 2500, 3999, 4000])
def test_truncate_up(proxy: ChaosProxy, connect: Connect, echo: Echo, after: int) -> None:
    client = connect()
    assert ask(client, b"a") == b"a"
    proxy.truncate("up", after)
    ask(client, NOISE)
    wait_until(lambda: echo.ended == 1)
    assert bytes(echo.heard[0]) == b"a" + NOISE[:after]
    assert faults(proxy) == {"truncate": 1}
    assert ask(connect(), NOISE) == NOISE


def test_truncate_down_counts_over_connections(
    proxy: ChaosProxy, connect: Connect, echo: Echo
) -> None:
    first, second = connect(), connect()
    proxy.truncate("down", 5000)
    assert ask(first, NOISE) == NOISE
    assert ask(second, NOISE) == NOISE[:1000]
    assert bytes(echo.heard[1]) == NOISE
    assert ask(first, NOISE) == NOISE
    assert faults(proxy) == {"truncate": 1}


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("after", [0, 3999, 6000])
def test_flip_changes_one_bit(
    proxy: ChaosProxy, connect: Connect, echo: Echo, way: str, after: int
) -> None:
    assert way in ("up", "down")
    proxy.flip("up" if way == "up" else "down", after)
    client = connect()
    replies = [ask(client, NOISE) for _ in range(3)]
    sent, heard = NOISE * 3, b"".join(replies)
    wrong = [i for i in range(len(sent)) if sent[i] != heard[i]]
    assert wrong == [after]
    assert (sent[after] ^ heard[after]).bit_count() == 1
    assert (bytes(echo.heard[0]) == sent) == (way == "down")
    assert faults(proxy) == {"flip": 1}


# ---------------------------------------------------------------- at random


def test_lost_request(proxy: ChaosProxy, connect: Connect, echo: Echo) -> None:
    client = connect()
    assert ask(client, b"a") == b"a"
    proxy.fail_at_random(1.0, kinds=("lost request",))
    assert ask(client, NOISE) == b""
    wait_until(lambda: echo.ended == 1)
    assert bytes(echo.heard[0]) == b"a"
    assert faults(proxy) == {"lost request": 1}


def test_lost_in_flight(proxy: ChaosProxy, connect: Connect, echo: Echo) -> None:
    burst = NOISE * 50  # in many pieces
    proxy.fail_at_random(1.0, seed=1, kinds=("lost in flight",))
    for _ in range(10):
        ask(connect(), burst)
    wait_until(lambda: echo.ended == 10)
    lengths = [len(heard) for heard in echo.heard]
    assert all(0 < length < len(burst) for length in lengths)
    assert all(burst.startswith(heard) for heard in echo.heard)
    assert min(lengths) < len(burst) / 3 < len(burst) * 2 / 3 < max(lengths)
    assert faults(proxy) == {"lost in flight": 10}


def test_lost_reply(proxy: ChaosProxy, connect: Connect, echo: Echo) -> None:
    client = connect()
    proxy.fail_at_random(1.0, kinds=("lost reply",))
    short = NOISE[:100]
    assert ask(client, short) == short  # too short to be more than a sign of life
    assert ask(client, NOISE) == b""
    wait_until(lambda: echo.ended == 1)
    assert bytes(echo.heard[0]) == short + NOISE
    assert faults(proxy) == {"lost reply": 1}


def test_random_faults_come_as_often_as_asked_for_and_again_with_the_same_seed(
    proxy: ChaosProxy, connect: Connect
) -> None:
    def outcomes(seed: int) -> list[bool]:
        proxy.fail_at_random(0.3, seed)
        results, client = [], connect()
        for _ in range(100):
            results.append(ask(client, NOISE) == NOISE)
            if not results[-1]:
                client = connect()
        return results

    first = outcomes(5)
    assert 15 <= first.count(False) <= 45
    assert proxy.hits["exchange"] == 100
    assert sum(faults(proxy).values()) == first.count(False)
    assert set(faults(proxy)) == set(RANDOM_FAULTS)
    assert outcomes(5) == first
    assert outcomes(6) != first
