"""A network between nodes and the parameter service that loses, cuts, slows and damages."""

import itertools
import random
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import grpc
import pytest

from convoy.launch.door import TOKEN_KEY
from convoy.launch.parameters import exchange
from convoy.launch.parameters import messages_pb2 as wire
from convoy.launch.parameters.shell import PROTOCOL
from tests.faults.history import History
from tests.faults.light import (
    MODEL,
    NODE_TOKEN,
    RUN,
    SIZE,
    Bench,
    Client,
    connect,
    find_all_faults,
    running,
    wait_until,
)
from tests.faults.proxy import RANDOM_FAULTS, ChaosProxy
from tests.launch.test_service import PREFACE, wait_for_closing


def draw_seed() -> int:
    seed = random.SystemRandom().randrange(10_000)
    print(f"seed {seed}")
    return seed


def test_a_thousand_submissions_over_a_network_that_loses_are_counted_a_thousand_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each exchange loses its request, a part of it, or the reply, with p = 0.2 each."""
    monkeypatch.setattr(exchange, "_FIRST_PAUSE_S", 0.005)  # as a node does, only sooner
    monkeypatch.setattr(exchange, "_LONGEST_PAUSE_S", 0.05)
    history, seed = History(SIZE), draw_seed()
    with Bench(1000, nodes=8) as bench, ChaosProxy("127.0.0.1", bench.port) as proxy:
        proxy.fail_at_random(0.38, seed)
        clients = [Client(bench, history, n, address=proxy.address) for n in range(8)]
        with running(clients):
            for client in clients:
                client.join(120)
        standing = bench.standing()
        print(dict(proxy.hits), "retries", sum(client.retries for client in clients))
        for kind in RANDOM_FAULTS:
            assert proxy.hits[kind] > 100, kind
        assert standing["version"] - 1 == 1000
        assert standing["totals"]["submissions"] == 1000
        assert standing["totals"]["duplicates"] > 0
        assert len(history.attempts) == len(history.acknowledged) == 1000
        assert find_all_faults(bench, history, bench.samples) == []
        assert bench.rule.find_faults() == []
        assert bench.story().find_faults(bench.samples, 1) == []


def test_nodes_behind_a_cut_link_come_back_and_nobody_waits_for_them() -> None:
    """One is given up by its lead meanwhile, the other is not: only its service is out of reach."""
    history, healed = History(SIZE), threading.Event()

    def pace() -> float:
        return 0.0 if healed.is_set() else 0.03

    with (
        Bench(1200) as bench,
        ChaosProxy("127.0.0.1", bench.port) as given_up,
        ChaosProxy("127.0.0.1", bench.port) as kept,
    ):
        addresses = [given_up.address, kept.address, None, None]
        clients = [
            Client(bench, history, node, address=address, pause_s=pace)
            for node, address in enumerate(addresses)
        ]
        cut_off, others = clients[:2], clients[2:]
        with running(clients):
            wait_until(lambda: all(c.acknowledged_at for c in clients), "all hand in")
            given_up.cut()
            kept.cut()
            cut_at = time.monotonic()
            time.sleep(3)
            bench.remove(0, cut_off[0].incarnation)  # as a lead does that hears nothing for 3 s
            time.sleep(7)
            late = [c.acknowledged_at[-1] - cut_at for c in cut_off]
            given_up.heal()
            kept.heal()
            healed_at = time.monotonic()
            before = [len(c.acknowledged_at) for c in cut_off]
            took = wait_until(
                lambda: all(
                    len(c.acknowledged_at) > n for c, n in zip(cut_off, before, strict=True)
                ),
                "those who were cut off hand in again",
                limit_s=5,
            )
            healed.set()
            for client in clients:
                client.join(60)
        hits = given_up.hits + kept.hits
        print(f"handed in again {took:.2f} s after the link was healed; {dict(hits)}")
        assert all(p.hits["cut up"] > 0 for p in (given_up, kept))
        assert max(late) < 0.5  # nothing got through the cut
        longest = max(longest_gap(c, cut_at, healed_at) for c in others)
        print(f"the others waited {longest:.2f} s at most")
        assert longest < 1
        assert cut_off[0].fenced == 1
        assert cut_off[1].fenced == 0
        assert all(client.fenced == 0 for client in others)
        assert find_all_faults(bench, history, bench.samples) == []
        assert bench.rule.find_faults() == []
        assert bench.story().find_faults(bench.samples, 1) == []


def longest_gap(client: Client, since: float, until: float) -> float:
    """Return how long a client was not answered, at most."""
    times = [since, *(t for t in client.acknowledged_at if since < t < until), until]
    return max(b - a for a, b in itertools.pairwise(times))


def test_a_link_that_is_slow_is_not_taken_for_one_that_is_cut() -> None:
    """The service is silent for longer than a dead one would be: it is receiving."""
    size, history = 1_000_000, History(10)
    with (
        Bench(1, nodes=1, size=size) as bench,
        ChaosProxy("127.0.0.1", bench.port) as proxy,
    ):
        client = Client(bench, history, 0, size=size, address=proxy.address)
        proxy.throttle(4 * size / 7, "up")
        with running([client]):
            client.join(60)
        assert proxy.hits["throttle"] > 0
        assert client.retries == 0
        assert len(history.acknowledged) == 1


# ---------------------------------------------------------------- the silent


@pytest.mark.parametrize("said", [b"", PREFACE[:10], PREFACE], ids=["nothing", "half", "hello"])
def test_fifty_silent_connections_keep_no_node_out_and_are_closed(said: bytes) -> None:
    history = History(SIZE)
    with Bench(20) as bench, ExitStack() as stack:
        silent = [stack.enter_context(closing(connect(bench.address))) for _ in range(50)]
        for one in silent:
            one.sendall(said)
        started = time.monotonic()
        client = Client(bench, history, 0)
        with running([client]):
            wait_until(lambda: client.acknowledged_at, "a node hands in", 1)
            took = time.monotonic() - started
            client.join(10)
        closed = wait_for_closing(silent, limit_s=5 - (time.monotonic() - started))
        print(f"handed in after {took:.2f} s; closed after {closed[:1]} to {closed[-1:]} s")
        assert len(closed) == 50


def test_fifty_calls_that_break_off_in_the_middle_keep_no_node_out_and_are_ended() -> None:
    """Machines lose power while they hand in: nothing tells the service, not even a reset."""
    history = History(SIZE)
    with Bench(20) as bench, ChaosProxy("127.0.0.1", bench.port) as proxy, ExitStack() as stack:
        bench.admit(1, "vanished")
        for _ in range(50):
            stack.enter_context(half_a_call(proxy.address))
        wait_until(lambda: calls_under_way() == 50, "all of them are under way")
        proxy.cut()
        client = Client(bench, history, 0)
        with running([client]):
            wait_until(lambda: client.acknowledged_at, "a node hands in", 1)
            client.join(10)
        assert calls_under_way() == 50  # nobody has told
        bench.remove(1, "vanished")  # the lead has heard nothing of it for some seconds
        wait_until(lambda: calls_under_way() == 0, "they are ended", 5)
        assert find_all_faults(bench, history, bench.samples) == []


def calls_under_way() -> int:
    """Return how many threads receive a vector."""
    return sum("_receive" in names for names in stacks())


def stacks() -> Iterator[list[str]]:
    for frame in sys._current_frames().values():
        yield [entry.name for entry in traceback.extract_stack(frame)]


@contextmanager
def half_a_call(address: str) -> Iterator[None]:
    """Begin to hand in, on a connection of its own, and stop in the middle."""
    over = threading.Event()
    push = wire.Push(
        run=RUN,
        node=1,
        incarnation="vanished",
        number=1,
        base=1,
        model=MODEL,
        coding="full",
        length=4 * SIZE,
        protocol=PROTOCOL,
    )

    def speak() -> Iterator[wire.Up]:
        yield wire.Up(push=push)
        yield wire.Up(data=bytes(100))
        over.wait(60)

    options = [("grpc.use_local_subchannel_pool", 1)]
    with closing(grpc.insecure_channel(address, options)) as channel:
        stub = channel.stream_stream(
            "/convoy.Parameters/Exchange", request_serializer=wire.Up.SerializeToString
        )
        call = stub(speak(), metadata=((TOKEN_KEY, NODE_TOKEN),))
        yield
        over.set()
        call.cancel()
