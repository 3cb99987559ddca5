"""Sums through shared memory: threads play the ranks of a host."""

import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from convoy.collectives import hearth as hearths
from convoy.collectives import rendezvous as meetings
from convoy.collectives.hearth import Hearth, block_bytes, chunk_bytes
from convoy.collectives.rendezvous import MOST_RANKS, PAGE_BYTES, Rendezvous
from convoy.collectives.wires import PeerLostError
from tests.collectives.post import play


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vectors of some hundred numbers have many chunks."""
    monkeypatch.setattr(hearths, "chunk_bytes", lambda size: 64)
    monkeypatch.setattr(hearths, "_SHORT_BYTES", 128)


def open_hearths(
    size: int, *, deadline_s: float = 10.0, is_broken: Callable[[], bool] = lambda: False
) -> list[Hearth]:
    block = torch.zeros(block_bytes(size), dtype=torch.uint8)
    ranks = [10 + place for place in range(size)]
    made = [
        Hearth(block, size, place, Rendezvous(block, place, ranks, deadline_s, is_broken))
        for place in range(size)
    ]
    for hearth in made:
        hearth.watch()
    return made


def leave(opened: list[Hearth]) -> None:
    for hearth in opened:
        hearth.leave()


def mine(rank: int, length: int, turn: int = 0) -> Tensor:
    return torch.rand(length, generator=torch.Generator().manual_seed(100 * turn + rank))


def in_order(vectors: list[Tensor]) -> Tensor:
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    return total


def do_all(opened: list[Hearth], lengths: list[int]) -> list[list[Tensor]]:
    """Let all ranks do sums, means and spreads of these lengths, one after the other."""
    size = len(opened)

    def part(rank: int) -> list[Tensor]:
        found = []
        for turn, length in enumerate(lengths):
            vector = mine(rank, length, turn)
            if turn % 3 == 1:
                opened[rank].spread(vector, source=turn % size)
            elif turn % 3 == 2 and size % 2 == 0:
                opened[rank].mix(vector, rank ^ 1)
            else:
                opened[rank].sum(vector)
            found.append(vector)
        return found

    found: list[list[Tensor]] = play(size, part)
    return found


def expected(size: int, length: int, turn: int) -> list[Tensor]:
    vectors = [mine(rank, length, turn) for rank in range(size)]
    if turn % 3 == 1:
        return [vectors[turn % size]] * size
    if turn % 3 == 2 and size % 2 == 0:
        return [(vectors[rank] + vectors[rank ^ 1]) / 2 for rank in range(size)]
    return [in_order(vectors)] * size


@pytest.mark.usefixtures("small_chunks")
@settings(max_examples=25)
@given(size=some.integers(2, 5), lengths=some.lists(some.integers(0, 300), max_size=8))
def test_whatever_follows_what_all_get_the_right_bits(size: int, lengths: list[int]) -> None:
    opened = open_hearths(size)
    found = do_all(opened, lengths)
    leave(opened)
    for turn, length in enumerate(lengths):
        for vectors, right in zip(found, expected(size, length, turn), strict=True):
            assert torch.equal(vectors[turn], right)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_long_and_short_vectors_of_all_kinds(size: int) -> None:
    opened = open_hearths(size)
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.int64)

    def part(rank: int) -> list[bool]:
        found = []
        for dtype in kinds:
            for length in (1, 1000, 100_000, 700_001):
                vector = torch.full((length,), rank + 1, dtype=dtype)
                opened[rank].sum(vector)
                found.append(bool((vector == size * (size + 1) // 2).all()))
        return found

    assert all(all(found) for found in play(size, part))
    leave(opened)


def test_the_memory_is_bounded_and_the_page_has_room() -> None:
    assert all(block_bytes(size) <= PAGE_BYTES + (32 << 20) for size in range(2, MOST_RANKS + 1))
    assert all(chunk_bytes(size) % PAGE_BYTES == 0 for size in range(2, MOST_RANKS + 1))
    assert 8 * (meetings._BELL + 1) <= PAGE_BYTES


# ---------------------------------------------------------------- waiting


def test_ranks_that_come_late_are_slept_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = meetings._system_call

    def counted(*arguments: Any) -> Any:
        calls.append(arguments[2])
        return real(*arguments)

    monkeypatch.setattr(meetings, "_system_call", counted)
    opened = open_hearths(2)

    def part(rank: int) -> float:
        if rank:
            time.sleep(0.12)  # longer than two naps
        started = time.thread_time()
        opened[rank].sum(torch.zeros(10))
        return time.thread_time() - started

    used_s = play(2, part)
    assert calls.count(meetings._FUTEX_WAIT) >= 2
    assert calls.count(meetings._FUTEX_WAKE) >= 1
    assert used_s[0] < 0.05
    leave(opened)


def test_a_sleeper_wakes_at_once() -> None:
    opened = open_hearths(2)
    woken: list[float] = []

    def sleep() -> None:
        opened[0].sum(torch.zeros(10))
        woken.append(time.monotonic())

    late_s = []
    for _ in range(5):
        thread = threading.Thread(target=sleep)
        thread.start()
        time.sleep(0.02)  # it sleeps by now
        opened[1].sum(torch.zeros(10))
        came = time.monotonic()
        thread.join()
        late_s.append(woken[-1] - came)
    assert min(late_s) < meetings._NAP_S / 2
    leave(opened)


def test_a_rank_that_does_not_come_is_named() -> None:
    opened = open_hearths(3, deadline_s=0.2)
    with pytest.raises(PeerLostError, match=r"ranks 11, 12 did not come to a sum within 0\.2 s"):
        opened[0].sum(torch.zeros(10))
    leave(opened)


def test_a_rank_that_has_left_is_named_at_once() -> None:
    opened = open_hearths(3, deadline_s=30.0)
    threading.Timer(0.1, opened[2].leave).start()
    started = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 12 of this machine is gone"):
        opened[0].sum(torch.zeros(10))
    assert time.monotonic() - started < 5
    leave(opened[:2])


def test_who_leaves_after_its_part_is_not_missed() -> None:
    opened = open_hearths(2)

    def part(rank: int) -> float:
        vector = torch.full((10,), float(rank + 1))
        time.sleep(0.08 * (1 - rank))
        opened[rank].sum(vector)
        opened[rank].leave()
        return float(vector[0])

    assert play(2, part) == [3.0, 3.0]


def test_another_thread_can_end_all_waiting() -> None:
    broken = threading.Event()
    opened = open_hearths(2, deadline_s=30.0, is_broken=broken.is_set)
    threading.Timer(0.1, broken.set).start()
    started = time.monotonic()
    with pytest.raises(PeerLostError, match="broken up"):
        opened[0].sum(torch.zeros(10))
    assert time.monotonic() - started < 5
    leave(opened)


def test_a_process_that_is_gone_before_it_is_watched_is_named() -> None:
    block = torch.zeros(block_bytes(2), dtype=torch.uint8)
    both = [Rendezvous(block, place, [4, 7], 1.0, lambda: False) for place in range(2)]
    with subprocess.Popen(["true"]) as child:
        pass  # it has ended by now
    both[1]._pids[1] = child.pid
    with pytest.raises(PeerLostError, match="rank 7 of this machine is gone"):
        both[0].watch()
