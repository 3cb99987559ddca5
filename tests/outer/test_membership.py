"""Who trains together: one answer of the Lighthouse, read alike by every member."""

import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft.coordination import LighthouseClient

from convoy.outer import membership
from convoy.outer.gloo import connected_sockets, shut_down
from convoy.outer.membership import (
    Formation,
    Group,
    GroupLostError,
    _brief,
    read_quorum,
    start_lighthouse,
)

SOON_S = 5.0  # even on a busy machine; whoever waits in vain does so for 20 s or more


@dataclass
class Participant:
    """What the Lighthouse tells of a node."""

    replica_id: str
    step: int
    data: dict[str, Any]


def participant(number: int, *, position: int = 0, identity: str = "", **about: Any) -> Participant:
    data = {"number": number, "speed": 1.0, "device": "cpu", "layout": "contiguous", "attempt": 1}
    return Participant(identity or f"{number:04d}-x", position, {**data, **about})


def read(*participants: Participant, me: int = 0) -> Formation:
    return read_quorum(7, participants, participants[me].replica_id)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.randoms())
def test_every_member_reads_the_same_group_in_the_same_order(
    positions: list[int], draw: Any
) -> None:
    people = [participant(n, position=position) for n, position in enumerate(positions)]
    shuffled = people.copy()
    draw.shuffle(shuffled)
    formations = [read_quorum(7, shuffled, person.replica_id) for person in people]
    assert [formation.rank for formation in formations] == list(range(len(people)))
    first = formations[0]
    assert all(formation.members == first.members for formation in formations)
    assert all(formation.prefix == first.prefix for formation in formations)
    assert [member.number for member in first.members] == list(range(len(people)))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_the_furthest_is_the_source_and_all_others_behind_it_are_given_its_state(
    positions: list[int],
) -> None:
    formation = read(*(participant(n, position=p) for n, p in enumerate(positions)))
    assert formation.size == len(positions)
    assert formation.position == max(positions)
    assert positions[formation.source] == max(positions)
    assert formation.source == positions.index(max(positions))
    assert formation.behind == tuple(
        rank for rank, position in enumerate(positions) if position < max(positions)
    )
    assert formation.source not in formation.behind


def test_no_two_formations_share_a_prefix() -> None:
    base = [participant(0), participant(1)]
    variants = [
        read(*base),
        read_quorum(8, base, "0000-x"),
        read(participant(0, attempt=2), participant(1)),
        read(participant(0, identity="0000-y"), participant(1)),
        read(participant(0)),
        read(participant(0), participant(1), participant(2)),
    ]
    assert len({formation.prefix for formation in variants}) == len(variants)


def test_gradients_travel_by_nccl_only_where_every_member_has_a_gpu_to_itself() -> None:
    def backend(*devices: str) -> str:
        return read(*(participant(n, device=d) for n, d in enumerate(devices))).backend

    assert backend("cuda:0 GPU-a", "cuda:1 GPU-b") == "nccl"
    assert backend("cuda:0 GPU-a", "cuda:0 GPU-b") == "nccl"  # two machines
    assert backend("cuda:0 GPU-a", "cuda:0 GPU-a") == "gloo"  # two nodes on one GPU
    assert backend("cuda:0 GPU-a", "cpu") == "gloo"
    assert backend("cpu", "cpu") == "gloo"
    assert backend("cuda:0 GPU-a") == "gloo"  # alone: nothing travels


def test_the_layout_is_the_same_only_where_it_is_for_all() -> None:
    def same(*layouts: str) -> bool:
        return read(*(participant(n, layout=w) for n, w in enumerate(layouts))).same_layout

    assert same("contiguous", "contiguous")
    assert not same("contiguous", "channels_last", "contiguous")


# -------------------------------------------------------------------- with a real Lighthouse


class Meeting:
    """A Lighthouse and a store, and groups that meet there, each asking in a thread."""

    def __init__(self, stack: ExitStack) -> None:
        self.lighthouse = start_lighthouse("127.0.0.1", 1)
        stack.callback(self.lighthouse.shutdown)
        self._address = f"http://127.0.0.1:{self.lighthouse.address().rsplit(':', 1)[1]}"
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._server = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=10),
            master_listen_fd=listener.detach(),
        )
        self._store = f"127.0.0.1:{port}"
        self._stack = stack

    def show_up_and_die(self, number: int) -> tuple[str, Callable[[], None]]:
        """Be a node that asks to be in the next group but never connects: who, and the asking."""
        identity = f"{number:04d}-{os.urandom(2).hex()}"
        client = LighthouseClient(self._address, timedelta(seconds=5))
        client.heartbeat(identity)
        ask = partial(
            client.quorum,
            replica_id=identity,
            timeout=timedelta(seconds=20),
            address="127.0.0.1",
            store_address=self._store,
            step=0,
            world_size=1,
            shrink_only=False,
            data=participant(number).data,
        )
        return identity, ask

    def group(self, number: int) -> Group:
        group = Group(
            identity=f"{number:04d}-{os.urandom(2).hex()}",
            number=number,
            device="cpu",
            layout="contiguous",
            address="127.0.0.1",
            lighthouse=self._address,
            store=self._store,
            timeout_s=20.0,
        )
        self._stack.callback(group.leave)
        group.show_up()
        return group


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    with ExitStack() as stack:
        yield Meeting(stack)


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Do calls at the same time; return what each returned or raised."""
    results: list[Any] = [None] * len(calls)

    def do(place: int) -> None:
        try:
            results[place] = calls[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=do, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "it hangs"
    return results


def form(*groups: Group) -> list[Formation]:
    formations = at_once(*(lambda g=group: g.form(0, 1.0, 20.0) for group in groups))
    assert all(isinstance(formation, Formation) for formation in formations), formations
    return formations


def test_members_meet_and_add_up(meeting: Meeting) -> None:
    groups = [meeting.group(number) for number in range(3)]
    formations = form(*groups)
    assert [formation.rank for formation in formations] == [0, 1, 2]
    assert len({formation.prefix for formation in formations}) == 1
    tensors = [torch.arange(5.0) + rank for rank in range(3)]
    at_once(*(lambda g=g, t=t: g.sum_around(t) for g, t in zip(groups, tensors, strict=True)))
    for tensor in tensors:
        torch.testing.assert_close(tensor, 3 * torch.arange(5.0) + 3)


@pytest.mark.parametrize("way", ["send", "receive", "sum_around"])
@pytest.mark.parametrize("who", ["own", "peer"])
def test_breaking_a_group_up_ends_all_waiting_at_once(meeting: Meeting, way: str, who: str) -> None:
    """gloo's own abort would let both sides wait on."""
    groups = [meeting.group(number) for number in range(2)]
    form(*groups)
    waiting, other = groups
    tensor = torch.zeros(1_000_000)

    def wait() -> float:
        whom = () if way == "sum_around" else (1,)
        with pytest.raises(GroupLostError):
            getattr(waiting, way)(tensor, *whom)
        return time.monotonic()

    def break_up() -> float:
        time.sleep(0.3)
        (waiting if who == "own" else other).break_up()
        return time.monotonic()

    ended, broken = at_once(wait, break_up)
    assert isinstance(ended, float), ended
    assert isinstance(broken, float), broken
    assert ended - broken < SOON_S
    with pytest.raises(GroupLostError, match="broken up"):
        (waiting if who == "own" else other).sum_around(torch.zeros(1))


def test_only_a_group_with_the_lost_member_is_broken_up(meeting: Meeting) -> None:
    groups = [meeting.group(number) for number in range(2)]
    formations = form(*groups)
    groups[0].break_up(because_of="0009-stranger")
    tensors = [torch.ones(3), torch.ones(3)]
    at_once(*(lambda g=g, t=t: g.sum_around(t) for g, t in zip(groups, tensors, strict=True)))
    assert tensors[0].tolist() == [2, 2, 2]
    groups[0].break_up(because_of=formations[0].members[1].identity)
    with pytest.raises(GroupLostError):
        groups[0].sum_around(torch.ones(3))


@pytest.mark.parametrize("told_s", [0.0, 0.5], ids=["at once", "while connecting"])
def test_who_dies_before_it_has_connected_is_not_waited_for(
    meeting: Meeting, told_s: float
) -> None:
    group = meeting.group(0)
    identity, ask_in_vain = meeting.show_up_and_die(1)

    def ask() -> float:
        with pytest.raises(GroupLostError, match="lost"):
            group.form(0, 1.0, 20.0)
        return time.monotonic()

    def die() -> float:
        ask_in_vain()
        time.sleep(told_s)
        told = time.monotonic()
        group.break_up(because_of=identity)
        return told

    ended, told = at_once(ask, die)
    assert isinstance(ended, float), ended
    assert isinstance(told, float), told
    assert ended - told < SOON_S
    assert form(group)[0].size == 1


def test_news_of_a_loss_that_come_before_the_answer_are_not_forgotten(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_MOURNED_S", 1.0)
    one, two = meeting.group(0), meeting.group(1)
    one.break_up(because_of=two._identity)
    refused, _ = at_once(lambda: one.form(0, 1.0, 20.0), lambda: two.form(0, 1.0, 20.0))
    assert isinstance(refused, GroupLostError)
    time.sleep(1.0)  # it was silent for a while, and is back
    assert [formation.size for formation in form(one, two)] == [2, 2]


@pytest.mark.parametrize(
    ("told", "brief"),
    [
        (
            "[../gloo/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9. This is why. Bye!",
            "Connection closed by peer [127.0.0.1]:9",
        ),
        ("Application timeout.\nmore", "Application timeout"),
        ("", "ValueError"),
    ],
)
def test_engines_are_quoted_briefly(told: str, brief: str) -> None:
    assert _brief(ValueError(told)) == brief


def test_who_falls_silent_is_not_waited_for(meeting: Meeting) -> None:
    groups = [meeting.group(number) for number in range(3)]
    form(*groups)
    groups[1].leave()
    started = time.monotonic()
    formations = form(groups[0], groups[2])
    assert time.monotonic() - started < SOON_S
    assert [member.number for member in formations[0].members] == [0, 2]
    assert formations[0].quorum > 0


def test_one_alone_is_a_group_and_asks_no_longer_than_it_may() -> None:
    with ExitStack() as stack:
        group = Meeting(stack).group(0)
        assert form(group)[0].size == 1
    with ExitStack() as stack:
        meeting = Meeting(stack)
        asking, other = meeting.group(0), meeting.group(1)
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            asking.form(0, 1.0, 1.0)  # the other lives, but does not ask
        assert 0.9 < time.monotonic() - started < 1.0 + SOON_S
        assert other is not None


def test_a_lighthouse_that_is_gone_loses_the_group(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone:
        def quorum(self, **request: object) -> None:
            raise RuntimeError("transport error")  # as torchft tells of it

    group = meeting.group(0)
    monkeypatch.setattr(group, "_client", Gone())
    with pytest.raises(GroupLostError, match=r"nobody can be asked: transport error"):
        group.form(0, 1.0, 5.0)


def test_looking_at_sockets_opens_nothing() -> None:
    # Counted for a socket of the test's own: threads of others open and close theirs meanwhile.
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        closing(socket.create_connection(server.getsockname())) as one,
    ):
        for _ in range(3):
            assert one.fileno() in dict(connected_sockets())
        assert _descriptors_of(one) == 1


def _descriptors_of(wanted: socket.socket) -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            found += os.path.sameopenfile(int(name), wanted.fileno())
    return found


def test_only_the_very_socket_is_shut_down() -> None:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        closing(socket.create_connection(server.getsockname())) as one,
        closing(server.accept()[0]) as two,
    ):
        sockets = dict(connected_sockets())
        assert {one.fileno(), two.fileno()} <= set(sockets)
        assert server.fileno() not in sockets  # it listens
        shut_down(one.fileno(), sockets[one.fileno()] + 1)  # the number is another's now
        one.sendall(b"x")
        assert two.recv(1) == b"x"
        shut_down(one.fileno(), sockets[one.fileno()])
        assert two.recv(1) == b""
        shut_down(10_000, 1)  # one that is not there


def test_positions_and_attempts_are_numbers() -> None:
    formation = read(participant(3, position=4, attempt=9))
    member = formation.members[0]
    assert dataclasses.asdict(member) == {
        "identity": "0003-x",
        "number": 3,
        "position": 4,
        "speed": 1.0,
        "device": "cpu",
        "layout": "contiguous",
        "attempt": 9,
    }
    assert formation.behind == ()
