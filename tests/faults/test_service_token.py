"""Who knows which token may say what to the parameter service; and nothing said is unpickled."""

import hashlib
import io
import json
import logging
import pickle  # noqa: TID251 - to show that what is sent would do harm if it were unpickled
import sys
import threading
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import safetensors.torch
import torch
from google.protobuf.descriptor import FieldDescriptor

from convoy.errors import ConvoyError, StorageError
from convoy.launch import door
from convoy.launch.parameters import messages_pb2 as wire
from convoy.launch.parameters import shell
from convoy.launch.parameters.exchange import Exchange, Service
from convoy.launch.parameters.keeper import Keeper
from convoy.launch.parameters.process import ServiceProcess
from convoy.launch.parameters.record import Record, read_record
from convoy.launch.parameters.vectors import checksum
from convoy.launch.token import make_token
from convoy.outer.crew import Serving
from tests.faults.history import History
from tests.faults.light import (
    LEAD_TOKEN,
    MODEL,
    NODE_TOKEN,
    RUN,
    SIZE,
    Bench,
    Child,
    Client,
    running,
)
from tests.faults.raw import Caller, Speaker, digest, frame, mark, speaking
from tests.launch.test_service import CountingWire

LEADS = ("Admit", "Remove", "Open", "Status", "Weights")
METHODS = ("Exchange", *LEADS, "Unknown")
OLD = make_token()  # as an earlier run had it
NO_TOKENS = [None, "", OLD, NODE_TOKEN[:-1], NODE_TOKEN + "0", NODE_TOKEN.upper(), "f" * 64]


# ---------------------------------------------------------------- 31: tokens


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counting = CountingWire(wire)
    monkeypatch.setattr(shell, "wire", counting)
    return counting.decoded


def message_for(method: str) -> bytes:
    """Return a message that a method would take."""
    known: dict[str, Any] = {
        "Exchange": wire.Up(push=wire.Push(run=RUN)),
        "Admit": wire.Admission(node=1),
    }
    data: bytes = known.get(method, wire.Ask(epoch=1)).SerializeToString()
    return data


@contextmanager
def going_on(data: bytes) -> Iterator[Iterator[bytes]]:
    """Give a message, after which the caller says nothing and does not hang up."""
    over = threading.Event()

    def speak() -> Iterator[bytes]:
        yield data
        over.wait(5)

    yield speak()
    over.set()


@pytest.mark.parametrize("method", METHODS)
def test_without_the_token_a_call_ends_before_anything_is_decoded(
    decoded: Counter[str], method: str
) -> None:
    with Bench() as bench, Caller(bench.address) as caller:
        before = digest(bench)
        decoded.clear()
        for token in NO_TOKENS:
            with going_on(message_for(method)) as frames:
                outcome = caller.call(frames, method=method, token=token)
            assert outcome.took_s <= 1
            missing = token is None
            expected = "unauthenticated" if missing else "permission_denied"
            assert outcome.code.name.lower() == expected
        assert caller.ended == {"unauthenticated": 1, "permission_denied": len(NO_TOKENS) - 1}
        assert decoded == {}
        assert digest(bench) == before
        assert decoded.keys() == {"Ask"}  # of the digest: those with the token are decoded


def test_the_token_of_a_node_is_not_enough_for_what_a_lead_says_nor_the_other_way_round(
    decoded: Counter[str],
) -> None:
    with Bench() as bench, Caller(bench.address) as caller:
        decoded.clear()
        for method in LEADS:
            outcome = caller.call(message_for(method), method=method, token=NODE_TOKEN)
            assert outcome.code is grpc.StatusCode.PERMISSION_DENIED, method
        outcome = caller.call(message_for("Exchange"), token=LEAD_TOKEN)
        assert outcome.code is grpc.StatusCode.PERMISSION_DENIED
        assert decoded == {}
        assert caller.ended == {"permission_denied": len(LEADS) + 1}
        for method in LEADS:
            outcome = caller.call(message_for(method), method=method, token=LEAD_TOKEN)
            assert outcome.is_fine, method
        assert decoded == {"Ask": 3, "Admission": 2}


@pytest.mark.parametrize("verdict", [True, False])
def test_a_comparison_in_constant_time_decides_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, verdict: bool
) -> None:
    with Bench() as bench, Caller(bench.address) as caller:
        asked: list[tuple[bytes, bytes]] = []

        def compare(given: bytes, expected: bytes) -> bool:
            asked.append((given, expected))
            return verdict

        monkeypatch.setattr(door, "hmac", SimpleNamespace(compare_digest=compare))
        for token in (OLD, NODE_TOKEN):
            outcome = caller.call(message_for("Exchange"), token=token)
            is_in = outcome.code is grpc.StatusCode.INVALID_ARGUMENT  # an empty header
            assert is_in == verdict
        outcome = caller.call(message_for("Status"), method="Status", token=OLD)
        assert outcome.is_fine == verdict
        node, lead = NODE_TOKEN.encode(), LEAD_TOKEN.encode()
        assert asked == [(OLD.encode(), node), (node, node), (OLD.encode(), lead)]


def test_no_token_is_in_any_log_error_or_file(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    history, said = History(SIZE), []
    with Child(40, history) as child, Bench(40) as bench:
        for lead in (child, bench):
            clients = [Client(lead, History(SIZE), node) for node in range(2)]
            with running(clients):
                for client in clients:
                    client.join(30)
            with Caller(lead.address) as caller:
                for token in (*NO_TOKENS, NODE_TOKEN):
                    for method in METHODS:
                        outcome = caller.call(b"\xff", method=method, token=token)
                        said.append(f"{outcome.details} {outcome.answers}")
                assert caller.ended.total() == len(METHODS) * (len(NO_TOKENS) + 1)
            said += refused_exchange(lead.address)
        said.append(json.dumps(bench.standing()))
        said.append(repr(Service(bench.address, NODE_TOKEN, RUN)))
        said += [repr(child._process._order), repr(Serving(token=NODE_TOKEN))]
    said += [caplog.text, *capfd.readouterr()]
    files = [path for path in Path().rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"record.jsonl", "state-a"}
    said += [path.read_bytes().decode(errors="replace") for path in files]
    for token in (NODE_TOKEN, LEAD_TOKEN, OLD):
        assert not any(token in text for text in said)


def carry_on() -> None:
    """See no reason to stop asking."""


def refused_exchange(address: str) -> list[str]:
    """Return what a node says whose token is not right."""
    service = Service(address, OLD, RUN)
    exchange = Exchange(
        service, 0, "x", model=MODEL, size=SIZE, dtype=torch.float32, coding="full", check=carry_on
    )
    with closing(exchange), pytest.raises(ConvoyError, match="refused this node") as caught:
        exchange.pull()
    return [str(caught.value), repr(caught.value)]


# ---------------------------------------------------------------- 32: pickle

FOUND: list[object] = []  # what unpicklers of this process have looked up
_IS_WATCHED = threading.Event()


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "pickle.find_class" and _IS_WATCHED.is_set():
        FOUND.append(arguments)


sys.addaudithook(_note)


class Canary:
    """Bytes that make a file where they are unpickled."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "canary"
        self.data = f"cposix\nsystem\n(S'touch {self.path}'\ntR.".encode()
        self.text = self.data.decode()


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Canary]:
    made = Canary(tmp_path)
    FOUND.clear()
    _IS_WATCHED.set()
    yield made
    _IS_WATCHED.clear()
    assert FOUND == []
    assert not made.path.exists()


def test_the_canary_would_sing(tmp_path: Path) -> None:
    canary = Canary(tmp_path)
    FOUND.clear()
    _IS_WATCHED.set()
    pickle.loads(canary.data)
    _IS_WATCHED.clear()
    assert canary.path.exists()
    assert FOUND == [("posix", "system")]


def fields_of_text() -> set[tuple[str, str]]:
    """Return every field of every message that holds text or bytes."""
    kinds = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    return {
        (name, field.name)
        for name, message in wire.DESCRIPTOR.message_types_by_name.items()
        for field in message.fields
        if field.type in kinds
    }


def test_no_field_of_any_message_is_unpickled(canary: Canary) -> None:
    sent = {*to_the_service(canary), *to_its_clients(canary)}
    assert sent == fields_of_text()


def to_the_service(canary: Canary) -> Iterator[tuple[str, str]]:
    """Say everything that a node and a lead can say, with a canary in it."""
    with Bench() as bench, Caller(bench.address) as caller:
        bench.admit(0, canary.text)
        bench.admit(1, "right")
        for name in ("run", "incarnation", "model", "coding", "shared"):
            speaker = Speaker(bench, caller, 2, name="right")
            caller.call(speaker.submission(mark(1), **{name: canary.text}))
            caller.call(frame(speaker.header(node=0, **{name: canary.text})))
            yield "Push", name
        with speaking(bench, caller, 3) as speaker:
            data = canary.data.ljust(4 * SIZE, b"\0")
            frames = speaker.submission(mark(1), checksum=checksum(memoryview(data)))
            outcome = caller.call([frames[0], wire.Up(data=data).SerializeToString()])
            assert outcome.is_fine
            caller.call(canary.data)
            yield "Up", "data"
        for method in LEADS:
            caller.call(canary.data, method=method, token=LEAD_TOKEN)
        bench.remove(0, canary.text)
        assert canary.text in [line.get("incarnation") for line in read_record(bench.record)]
        assert caller.ended.total() >= 18
        yield "Admission", "incarnation"


def to_its_clients(canary: Canary) -> Iterator[tuple[str, str]]:
    """Answer real clients as no service does."""
    for name in ("order", "refused", "coding", "shared"):
        told = wire.Told(version=1)
        setattr(told, name, canary.text)
        assert ask(wire.Down(told=told)) == 1
        yield "Told", name
    told = wire.Told(coding="full", length=4 * SIZE)
    data = canary.data.ljust(4 * SIZE, b"\0")
    told.checksum = checksum(memoryview(data))
    assert ask(wire.Down(told=told), wire.Down(data=data)) == 1
    yield "Down", "data"
    with served([wire.Standing(values=canary.text)]) as (address, asked):
        process = object.__new__(ServiceProcess)
        process._order = SimpleNamespace(tokens=("", LEAD_TOKEN))  # type: ignore[assignment]
        with (
            closing(grpc.insecure_channel(address)) as process._channel,
            pytest.raises(ValueError, match="Expecting value"),
        ):
            process.standing()
        assert asked["calls"] == 1
    yield "Standing", "values"


@contextmanager
def served(answers: list[Any]) -> Iterator[tuple[str, Counter[str]]]:
    """Serve answers that are always the same; count who asked."""
    asked: Counter[str] = Counter()

    def answer(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        asked["calls"] += 1
        next(messages)
        if asked["calls"] > 1:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "once is enough")
        yield from (message.SerializeToString() for message in answers)

    handler = grpc.stream_stream_rpc_method_handler(answer)
    server = grpc.server(ThreadPoolExecutor(2))
    methods = dict.fromkeys(METHODS, handler)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("convoy.Parameters", methods)]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}", asked
    finally:
        server.stop(None).wait()


def ask(*answers: wire.Down) -> int:
    """Let a real client be answered, whatever it makes of it; return how often it was."""
    with served(list(answers)) as (address, asked):
        exchange = Exchange(
            Service(address, NODE_TOKEN, RUN),
            0,
            "x",
            model=MODEL,
            size=SIZE,
            dtype=torch.float32,
            coding="full",
            check=carry_on,
        )
        with closing(exchange), suppress(ConvoyError, ValueError):  # also when it asks again
            exchange.pull()
        return min(asked["calls"], 1)


def zipped(data: bytes) -> bytes:
    """Return what torch itself would write and read."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def test_no_state_on_disk_is_unpickled(canary: Canary) -> None:
    tensors, folder = {"weights": torch.zeros(3)}, Path("service")
    blocks = {
        "bare": canary.data,
        "zipped": zipped(canary.data),
        "as header": len(canary.data).to_bytes(8, "little") + canary.data,
        "as values": safetensors.torch.save(tensors, {"convoy": canary.text}),
        "as other values": safetensors.torch.save(tensors, {canary.text: canary.text}),
    }
    for name, block in blocks.items():
        for seal in (b"", hashlib.blake2b(block, digest_size=32).digest()):
            folder.mkdir(exist_ok=True)
            (folder / "state-a").write_bytes(seal + block)
            keeper = Keeper(folder)
            assert (keeper.newest, keeper.damaged) == (None, ["state-a"]), name


def test_a_service_that_goes_on_from_a_state_and_a_record_with_a_canary_runs_nothing(
    canary: Canary,
) -> None:
    with Child(50, History(SIZE), durability="journal") as child, Caller(child.address) as caller:
        with speaking(child, caller, name=canary.text) as speaker:
            assert speaker.submit(mark(1)).is_fine
            child.kill()
            assert child.standing()["version"] == 2
            speaker.pull()
            assert speaker.submit(mark(2)).is_fine
        files = [Path("record.jsonl"), *Path("service").glob("state-*")]
        in_json = json.dumps(canary.text)[1:-1].encode()
        assert len(files) == 3
        assert in_json in files[0].read_bytes()
        assert any(b"touch" in path.read_bytes() for path in files[1:])
        story = child.story()
        assert [applied.incarnation for applied in story.applied] == [canary.text] * 2


def test_a_record_with_a_canary_in_every_field_is_read_and_not_run(canary: Canary) -> None:
    path = Path("record.jsonl")
    with Record(path) as record:
        for kind in ("start", "admit", "pull", "submit", "saved", "end", canary.text):
            record.write(kind, **dict.fromkeys(("node", "incarnation", "now"), canary.text))
    lines = list(read_record(path))
    assert len(lines) == 7
    assert all(line["incarnation"] == canary.text for line in lines)
    path.write_bytes(canary.data + b"\n")
    with pytest.raises(StorageError, match="damaged"):
        list(read_record(path))
