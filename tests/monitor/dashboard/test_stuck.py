"""Readers that never read: they cost the server next to nothing, and other readers no time."""

import socket
import statistics
import time
from pathlib import Path

from convoy.monitor.events import JoinEvent, NodesEvent
from tests.monitor.dashboard.browser import PATIENCE_S, Listener, request
from tests.monitor.dashboard.lines import append, start, step
from tests.monitor.dashboard.process import Watch, resident_bytes, watching_process

EVENTS = 100_000
BATCHES = 5
LONG_NAME = "x" * 2**20  # makes every message longer than what sockets hold by themselves
MOST_BYTES = 50 * 2**20
SOON_S = 2.0


def connect_and_never_read(watch: Watch) -> socket.socket:
    """Ask for a stream, through the narrowest window there is."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    connection.connect(("127.0.0.1", watch.port))
    connection.sendall(request(watch.port, "/api/stream", headers=watch.cookie))
    return connection


def nodes(number: int) -> NodesEvent:
    """Return news of a node, with which all there is to say about nodes is said again."""
    return NodesEvent(
        step=number,
        nodes=[0],
        speeds=[100.0 + number],
        shares=[100],
        samples=[100],
        busy_s=[1.0],
        waiting_s=[0.0],
        exchange_s=0.1,
    )


def seconds_to_hear(listener: Listener, events: Path, samples: int) -> float:
    before = time.monotonic()
    append(events, step(samples))
    listener.until_samples(samples)
    return time.monotonic() - before


def messages_until(connection: socket.socket, last: bytes) -> int:
    """Read at last, and count the messages up to one that says something."""
    connection.settimeout(PATIENCE_S)
    received = b""
    while last not in received:
        received += connection.recv(1 << 20)
    return received.count(b"data: ")


def test_a_reader_that_never_reads(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    joined = JoinEvent(node=0, name=LONG_NAME, pid=1, device="cpu", reason="a new node")
    append(events, start(), joined, step(1))
    with (
        watching_process(tmp_path, "--port=0") as watch,
        Listener(watch.port, watch.cookie) as listener,
        connect_and_never_read(watch) as stuck,
        connect_and_never_read(watch),
    ):
        listener.until_samples(1)
        before = resident_bytes(watch.process)
        for batch in range(BATCHES):
            first = 2 + batch * EVENTS // BATCHES
            last = first + EVENTS // BATCHES
            append(events, *(step(samples) for samples in range(first, last)), nodes(batch))
            listener.until_samples(last - 1)
        times = [seconds_to_hear(listener, events, last + i) for i in range(5)]
        grown = resident_bytes(watch.process) - before
        told = messages_until(stuck, f'"samples": {last + 4},'.encode())
    print(f"grown by {grown / 2**20:.1f} MiB; others are told after {max(times):.2f} s at most")
    print(f"{listener.count} messages to who reads, {told} to who did not")
    assert grown < MOST_BYTES
    assert statistics.median(times) < SOON_S
    assert told < listener.count  # it was stuck, and is up to date again as soon as it reads
