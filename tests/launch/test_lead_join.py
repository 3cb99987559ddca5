"""Who may join a run and who not: refusals in words, and a run that they do not disturb."""

import ipaddress
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from convoy.config import Config, read_toml
from convoy.data.load import load_data
from convoy.errors import ConvoyError
from convoy.launch import wire_pb2 as wire
from convoy.launch.certificate import read_or_make_tls
from convoy.launch.door import TOKEN_KEY
from convoy.launch.link import Link, RefusedError
from convoy.launch.node import model_digest
from convoy.launch.token import read_or_make_token, read_token
from convoy.machine import versions
from convoy.outer.ledger import find_faults
from convoy.tracking import untracked
from tests.conftest import Outcome
from tests.faults.paced import build
from tests.faults.team import EPOCHS, Team, free_port, start_program

Convoy = Callable[..., Outcome]
SECRET = "0123456789abcdef0123456789abcdef"
SAMPLES = 400


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """Put back the handlers that a node sets in its process, which here is this one."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def token_file(text: str = SECRET, name: str = "token", mode: int = 0o600) -> Path:
    path = Path(name).absolute()
    path.write_text(text)
    path.chmod(mode)
    return path


def write_data(seed: int) -> None:
    draw = np.random.default_rng(seed)
    labels = np.arange(SAMPLES) % 2
    images = draw.integers(0, 100, (SAMPLES, 28, 28)) + 100 * labels[:, None, None]
    images = images.astype(np.uint8)
    np.savez("data.npz", x_train=images, y_train=labels, x_test=images[:40], y_test=labels[:40])


def assert_refused(outcome: Outcome, code: int, *words: str) -> None:
    assert outcome.code == code, outcome.err
    assert "Traceback" not in outcome.err
    assert SECRET not in outcome.err + outcome.out
    told = " ".join(outcome.err.split())
    for word in words:
        assert re.search(word, told), told


def running_lead(port: int) -> Team:
    """Start a lead with one node of its own on data that lies in this folder."""
    options: dict[str, Any] = {
        "data": "data.npz",
        "nodes": 2,
        "epochs": 500,
        "batch": 50,
        "restarts": 0,
    }
    return Team("lead", f"--token-file={token_file()}", f"--port={port}", **options)


def end_politely(team: Team) -> None:
    """Let a run show that it is unharmed, and end it."""
    team.wait_for_steps(2)
    assert team.group() == [0, 1]
    assert [r for r in team.events("leave") if r["node"] < 2] == []
    team.lead.send_signal(signal.SIGINT)
    team.finish(code=130, limit_s=20)
    team.assert_no_orphans()
    assert find_faults(team.ledger(), SAMPLES) == []
    assert len(team.ledger()) > 5


def call_attend(port: int, *messages: wire.FromNode, token: str | None) -> grpc.StatusCode:
    """Speak to a lead without Convoy's own client; return how it ended the call."""
    metadata = ((TOKEN_KEY, token),) if token is not None else ()
    with closing(grpc.insecure_channel(f"127.0.0.1:{port}")) as channel:
        attend = channel.stream_stream(
            "/convoy.Lead/Attend",
            request_serializer=wire.FromNode.SerializeToString,
            response_deserializer=wire.FromLead.FromString,
        )
        started, over = time.monotonic(), threading.Event()

        def speak() -> Iterator[wire.FromNode]:
            yield from messages
            over.wait(10)  # a call whose one side is silent is not over

        with pytest.raises(grpc.RpcError) as caught:
            list(attend(speak(), metadata=metadata, timeout=5))
        over.set()
        assert time.monotonic() - started < 2
        return caught.value.code()


def test_whoever_does_not_belong_is_told_why_and_the_run_goes_on(
    convoy: Convoy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    write_data(seed=1)
    with running_lead(port) as team:
        team.wait_for_steps(1)
        team.out = team.out.absolute()
        good = token_file()

        wrong = token_file("f" * 32, "wrong")
        outcome = convoy("join", address, "--token-file", wrong)
        assert_refused(outcome, 2, "refused this node", "not the run's token")

        hello = wire.FromNode(hello=wire.Hello(version="1", name="x", pid=1, slot=-1))
        assert call_attend(port, hello, token=None) == grpc.StatusCode.UNAUTHENTICATED
        assert call_attend(port, hello, token="") == grpc.StatusCode.PERMISSION_DENIED
        assert call_attend(port, hello, token=SECRET) == grpc.StatusCode.FAILED_PRECONDITION

        with monkeypatch.context() as patch:
            patch.setattr("convoy.launch.link.versions", lambda: {"convoy-train": "0.0.1"})
            outcome = convoy("join", address, "--token-file", good)
        assert_refused(outcome, 2, r"runs Convoy 0\.0\.1", "the lead")

        config = Config(**read_toml(team.out / "config.toml"))
        own_data = load_data(config, untracked).digest
        own_model = model_digest(build((1, 28, 28), 2))
        for data, model, words in (
            ("other", own_model, "its data is not the run's data"),
            (own_data, "other", "its model is not the run's model"),
        ):
            link = Link(address, SECRET)
            link.join("stranger", -1)
            with pytest.raises(RefusedError, match=words) as caught:
                link.prepared(data, model, "cpu", 1)
            assert caught.value.exit_code == 2
            link.close()

        assert_only_loopback(team)
        make_noise(port)

        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        write_data(seed=2)
        outcome = convoy("join", address, "--token-file", good, "--name=else")
        assert_refused(outcome, 2, "belongs to another run", "'data' differs")

        refusals = [r["reason"] for r in team.events("warning")]
        assert sum("refused" in reason for reason in refusals) >= 3, refusals
        assert not any(SECRET in reason for reason in refusals)
        end_politely(team)


def test_a_node_from_elsewhere_joins_over_tls_and_the_run_stays_exact(
    convoy: Convoy, tmp_path: Path
) -> None:
    address, token = f"127.0.0.1:{(port := free_port())}", token_file()
    pinned = tmp_path / "certificate.pem"
    other = read_or_make_tls(new_folder(tmp_path / "other"), "127.0.0.1").path
    network = (f"--token-file={token}", f"--port={port}", "--tls")
    with Team("lead", *network, pace_s=0.2, nodes=2, epochs=EPOCHS) as team, ExitStack() as stack:
        team.wait_for_steps(1)
        assert f"join at {address}, with --certificate and a copy of {pinned}" in told(team)
        join = ("join", address, f"--token-file={token}", "--name=far")
        far = start_program(*join, f"--certificate={pinned}", pace_s=0.2)
        stack.callback(far.communicate)
        stack.callback(far.kill)
        team.wait_for_group(0, 1, 2)

        assert_refused(convoy(*join), 2, "uses TLS", "--certificate")
        assert_refused(convoy(*join, f"--certificate={other}"), 2, "another certificate")
        wrong = ("--token-file", token_file("f" * 32, "wrong"), "--certificate", pinned)
        assert_refused(convoy("join", address, *wrong), 2, "not the run's token")

        errors = team.hurry()
        assert SECRET not in errors
        assert "andshake" not in errors  # of whom it turned away, gRPC need not tell
        assert far.wait(20) == 0
        team.assert_no_orphans()
        team.assert_exact(EPOCHS)
        assert team.group() == [0, 1, 2]
        assert [r for r in team.events("leave") if r["fault"]] == []


def new_folder(path: Path) -> Path:
    path.mkdir()
    return path


def told(team: Team) -> str:
    return "\n".join(record["text"] for record in team.events("note"))


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_certificate_that_cannot_be_read_is_refused(convoy: Convoy, name: str) -> None:
    options = ("--token-file", token_file(), "--certificate", name)
    assert_refused(convoy("join", "127.0.0.1:1", *options), 2, "certificate cannot be read", name)


def test_files_that_are_not_the_leads_are_refused(convoy: Convoy) -> None:
    Path("key.pem").write_text("of my web server")
    outcome = convoy("lead", "--token-file", token_file(), "--tls")
    assert_refused(outcome, 2, "not one that a lead made", "key.pem", "Move it away")
    assert Path("key.pem").read_text() == "of my web server"
    assert not Path("runs").exists()


def make_noise(port: int) -> None:
    with ExitStack() as stack:
        for _ in range(20):  # who never say anything
            stack.enter_context(closing(socket.create_connection(("127.0.0.1", port))))
        for _ in range(20):
            with closing(socket.create_connection(("127.0.0.1", port))) as noisy:
                noisy.sendall(os.urandom(4096))
        # Even a node that knows the token may say nothing that is understood.
        version = versions()["convoy-train"]
        hello = wire.FromNode(hello=wire.Hello(version=version, name="x", pid=1, slot=-1))
        nonsense = (wire.FromNode(), wire.FromNode(event="nonsense"), wire.FromNode(event="[]"))
        call_unfinished(port, hello, *nonsense)


def call_unfinished(port: int, *messages: wire.FromNode) -> None:
    with closing(grpc.insecure_channel(f"127.0.0.1:{port}")) as channel:
        attend = channel.stream_stream(
            "/convoy.Lead/Attend",
            request_serializer=wire.FromNode.SerializeToString,
            response_deserializer=wire.FromLead.FromString,
        )
        list(attend(iter(messages), metadata=((TOKEN_KEY, SECRET),), timeout=10))


def assert_only_loopback(team: Team) -> None:
    """Check every port that a process of the run listens on."""
    listening = [
        (process.pid, connection.laddr.ip)
        for process in (psutil.Process(team.lead.pid), *team.family())
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or connection.type == socket.SOCK_DGRAM
    ]
    assert {team.lead.pid, team.pid(0), team.pid(1)} <= {pid for pid, _ in listening}
    addresses = [ipaddress.ip_address(ip.removeprefix("::ffff:")) for _, ip in listening]
    assert all(address.is_loopback for address in addresses), listening


@pytest.mark.parametrize(
    "address", ["nowhere", "127.0.0.1", ":29600", "host:port", "host:0", "a:70000"]
)
def test_an_address_that_is_none_is_refused(convoy: Convoy, address: str) -> None:
    outcome = convoy("join", address, "--token-file", token_file())
    assert_refused(outcome, 2, r"not HOST:PORT", re.escape(repr(address)))


@pytest.mark.parametrize("command", ["join", "lead"])
@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (SECRET, 0o640, "others may read.*chmod 600"),
        (SECRET, 0o604, "others may read"),
        ("short", 0o600, "holds no token.*at least 16"),
        ("not a token at all, but words", 0o600, "holds no token"),
        ("", 0o600, "holds no token"),
    ],
)
def test_a_bad_token_file_is_refused(
    convoy: Convoy, command: str, text: str, mode: int, words: str
) -> None:
    path = token_file(text, mode=mode)
    target = ["127.0.0.1:1"] if command == "join" else []
    assert_refused(convoy(command, *target, "--token-file", path), 2, words)
    assert not Path("runs").exists()


def test_a_token_file_that_cannot_be_read_is_refused(convoy: Convoy, tmp_path: Path) -> None:
    join = ("join", "127.0.0.1:1", "--token-file")
    assert_refused(convoy(*join, "missing"), 2, "token file cannot be read.*No such file")
    assert_refused(convoy(*join, tmp_path), 2, "token file cannot be read.*directory")
    binary = Path("binary")
    binary.write_bytes(b"\xff\xfe" * 20)
    binary.chmod(0o600)
    assert_refused(convoy(*join, binary), 2, "token file cannot be read")
    assert_refused(convoy("join", "127.0.0.1:1"), 2, "token-file")
    assert_refused(
        convoy("lead", "--token-file", "no/such/folder"), 2, "token file cannot be written"
    )


def test_a_lead_makes_a_token_that_only_its_owner_reads(convoy: Convoy) -> None:
    path = Path("made")
    token = read_or_make_token(path)
    assert len(token) == 64
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token(path) == read_or_make_token(path) == token


def test_a_port_in_use_is_refused(convoy: Convoy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        options = ("--nodes=1", "--precision=fp32", "--memory-format=contiguous", "--out=run")
        outcome = convoy("lead", "--token-file", token_file(), f"--port={port}", *options)
    assert_refused(outcome, 3, "cannot listen there", str(port), "Give another --port")


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("0.0.0.0", "one address, not on all"),
        ("192.0.2.7", "private network only.*--trusted-network"),
        ("192.0.2.7 --tls", "even where the lead uses TLS.*private network only"),
        ("no.such.host.invalid", "not known"),
    ],
)
def test_a_lead_leaves_loopback_only_when_told_to(convoy: Convoy, host: str, words: str) -> None:
    outcome = convoy("lead", "--token-file", token_file(), "--host", *host.split())
    assert_refused(outcome, 2, words)
    assert not Path("certificate.pem").exists()


def test_a_lead_that_is_not_there_is_tried_for_a_while(convoy: Convoy) -> None:
    address = f"127.0.0.1:{free_port()}"
    started = time.monotonic()
    outcome = convoy("join", address, "--token-file", token_file(), "--reconnect-s=2")
    assert_refused(outcome, 3, "gave up after 2 s", "cannot be reached", re.escape(address))
    assert 2 <= time.monotonic() - started < 15


def test_a_link_tells_that_the_lead_is_gone() -> None:
    link = Link(f"127.0.0.1:{free_port()}", SECRET)
    with pytest.raises(ConvoyError, match="cannot be reached") as caught:
        link.join("x", -1)
    assert caught.value.exit_code == 3
    link.close()
