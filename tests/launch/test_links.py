"""Data between namespaces flows at the rate of the link, and nothing stays behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from convoy.errors import ConfigError, EnvironmentProblem
from convoy.launch.links import Links, enter_namespace

# Enters a namespace, connects to the lead, sends so many bytes and then receives as many.
FAR_END = """
import socket, sys
from convoy.launch.links import enter_namespace
namespace, host, port, count = sys.argv[1:]
enter_namespace(namespace)
with socket.create_connection((host, int(port))) as peer:
    print(peer.getsockname()[0], flush=True)
    peer.sendall(bytes(int(count)))
    missing = int(count)
    while missing:
        missing -= len(peer.recv(65536))
    peer.sendall(b"!")
    peer.recv(1)
"""


@pytest.fixture
def needs_links() -> None:
    if reason := Links.available():
        pytest.skip(reason)


@contextmanager
def far_end(links: Links, node: int, count: int) -> Iterator[tuple[socket.socket, str]]:
    """Start a process at the far end of a link; give the socket to it and its own address."""
    with socket.create_server((links.lead_address, 0)) as server:
        server.settimeout(20)
        port = str(server.getsockname()[1])
        words = [links.namespace(node), links.lead_address, port, str(count)]
        with subprocess.Popen(
            [sys.executable, "-c", FAR_END, *words], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            peer, _ = server.accept()
            with peer:
                peer.settimeout(20)
                yield peer, process.stdout.readline().strip()


def receive(peer: socket.socket, count: int) -> None:
    while count:
        count -= len(peer.recv(min(count, 65536)))


def transfer_s(peer: socket.socket, count: int) -> tuple[float, float]:
    """Measure how long it takes to receive so many bytes, and then to send as many."""
    begin = time.monotonic()
    receive(peer, count)
    middle = time.monotonic()
    peer.sendall(bytes(count))
    receive(peer, 1)
    return middle - begin, time.monotonic() - middle


def left_behind(pid: int) -> list[str]:
    places = (Path("/sys/class/net"), Path("/run/netns"))
    names = [path.name for place in places if place.exists() for path in place.iterdir()]
    marks = (f"cvb{pid}x", f"cv{pid}x", f"convoy-{pid}x")
    return [name for name in names if name.startswith(marks)]


@pytest.mark.usefixtures("needs_links")
def test_a_transfer_takes_as_long_as_the_rate_says_in_both_directions() -> None:
    megabyte = 1_000_000
    with Links([None, 20.0]) as links:
        with far_end(links, 1, megabyte) as (peer, address):
            assert address == links.address(1)
            up_s, down_s = transfer_s(peer, megabyte)
        with far_end(links, 0, megabyte) as (peer, address):
            assert address == links.address(0)
            free_s = sum(transfer_s(peer, megabyte))
        assert left_behind(os.getpid())

    # 0.4 s each; a busy machine takes longer, but none is quicker than the link.
    assert 0.28 < up_s < 0.7
    assert 0.28 < down_s < 0.7
    assert free_s < (up_s + down_s) / 2
    assert not left_behind(os.getpid())


@pytest.mark.usefixtures("needs_links")
def test_a_process_that_stays_does_not_keep_the_links() -> None:
    with Links([10.0]) as links:
        program = (
            "import sys\n"
            "from convoy.launch.links import enter_namespace\n"
            "enter_namespace(sys.argv[1])\n"
            "import socket\n"
            "socket.create_server(('127.0.0.1', 0)).close()\n"
            "peer = socket.create_server(('127.0.0.1', 0))\n"
            "socket.create_connection(peer.getsockname()).close()\n"  # lo is up
            "print('ready', flush=True)\n"
            "sys.stdin.read()\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program, links.namespace(0)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    assert process.poll() is None
    assert not left_behind(os.getpid())
    process.communicate()
    assert process.returncode == 0


@pytest.mark.usefixtures("needs_links")
def test_what_a_killed_run_left_is_removed_by_the_next() -> None:
    program = (
        "import os, signal\n"
        "from convoy.launch.links import Links\n"
        "with Links([10.0, None]): os.kill(os.getpid(), signal.SIGKILL)"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as killed:
        # Not reaped yet, it still counts as living: no other test at the same time cleans up.
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
        assert len(left_behind(killed.pid)) == 5  # a bridge, and a card and a namespace for each
        assert killed.wait() == -signal.SIGKILL
    with Links([None]):
        assert not left_behind(killed.pid)


def test_a_namespace_that_is_not_there_cannot_be_entered() -> None:
    with pytest.raises(EnvironmentProblem, match="convoy-nowhere"):
        enter_namespace("convoy-nowhere")


def test_without_iproute2_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(EnvironmentProblem, match=r"'ip' is missing.*iproute2"):
        Links([None]).__enter__()
    assert "iproute2" in (Links.available() or "")


def test_without_rights_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in (Links.available() or "")


@pytest.mark.parametrize("rates", [[], [0.0], [-1.0], [float("nan")], [1e9], [None] * 65])
def test_rates_no_link_can_have_are_refused(rates: list[float | None]) -> None:
    with pytest.raises(ConfigError, match="got"):
        Links(rates)
