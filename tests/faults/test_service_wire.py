"""Messages to the parameter service that are crafted, damaged, too long, or said before."""

import math
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from convoy.launch.door import TOKEN_KEY
from convoy.launch.parameters import exchange, shell
from convoy.launch.parameters import messages_pb2 as wire
from convoy.launch.parameters.shell import PROTOCOL, ParameterShell
from convoy.launch.parameters.vectors import Arriving, Coding, checksum
from tests.faults.history import History
from tests.faults.light import (
    LEAD_TOKEN,
    LOCAL_BATCH,
    MODEL,
    NODE_TOKEN,
    RUN,
    SIZE,
    Bench,
    Child,
    Client,
    connect,
    find_all_faults,
    running,
)
from tests.faults.raw import (
    Caller,
    Outcome,
    Speaker,
    counted,
    digest,
    frame,
    mark,
    speaking,
)
from tests.launch.test_service import PREFACE

MUTATIONS = 10_000
EXTREMES: list[Any] = [0, 1, -1, 2, 2**31 - 1, -(2**31), 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1]
ODD_FLOATS: list[Any] = [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-310, 1e308]
ODD_TEXTS: list[Any] = [
    "",
    "x",
    "full",
    "bf16",
    "shared",
    "\0",
    "ä" * 40,
    "x" * 100_000,
    "../" * 9,
    "%s%n{}",
]


# ---------------------------------------------------------------- 26: fuzzed frames


class Mutator:
    """Changes valid messages at random.

    Attributes:
        hits: how often each kind of change was made.
    """

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self.hits: Counter[str] = Counter()

    def mutate(self, data: bytes) -> bytes:
        """Return other bytes."""
        kind = self._draw.choice(["flip", "set", "cut", "drop", "insert", "repeat", "bomb"])
        changed = getattr(self, f"_{kind}")(bytearray(data))
        self.hits[kind] += 1
        return bytes(changed)

    def set_field(self, message: Any) -> Any:
        """Return a copy with another value in one of its fields."""
        copy = type(message)()
        copy.CopyFrom(message)
        fields = [f for f in copy.DESCRIPTOR.fields if f.message_type is None]
        field = self._draw.choice(fields)
        odd: dict[int, list[Any]] = {
            field.TYPE_STRING: ODD_TEXTS,
            field.TYPE_DOUBLE: ODD_FLOATS,
        }
        values = odd.get(field.type, EXTREMES)
        while True:
            try:
                setattr(copy, field.name, self._draw.choice(values))
                break
            except (ValueError, TypeError, OverflowError):
                continue  # out of the field's range: another one
        self.hits[f"field {field.name}"] += 1
        return copy

    def pick(self, choices: list[Any]) -> Any:
        return self._draw.choice(choices)

    def _place(self, data: bytearray) -> int:
        return self._draw.randrange(len(data)) if data else 0

    def _flip(self, data: bytearray) -> bytearray:
        for _ in range(self._draw.choice([1, 1, 1, 3, 20])):
            if data:
                data[self._place(data)] ^= 1 << self._draw.randrange(8)
        return data

    def _set(self, data: bytearray) -> bytearray:
        if data:
            data[self._place(data)] = self._draw.choice([0x00, 0x7F, 0x80, 0xFF])
        return data

    def _cut(self, data: bytearray) -> bytearray:
        return data[: self._place(data)]

    def _drop(self, data: bytearray) -> bytearray:
        place = self._place(data)
        return data[:place] + data[place + self._draw.randrange(1, 9) :]

    def _insert(self, data: bytearray) -> bytearray:
        place = self._place(data)
        return data[:place] + self._draw.randbytes(self._draw.randrange(1, 9)) + data[place:]

    def _repeat(self, data: bytearray) -> bytearray:
        place = self._place(data)
        return data[:place] + data[place : place + 40] * 2 + data[place + 40 :]

    def _bomb(self, data: bytearray) -> bytearray:
        """Put in a length that no message can have."""
        place = self._place(data)
        return data[:place] + b"\xff" * 9 + b"\x01" + data[place:]


class Fuzz:
    """Sends mutations of everything that a node and a lead can say."""

    def __init__(self, child: Child, caller: Caller, mutator: Mutator, start: int = 0) -> None:
        self._child, self._caller, self._mutator = child, caller, mutator
        self._starts = start  # the number of its node, too
        self.speaker: Speaker | None = None
        self.unexpected: list[Outcome] = []

    def run(self, count: int) -> None:
        for sent in range(count):
            if sent % 25 == 0:
                self._begin()
            self._note(self._mutator.pick([self._node, self._node, self._data, self._lead])())

    def _begin(self) -> None:
        """Take part anew: what came before may have shut the node out, or moved its numbers."""
        if self.speaker is not None:
            self._child.remove(self.speaker.node, self.speaker.incarnation)
        self._starts += 1
        self.speaker = Speaker(self._child, self._caller, self._starts, name="fuzz")
        self.speaker.pull()

    @property
    def _me(self) -> Speaker:
        assert self.speaker is not None
        return self.speaker

    def _note(self, outcome: Outcome) -> None:
        expected = ("OK", "INVALID_ARGUMENT", "ABORTED", "FAILED_PRECONDITION", "CANCELLED")
        if outcome.code.name not in expected:
            self.unexpected.append(outcome)

    def _push(self) -> wire.Push:
        head, *_ = self._me.submission(mark(7), self._mutator.pick(["full", "bf16"]))
        push: wire.Push = wire.Up.FromString(head).push
        return push

    def _node(self) -> Outcome:
        """Begin a call with a header that is not right."""
        mutator = self._mutator
        rests = self._me.header(rests=True)
        push = mutator.pick([self._push(), self._me.header(last=self._me.number), rests])
        if mutator.pick([True, False]):
            return self._caller.call(mutator.mutate(frame(push)))
        if push.HasField("trained") and mutator.pick([True, False]):
            push.trained.CopyFrom(mutator.set_field(push.trained))
            data = wire.Up(data=bytes(push.length)).SerializeToString()
            push.checksum = checksum(memoryview(bytes(push.length)))
            return self._caller.call([frame(push), data])
        return self._caller.call(frame(mutator.set_field(push)))

    def _data(self) -> Outcome:
        """Hand in something that is not right after its header."""
        head, data = self._me.submission(mark(9), self._mutator.pick(["full", "bf16"]))
        frames = [head, self._mutator.mutate(data)]
        return self._caller.call(self._mutator.pick([frames, [frames[1], head]]))

    def _lead(self) -> Outcome:
        """Say what only a lead may say, about nodes that there are not."""
        admission = wire.Admission(node=77, incarnation="a-start", speed=50.0)
        method, message = self._mutator.pick(
            [
                ("Admit", admission),
                ("Remove", admission),
                ("Status", wire.Ask(epoch=3)),
                ("Weights", wire.Ask(epoch=3)),
                ("Open", wire.Ask(epoch=3)),
            ]
        )
        if self._mutator.pick([True, False]):
            message = self._mutator.set_field(message)
        data = self._mutator.mutate(message.SerializeToString())
        return self._caller.call(data, method=method, token=LEAD_TOKEN)


def called_off(standing: dict[str, Any]) -> int:
    """Return how many calls the service says that it has ended, whatever the answers said."""
    answered = ("not finite", "far too long", "a report without sense")
    refused: dict[str, int] = standing["refused"]
    return counted(standing) - sum(refused.get(reason, 0) for reason in answered)


def test_ten_thousand_fuzzed_messages_are_refused_counted_and_leave_the_service_alive() -> None:
    seed = random.SystemRandom().randrange(10_000)
    print(f"seed {seed}")
    mutator, history = Mutator(seed), History(SIZE)
    with Child(50_000, history) as child, Caller(child.address) as caller:
        Fuzz(child, caller, mutator).run(500)  # until all its threads are there
        pid, before, before_it = child.pid, child.rss, called_off(child.standing())
        mutator.hits.clear()
        caller.ended.clear()
        fuzz, started = Fuzz(child, caller, mutator, 1000), time.monotonic()
        fuzz.run(MUTATIONS)
        took_s, grown = time.monotonic() - started, child.rss - before
        print(f"{took_s:.1f} s, {grown / 1e6:+.1f} MB, {dict(caller.ended)}, {dict(mutator.hits)}")
        assert mutator.hits.total() >= MUTATIONS
        assert min(mutator.hits.values()) > 0
        assert fuzz.unexpected[:5] == []
        refused = caller.ended.total() - caller.ended["ok"]
        assert refused > MUTATIONS / 4
        assert called_off(child.standing()) - before_it == refused
        assert (child.pid, child.died) == (pid, {})
        assert grown <= 20e6
        assert took_s < 120  # nothing was waited for
        assert bool(torch.isfinite(child.weights()[1]).all())
        with speaking(child, caller, 5) as speaker:
            assert speaker.submit(mark(5)).told.refused == ""


# ---------------------------------------------------------------- 27: length bombs


def peak_kb(pid: int) -> int:
    """Return how much memory a process has had at most, in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


class Endless:
    """Frames of which there is no end.

    Attributes:
        sent: how many of the wrong ones were taken from it.
    """

    def __init__(self, right: list[bytes], wrong: bytes, *, pause_s: float = 0.0) -> None:
        self._right, self._wrong, self._pause_s = right, wrong, pause_s
        self.sent = 0

    def __iter__(self) -> Iterator[bytes]:
        yield from self._right
        while True:
            self.sent += 1
            yield self._wrong
            time.sleep(self._pause_s)


def piece(size: int) -> bytes:
    data: bytes = wire.Up(data=bytes(size)).SerializeToString()
    return data


Bomb = Callable[[Speaker], "bytes | list[bytes] | Endless"]


def announced(length: int, **changes: Any) -> Bomb:
    """Return a bomb that announces some length, and never stops to send."""

    def make(speaker: Speaker) -> Endless:
        head, _ = speaker.submission(mark(1), **{"length": length, **changes})
        return Endless([head], piece(1000), pause_s=0.001)

    return make


def followed_by(wrong: bytes, *, whole: bool = True) -> Bomb:
    """Return a bomb that begins as is right, and goes on for ever."""
    return lambda s: Endless(s.submission(mark(1))[: 2 if whole else 1], wrong, pause_s=0.001)


BOMBS: dict[str, Bomb] = {
    "2^63": announced(2**63),
    "2^64 - 1": announced(2**64 - 1),
    "4 GiB": announced(2**32),
    "nothing": announced(0),
    "one more": announced(4 * SIZE + 1),
    "one less": announced(4 * SIZE - 1),
    "one more, rounded": announced(2 * SIZE + 1, coding="bf16"),
    "a length and nothing handed in": announced(2**40, number=0),
    "a length in shared memory": announced(2**40, coding="shared"),
    "a length inside the message": lambda s: b"\x12" + b"\xff" * 8 + b"\x7f" + bytes(100),
    "a piece too many": lambda s: [*s.submission(mark(1)), piece(1)],
    "a piece that is too long": lambda s: [s.submission(mark(1))[0], piece(4 * SIZE + 1)],
    "small pieces for ever": followed_by(piece(1000), whole=False),
    "more pieces for ever": followed_by(piece(1000)),
    "empty pieces for ever": followed_by(piece(0), whole=False),
    "empty pieces for ever after the end": followed_by(piece(0)),
    "headers for ever": followed_by(frame(wire.Push(run=RUN)), whole=False),
}


def test_length_bombs_are_refused_at_once_and_nothing_is_set_aside_for_them() -> None:
    with (
        Child(500, History(SIZE)) as child,
        Caller(child.address) as caller,
        speaking(child, caller) as speaker,
    ):
        for bomb in BOMBS.values():  # until all its threads are there
            caller.call(bomb(speaker), limit_s=2)
        counted_before, before = counted(child.standing()), child.rss
        forget_peak(child.pid)
        tried, slow = 0, {}
        for name, bomb in BOMBS.items():
            outcomes = [caller.call(bomb(speaker), limit_s=2) for _ in range(3)]
            tried += len(outcomes)
            assert not any(outcome.is_fine for outcome in outcomes), name
            best = min(outcome.took_s for outcome in outcomes)  # the machine is shared
            if best > 0.1:
                slow[name] = outcomes
        grown_kb = peak_kb(child.pid) - before // 1024
        print(f"{tried} bombs, {grown_kb:+} KiB at most, {dict(caller.ended)}")
        assert slow == {}
        assert tried == 3 * len(BOMBS)
        assert counted(child.standing()) - counted_before == tried
        assert grown_kb <= 1000
        assert speaker.submit(mark(2)).told.refused == ""


def test_no_room_is_made_for_a_vector_of_a_wrong_length(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make(size: int, *arguments: Any) -> Arriving:
        made.append(size)
        return Arriving(size, *arguments)

    monkeypatch.setattr(shell, "Arriving", make)
    lengths = [2**63, 2**64 - 1, 2**32, 0, 4 * SIZE + 1, 4 * SIZE - 1]
    with Bench() as bench, Caller(bench.address) as caller, speaking(bench, caller) as speaker:
        for length in lengths:
            outcome = caller.call(speaker.submission(mark(1), length=length))
            assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
            assert f"it has {length} bytes where {4 * SIZE} are right" in outcome.details
        assert made == []
        assert bench.standing()["refused"] == {"invalid_argument": len(lengths)}
        assert speaker.submit(mark(1)).told.refused == ""
        assert made == [SIZE]


def http2(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    """Return a frame of HTTP/2."""
    head = struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream)
    return head + content


def headers() -> bytes:
    """Return what begins a call, in the plainest form that HTTP/2 has for it."""
    pairs = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/convoy.Parameters/Exchange",
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
        TOKEN_KEY: NODE_TOKEN,
    }
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in pairs.items()
    )


def wait_for(one: socket.socket, words: bytes, limit_s: float) -> float:
    """Return how long it takes until some words have come."""
    started, heard = time.monotonic(), b""
    one.settimeout(limit_s)
    while words not in heard:
        got = one.recv(4096)
        assert got, "it was closed"
        heard += got
    return time.monotonic() - started


LONG = [2**32 - 1, 2**31, (4 << 20) + 1]


def begin_long_message(address: str, length: int) -> socket.socket:
    """Begin a message that says how long it is, and is not."""
    one = connect(address)
    one.sendall(PREFACE + http2(1, 4, 1, headers()))
    one.sendall(http2(0, 0, 1, b"\0" + struct.pack(">I", length) + bytes(100)))
    return one


def test_a_message_that_says_it_is_gigabytes_long_takes_no_memory() -> None:
    with Child(10, History(10)) as child:
        for attempt in range(3):
            if attempt == 1:  # the first ones are for its threads to be there
                before = child.rss
                forget_peak(child.pid)
            for length in LONG:
                with closing(begin_long_message(child.address, length)) as one:
                    wait_for(one, b"larger than max", 2)  # gRPC lets those wait for up to 1 s
        grown_kb = peak_kb(child.pid) - before // 1024
        print(f"{grown_kb:+} KiB")
        assert grown_kb <= 1000
        assert child.standing()["version"] == 1


@pytest.mark.parametrize("length", LONG)
def test_a_message_that_says_it_is_gigabytes_long_ends_its_call_at_once(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_s: list[float] = []
    first = ParameterShell._first

    def watched(shell: ParameterShell, messages: Iterator[wire.Up]) -> wire.Push:
        started = time.monotonic()
        try:
            return first(shell, messages)
        finally:
            held_s.append(time.monotonic() - started)

    monkeypatch.setattr(ParameterShell, "_first", watched)
    with Bench() as bench:
        for _ in range(3):
            with closing(begin_long_message(bench.address, length)) as one:
                wait_for(one, b"larger than max", 2)
        assert len(held_s) == 3
        assert min(held_s) <= 0.1  # the machine is shared


# ---------------------------------------------------------------- 28: wrong tensors


def test_vectors_that_do_not_fit_are_refused_and_the_weights_stay_as_they_are() -> None:
    with (
        Bench() as bench,
        Caller(bench.address) as caller,
        speaking(bench, caller) as speaker,
        speaking(bench, caller, 1) as other,
    ):
        assert speaker.submit(mark(1)).told.refused == ""
        foreign = wire.Up.FromString(other.submission(mark(3), "shared")[0]).push.shared
        other.submit(mark(3), "shared")
        right = mark(2)
        wrong = {
            "a number less": speaker.submission(right[:-1]),
            "a number more": speaker.submission(torch.cat([right, right[:1]])),
            "float64": speaker.submission(right.double()),
            "float16": speaker.submission(right.half()),
            "bytes": speaker.submission(right.byte()),
            "rounded, said to be full": speaker.submission(right, "bf16", coding="full"),
            "full, said to be rounded": speaker.submission(right, coding="bf16"),
            "another model": speaker.submission(right, model="another"),
            "no model": speaker.submission(right, model=""),
            "no coding": speaker.submission(right, coding=""),
            "an unknown coding": speaker.submission(right, coding="int8"),
            "nearly a coding": speaker.submission(right, coding="FULL"),
            "another checksum": speaker.submission(right, checksum=1),
            "other bytes": [speaker.submission(right)[0], piece(4 * SIZE)],
            "no bytes": speaker.submission(right)[:1],
            "no shared memory": speaker.submission(right, "shared", shared=""),
            "unknown shared memory": speaker.submission(
                right, "shared", shared="convoy-" + "0" * 32
            ),
            "shared memory elsewhere": speaker.submission(right, "shared", shared="/etc/passwd"),
            "another's shared memory": speaker.submission(right, "shared", shared=foreign),
        }
        before = digest(bench)
        for name, frames in wrong.items():
            outcome = caller.call(frames)
            assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT, (name, outcome)
            assert digest(bench) == before, name
        assert bench.standing()["refused"] == {"invalid_argument": len(wrong)}
        assert speaker.submit(right).told.refused == ""
        assert digest(bench) != before


# ---------------------------------------------------------------- 29: nonsense in the numbers

NONSENSE = {
    "nan": (mark(11, math.nan), "not finite"),
    "inf": (mark(11, math.inf), "not finite"),
    "-inf": (mark(11, -math.inf), "not finite"),
    "all nan": (torch.full((SIZE,), math.nan), "not finite"),
    "long": (mark(11, 1e6), "far too long"),
    "largest": (torch.full((SIZE,), torch.finfo(torch.float32).max), None),
}


@pytest.mark.parametrize("coding", ["full", "bf16", "shared"])
def test_nonsense_is_refused_always_and_its_node_is_shut_out_after_three(coding: Coding) -> None:
    with (
        Bench(nodes=8) as bench,
        Caller(bench.address) as caller,
        speaking(bench, caller, 7, name="honest") as honest,
    ):
        for place in range(5):
            assert honest.submit(mark(place), coding).told.refused == ""
        before, injected = digest(bench), 0
        for node, (vector, problem) in enumerate(NONSENSE.values()):
            with speaking(bench, caller, node) as bad:
                for _ in range(3):
                    told = bad.submit(vector, coding).told
                    injected += 1
                    assert told.refused in (
                        [problem] if problem else ["not finite", "far too long"]
                    )
                outcome = bad.submit(mark(20), coding)
                assert outcome.code is grpc.StatusCode.PERMISSION_DENIED
                assert "nonsense too often" in outcome.details
                again = Speaker(bench, caller, node, name="born again")
                shut = caller.call(frame(again.header()))
                assert shut.code is grpc.StatusCode.PERMISSION_DENIED
        refused = bench.standing()["refused"]
        assert injected == 3 * len(NONSENSE)
        assert refused["not finite"] + refused["far too long"] == injected
        assert refused["permission_denied"] == 2 * len(NONSENSE)
        assert digest(bench) == before
        assert honest.submit(mark(30), coding).told.refused == ""
        assert bool(torch.isfinite(bench.weights()[1]).all())
        assert bench.standing()["totals"]["submissions"] == 6


# ---------------------------------------------------------------- 30: said before


class Tap:
    """Notes the frames of every call that real clients make."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[list[bytes]] = []
        send = exchange._messages

        def note(push: wire.Push, block: memoryview) -> Iterator[wire.Up]:
            messages = list(send(push, block))
            self.calls.append([message.SerializeToString() for message in messages])
            yield from messages

        monkeypatch.setattr(exchange, "_messages", note)


def test_what_real_nodes_have_said_changes_nothing_when_it_is_said_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tap, history = Tap(monkeypatch), History(SIZE)
    codings: list[Coding] = ["full", "bf16", "shared", "full"]
    with Bench(60) as bench, Caller(bench.address) as caller:
        clients = [Client(bench, history, n, coding=c) for n, c in enumerate(codings)]
        with running(clients):
            for client in clients:
                client.join(30)
        before, calls = digest(bench), list(tap.calls)
        assert sum(wire.Up.FromString(call[0]).push.number > 0 for call in calls) == 60
        random.Random(1).shuffle(calls)
        for call in calls:
            caller.call(call)
            assert digest(bench) == before
        assert caller.ended.total() == len(calls)
        assert caller.ended.keys() <= {"ok", "aborted", "cancelled"}
        assert bench.standing()["totals"]["submissions"] == 60
        assert find_all_faults(bench, history, bench.samples) == []
        assert bench.rule.find_faults() == []


@pytest.mark.parametrize("coding", ["full", "bf16", "shared"])
def test_a_submission_is_taken_in_once_by_whatever_name_it_comes_back(coding: Coding) -> None:
    with Bench() as bench, Caller(bench.address) as caller, speaking(bench, caller) as speaker:
        captured = []
        for place in range(10):
            captured.append(speaker.submission(mark(place), coding))
            told = caller.call(captured[-1]).told
            speaker.number, speaker.base = told.number, told.version
        before = digest(bench)
        for number, frames in enumerate(captured, start=1):
            replayed = anew(frames, turn=speaker.turn + number)
            code = caller.call(replayed).code
            expected = grpc.StatusCode.OK if number == 10 else grpc.StatusCode.ABORTED
            assert code is expected, number
        assert bench.standing()["totals"]["duplicates"] == 1
        assert digest(bench) == before

        bench.admit(0, "the next start")
        new = caller.call(frame(speaker.header(incarnation="the next start"))).told
        assert new.version == 11
        for frames in captured:
            assert caller.call(frames).code is grpc.StatusCode.FAILED_PRECONDITION
        if coding != "shared":  # whose memory vanished with its start
            for frames in captured:
                stolen = anew(frames, incarnation="the next start")
                assert caller.call(stolen).code is grpc.StatusCode.ABORTED
        bench.remove(0, "the next start")
        for frames in captured:
            assert caller.call(frames).code is grpc.StatusCode.FAILED_PRECONDITION
        assert caller.ended["failed_precondition"] == 20
        assert caller.ended["aborted"] == (9 if coding == "shared" else 19)
        assert digest(bench) == before
        assert bench.standing()["totals"]["submissions"] == 10


def anew(frames: list[bytes], **changes: Any) -> list[bytes]:
    """Return a captured call with another header."""
    up = wire.Up.FromString(frames[0])
    for name, value in changes.items():
        setattr(up.push, name, value)
    return [up.SerializeToString(), *frames[1:]]


def test_another_protocol_run_or_model_is_refused_and_both_are_named() -> None:
    skews: list[tuple[dict[str, Any], str, str]] = [
        *(({"protocol": n}, f"protocol {n}", f"the service {PROTOCOL}") for n in (0, 1, 3, -1)),
        ({"run": "other-run"}, "'other-run'", f"'{RUN}'"),
        ({"run": ""}, "''", f"'{RUN}'"),
        ({"model": "other-model"}, "other-model", MODEL),
    ]
    with Bench() as bench, Caller(bench.address) as caller, speaking(bench, caller) as speaker:
        before = digest(bench)
        for changes, theirs, ours in skews:
            for frames in (
                speaker.submission(mark(1), **changes),
                [frame(speaker.header(**changes))],
            ):
                outcome = caller.call(frames)
                assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
                assert theirs in outcome.details
                assert ours in outcome.details
        assert bench.standing()["refused"] == {"invalid_argument": 2 * len(skews)}
        assert digest(bench) == before
        assert LOCAL_BATCH * bench.standing()["totals"]["submissions"] == 0


def test_a_name_of_any_length_is_refused_in_a_few_words() -> None:
    with Bench() as bench, Caller(bench.address) as caller, speaking(bench, caller) as speaker:
        outcome = caller.call(frame(speaker.header(incarnation="x" * 1_000_000)))
        assert outcome.code is grpc.StatusCode.FAILED_PRECONDITION
        assert len(outcome.details) < 200
        for name in ("run", "model"):
            outcome = caller.call(frame(speaker.header(**{name: "ä" * 1_000_000})))
            assert outcome.code is grpc.StatusCode.INVALID_ARGUMENT
            assert len(outcome.details) < 300
