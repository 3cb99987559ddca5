"""Vectors that change hands in shared memory: whose they are when, and what is left behind."""

import fcntl
import math
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest
import torch
from torch import Tensor

from convoy.config import Config
from convoy.launch.parameters import exchange as exchange_module
from convoy.launch.parameters import messages_pb2 as wire
from convoy.launch.parameters.exchange import Exchange, Service
from convoy.launch.parameters.keeper import Keeper
from convoy.launch.parameters.record import Record
from convoy.launch.parameters.shell import ParameterShell
from convoy.launch.parameters.vectors import Coding
from convoy.memory import shared
from convoy.memory.shared import SharedRooms, SharedVector, remove, sweep
from convoy.outer.server import Report, ShutOutError
from convoy.outer.service_plan import make_server

SIZE = 20_000
TOKEN, LEAD_TOKEN = "0123456789abcdef", "fedcba9876543210"
RUN, MODEL, NODE, NAME = "run", "model", 0, "first"


@contextmanager
def served(folder: Path, rule: str = "delta-poly", nodes: int = 1) -> Iterator[str]:
    """Serve a vector of ones without statistics; gives the address."""
    rooms = SharedRooms()
    config = Config(strategy="server", rule=rule, batch=nodes, exchange_every=1, overlap=False)
    server = make_server(config, torch.ones(SIZE), SIZE, 10_000, nodes, 0, rooms=rooms)
    for node in range(nodes):
        server.admit(node, NAME, 1.0, 0.0)
    with Record(folder / "record.jsonl") as record:
        shell = ParameterShell(
            server,
            rooms,
            run=RUN,
            model=MODEL,
            tokens=(TOKEN, LEAD_TOKEN),
            keeper=Keeper(folder / "service"),
            record=record,
            journal=False,
            write_every=1000,
        )
        port = shell.listen("127.0.0.1", 0, None)
        shell.let_nodes_in()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            shell.close()


def connected(address: str, node: int = NODE, coding: Coding = "shared") -> Exchange:
    return Exchange(
        Service(address, TOKEN, RUN, patience_s=10),
        node,
        NAME,
        model=MODEL,
        size=SIZE,
        dtype=torch.float32,
        coding=coding,
        check=lambda: None,
    )


def full_of(value: float) -> Tensor:
    return torch.full((SIZE,), value)


def blocks() -> set[str]:
    return {path.name for path in shared._FOLDER.glob("convoy-*")}


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with TemporaryDirectory(dir=shared._FOLDER) as folder:  # other tests run at the same time
        monkeypatch.setattr(shared, "_FOLDER", Path(folder))
        yield
        assert blocks() == set()


# ---------------------------------------------------------------- an exchange


@pytest.mark.parametrize("in_place", [True, False])
def test_what_is_handed_in_is_merged_and_the_answer_can_be_read(
    tmp_path: Path, in_place: bool
) -> None:
    with served(tmp_path) as address, closing(connected(address)) as exchange:
        given = exchange.pull()
        assert torch.equal(given.vector, full_of(1.0))
        for number in range(1, 6):
            vector = full_of(0.5)
            if in_place:
                assert exchange.room is not None
                vector = exchange.room.fill_(0.5)
            given = exchange.push(given.version, vector, Report(samples=1)).result()
            assert torch.equal(given.vector, full_of(1.0 + 0.5 * number))
        assert exchange.bytes_up == exchange.bytes_down == 0


def test_what_a_node_reads_stays_until_its_next_call(tmp_path: Path) -> None:
    with served(tmp_path, nodes=2) as address:
        slow, fast = connected(address, 0), connected(address, 1)
        with closing(slow), closing(fast):
            kept = slow.pull()
            given = fast.pull()
            for _ in range(10):  # more versions than there are rooms for
                given = fast.push(given.version, full_of(1.0), Report(samples=1)).result()
            assert given.version == kept.version + 10
            assert torch.equal(kept.vector, full_of(1.0))
    assert torch.equal(kept.vector, full_of(1.0))  # what was mapped stays mapped


def test_a_node_cannot_write_to_the_services_weights(tmp_path: Path) -> None:
    with served(tmp_path) as address, closing(connected(address)) as exchange:
        given = exchange.pull()
        given.vector.fill_(7.0)
        other = exchange.push(given.version, full_of(0.0), Report(samples=1)).result()
        assert torch.equal(other.vector, full_of(1.0))


def test_what_the_service_keeps_is_its_own(tmp_path: Path) -> None:
    with served(tmp_path, "fedbuff:size=2") as address, closing(connected(address)) as exchange:
        given = exchange.pull()
        assert exchange.room is not None
        first = exchange.push(given.version, exchange.room.fill_(2.0), Report(samples=1)).result()
        assert torch.equal(first.vector, full_of(1.0))  # one is not enough
        exchange.room.fill_(4.0)
        second = exchange.push(first.version, exchange.room, Report(samples=1)).result()
        assert torch.equal(second.vector, full_of(1.0 + (2.0 + 4.0) / 2))


@pytest.mark.parametrize("rule", ["mean", "fedavg"])  # a beat may end without one of them
def test_nodes_that_wait_for_each_other_are_merged_from_where_they_are(
    tmp_path: Path, rule: str
) -> None:
    with served(tmp_path, rule, nodes=2) as address:
        pair = [connected(address, node) for node in range(2)]
        try:
            versions = [exchange.pull().version for exchange in pair]
            for beat in range(1, 4):
                pending = [
                    exchange.push(version, full_of(value), Report(samples=1))
                    for exchange, version, value in zip(pair, versions, (1.0, 3.0), strict=True)
                ]
                given = [future.result(timeout=20) for future in pending]
                assert all(torch.equal(g.vector, full_of(1.0 + 2.0 * beat)) for g in given)
                versions = [g.version for g in given]
        finally:
            for exchange in pair:
                exchange.close()


# ---------------------------------------------------------------- what goes wrong


def test_a_call_that_was_given_up_reads_nothing_any_more(tmp_path: Path) -> None:
    with served(tmp_path) as address, closing(connected(address)) as exchange:
        given = exchange.pull()
        stale = exchange._push(1, given.version)
        stale.turn, stale.looks = exchange._turn, True
        stale.trained.CopyFrom(wire.Trained(samples=1))
        exchange.pull()  # a later call
        with pytest.raises(grpc.RpcError) as caught:
            exchange._call(iter([wire.Up(push=stale)]), metadata=exchange._metadata).__next__()
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert exchange.pull().version == given.version


def test_the_block_of_another_node_is_refused(tmp_path: Path) -> None:
    with served(tmp_path, nodes=2) as address:
        mine, other = connected(address, 0), connected(address, 1)
        with closing(mine), closing(other):
            mine.pull()
            push = other._push(0, 0)
            assert mine._shared is not None
            push.shared, push.turn = mine._shared.name, 1000
            with pytest.raises(grpc.RpcError, match="another node's"):
                other._call(iter([wire.Up(push=push)]), metadata=other._metadata).__next__()
            assert torch.equal(mine.pull().vector, full_of(1.0))


@pytest.mark.parametrize("lost", ["node's", "service's"])
def test_without_shared_memory_vectors_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    def nothing(*_: object) -> None:
        return None

    if lost == "service's":
        monkeypatch.setattr(shared, "_make", nothing)
    with served(tmp_path) as address:
        if lost == "node's":
            monkeypatch.setattr(SharedVector, "make", nothing)
        with closing(connected(address)) as exchange:
            given = exchange.pull()
            given = exchange.push(given.version, full_of(2.0), Report(samples=1)).result()
            assert torch.equal(given.vector, full_of(3.0))
            assert exchange.bytes_down == 2 * 4 * SIZE


def test_an_answer_that_cannot_be_opened_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "_FIRST_PAUSE_S", 0.01)
    with served(tmp_path) as address:
        for name in blocks():  # somebody tidies up
            remove(name)
        with closing(connected(address)) as exchange:
            given = exchange.pull()
            given = exchange.push(given.version, full_of(2.0), Report(samples=1)).result()
            assert torch.equal(given.vector, full_of(3.0))
            assert exchange.retries == 1


# ---------------------------------------------------------------- blocks


def test_a_block_is_opened_only_if_it_is_what_it_should_be(tmp_path: Path) -> None:
    made = SharedVector.make(100, torch.float32)
    assert made is not None
    link = shared._FOLDER / f"convoy-{secrets.token_hex(16)}"
    link.symlink_to(shared._FOLDER / made.name)
    try:
        for open_it in (SharedVector.open, SharedVector.look_at):
            found = open_it(made.name, 100, torch.float32)
            assert found is not None
            made.vector.fill_(3.0)
            assert torch.equal(found.vector, made.vector)
            assert open_it(made.name, 101, torch.float32) is None
            assert open_it(f"../{made.name}", 100, torch.float32) is None
            assert open_it(link.name, 100, torch.float32) is None
            assert open_it(f"convoy-{secrets.token_hex(16)}", 100, torch.float32) is None
    finally:
        remove(made.name)
        link.unlink()


def test_what_somebody_left_who_was_killed_is_swept_away_and_nothing_else() -> None:
    rooms = SharedRooms()
    kept = rooms.name_of(rooms.empty(100, torch.float32))
    other = shared._FOLDER / "convoy-of-another-form"
    other.touch()
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "import torch\n"
        "from convoy.memory import shared\n"
        "shared._FOLDER = Path(sys.argv[1])\n"
        "made = shared.SharedVector.make(100, torch.float32)\n"
        "rooms = shared.SharedRooms(); vector = rooms.empty(100, torch.float32)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(shared._FOLDER)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(blocks()) == 4
    sweep()
    assert blocks() == {kept, other.name}
    other.unlink()
    rooms.close()


def test_who_is_swept_away_before_its_lock_is_there_makes_no_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock = fcntl.flock

    def late(handle: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        sweep()
        lock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    assert SharedVector.make(100, torch.float32) is None
    assert fcntl.flock is lock


def _swap(exchange: Exchange, count: int) -> int:
    given = exchange.pull()
    for _ in range(count):
        given = exchange.push(given.version, full_of(1.0), Report(samples=1)).result()
        assert bool((given.vector == given.vector[0]).all()), "read while it was written"
    return count


def test_many_nodes_at_once_never_read_what_is_being_written(tmp_path: Path) -> None:
    with served(tmp_path, nodes=4) as address, ThreadPoolExecutor(4) as pool:
        exchanges = [connected(address, node) for node in range(4)]
        try:
            assert sum(pool.map(_swap, exchanges, [25] * 4)) == 100
        finally:
            for exchange in exchanges:
                exchange.close()


@pytest.mark.parametrize("coding", ["shared", "full"])
def test_who_is_shut_out_is_told_so_and_not_that_it_may_come_back(
    tmp_path: Path, coding: Coding
) -> None:
    with served(tmp_path) as address, closing(connected(address, coding=coding)) as exchange:
        given = exchange.pull()
        for _ in range(3):
            given = exchange.push(given.version, full_of(math.nan), Report(samples=1)).result()
            assert given.refused == "not finite"
        with pytest.raises(ShutOutError, match="nonsense too often"):
            exchange.push(given.version, full_of(1.0), Report(samples=1)).result()
