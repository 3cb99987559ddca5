"""Sums over real processes: up to eight of them, on one host and on several."""

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from convoy.bench.peers import ddp
from convoy.bench.peers.crew import Crew, Link
from convoy.collectives.allreduce import AllReduce
from convoy.collectives.cost import Choice, Method, bounds_by_weight
from convoy.collectives.exchange import Exchange
from convoy.collectives.hearth import block_bytes
from convoy.collectives.schedule import butterfly_size, even_bounds
from convoy.collectives.wires import PeerLostError, ProcessGroupWires
from convoy.errors import ConfigError
from convoy.memory.shared import SharedVector
from tests.collectives.post import Post, Wires, play

PATIENCE_S = 120.0
RANKS = 8
KINDS = (torch.float32, torch.float64, torch.bfloat16)
LONG = 10_000_000
VECTORS = [
    *product((0, 1, 1000), [torch.float32]),
    *product((5, 70_001), KINDS),
    *product([LONG], KINDS),
]
METHODS = (Method.DOUBLING, Method.HALVING, Method.RING, Method.TREE)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Make sure that no block of shared memory outlives a test."""
    before = blocks()
    yield
    deadline = time.monotonic() + 5.0  # others may be at work on this machine
    while blocks() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert blocks() <= before


def blocks() -> set[str]:
    """Return the blocks that are as long as ours."""
    lengths = {block_bytes(size) for size in range(2, RANKS + 1)}
    found = set()
    for path in Path("/dev/shm").glob("convoy-*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if path.stat().st_size in lengths:
                found.add(path.name)
    return found


def ask(entry: Callable[..., None], size: int, *arguments: Any) -> list[Any]:
    """Start processes, and return what each has found."""
    with (
        ddp.open_store() as address,
        Crew(entry, [(rank, size, address, *arguments) for rank in range(size)]) as crew,
    ):
        found = crew.receive(PATIENCE_S)
        crew.send(None)
        return found


# ---------------------------------------------------------------- equal to torch's all-reduce


def test_every_way_equals_torchs_all_reduce_for_one_to_eight_ranks() -> None:
    found = ask(_compare_all, RANKS)
    assert [trouble for troubles, _ in found for trouble in troubles] == []
    digests = found[0][1]
    assert len(digests) == 8 * 8 * 9 + len(_LONG_ONES) * len(KINDS)
    for _, others in found[1:]:  # who is in fewer groups has fewer
        assert others.items() <= digests.items(), "not the same bits on all ranks"


def _compare_all(link: Link, rank: int, size: int, address: str) -> None:
    with ddp.group(address, rank, size):
        troubles: list[str] = []
        digests: dict[tuple[Any, ...], str] = {}
        for count in range(1, size + 1):
            group = dist.new_group(list(range(count)))
            if rank >= count:
                continue
            ways = _ways(ProcessGroupWires(group, PATIENCE_S), rank, count)
            for length, dtype in VECTORS:
                names = [name for name in ways if length < LONG or (count, name) in _LONG_ONES]
                if not names:
                    continue
                generator = torch.Generator().manual_seed(rank)
                mine = torch.rand(length, generator=generator).to(dtype)
                theirs = mine.clone()
                dist.all_reduce(theirs, group=group)
                for name in names:
                    ours = mine.clone()
                    ways[name](ours)
                    task = (count, name, length, str(dtype))
                    digests[task] = _digest(ours)
                    if not _is_close(ours, theirs):
                        troubles.append(f"{task} is not torch's sum on rank {rank}")
        link.send((troubles, digests))
        link.receive()


def _digest(vector: Tensor) -> str:
    return hashlib.sha256(vector.view(torch.uint8).numpy().tobytes()).hexdigest()


def _is_close(ours: Tensor, theirs: Tensor) -> bool:
    loose = {torch.bfloat16: 0.05, torch.float32: 1e-5}.get(ours.dtype, 1e-12)
    return torch.allclose(ours, theirs, rtol=loose, atol=loose)


_LONG_ONES = {(2, "one host"), (3, "two hosts"), (4, "halving"), (3, "unequal parts")}


def _ways(wires: ProcessGroupWires, rank: int, size: int) -> dict[str, Callable[[Tensor], None]]:
    exchange = Exchange(wires)
    weights = [1.0 + place**2 for place in range(butterfly_size(size))]
    ways: dict[str, Callable[[Tensor], None]] = {
        "one host": AllReduce(wires, rank, size).sum,
        "two hosts": AllReduce(wires, rank, size, host=f"host {rank * 2 // size}").sum,
        "no memory": AllReduce(wires, rank, size, host=f"host {rank}").sum,
        "unequal parts": lambda vector: exchange.run(
            Choice(
                Method.HALVING,
                tuple(reversed(range(size))),
                bounds_by_weight(vector.numel(), weights),
                0.0,
                "",
            ).schedule(rank),
            vector,
        ),
    }
    for method in METHODS:
        ways[method] = lambda vector, method=method: exchange.run(  # type: ignore[misc]
            _even(method, size, vector.numel()).schedule(rank), vector
        )
    return ways


def _even(method: Method, size: int, length: int) -> Choice:
    parts = {Method.HALVING: butterfly_size(size), Method.RING: size}.get(method, 1)
    return Choice(method, tuple(range(size)), even_bounds(length, parts), 0.0, "")


# ---------------------------------------------------------------- overlap, mixing, odd tensors


def test_sums_overlap_with_computing_and_tensors_mix() -> None:
    for hosts in (["a"] * 4, ["a", "a", "b", "b"], ["a", "b", "c", "d"]):
        found = ask(_do_much, 4, hosts)
        assert found == [found[0]] * 4
        in_order, after, scalars = found[0]
        assert in_order == [4 * turn + 6.0 for turn in range(20)]
        assert after == 10.0
        assert scalars == [10.0, 10.0, 12.0]


def _do_much(link: Link, rank: int, size: int, address: str, hosts: list[str]) -> None:
    with ddp.group(address, rank, size):
        sums = AllReduce(ProcessGroupWires(), rank, size, host=hosts[rank])
        tensors = [torch.full((500 * turn + 1,), float(rank + turn)) for turn in range(20)]
        begun = [sums.start(tensor) for tensor in tensors]
        after = torch.tensor([rank + 1.0])
        sums.sum(after)  # in its turn
        for each in begun:
            each.wait()
        # A scalar, a tensor whose numbers do not lie in a row, and one that gradients flow to.
        scalar = torch.tensor(rank + 1.0)
        columns = torch.full((3, 4), rank + 1.0).t()
        weights = torch.full((2,), 3.0, requires_grad=True)
        for tensor in (scalar, columns, weights):
            sums.sum(tensor)
        # B4: gradients 1, 2, 3, 6.
        weight = torch.zeros(1)
        for step, right in enumerate(_B4):
            sums.mix(weight.sub_((1, 2, 3, 6)[rank]), step)
            assert weight.item() == right[rank]
        assert all(bool((tensor == tensor[0]).all()) for tensor in tensors)
        scalars = [scalar.item(), columns[2, 1].item(), weights[1].item()]
        link.send(([tensor[0].item() for tensor in tensors], after.item(), scalars))
        link.receive()
        sums.close()


_B4 = ((-1.5, -1.5, -4.5, -4.5), (-5, -7, -5, -7), (-7.5, -7.5, -10.5, -10.5), (-11, -13, -11, -13))


def test_hosts_are_found_and_the_choice_has_a_reason() -> None:
    found = ask(_look, 3)
    assert found == [found[0]] * 3
    hosts, reason, nothing = found[0]
    assert hosts == ((0, 2), (1,))
    assert "should take" in reason
    assert nothing is None


def _look(link: Link, rank: int, size: int, address: str) -> None:
    with ddp.group(address, rank, size):
        apart = AllReduce(ProcessGroupWires(), rank, size, host="ab"[rank % 2])
        chosen = apart.choice(1000, 4)
        together = AllReduce(ProcessGroupWires(), rank, size)
        nothing = together.choice(1000, 4)
        link.send((apart.hosts, chosen.reason if chosen is not None else "", nothing))
        link.receive()


# ---------------------------------------------------------------- in threads


def test_a_rank_that_cannot_open_the_memory_is_a_host_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SharedVector, "open", lambda *_: None)
    post = Post()

    def part(rank: int) -> tuple[Any, float]:
        sums = AllReduce(Wires(post, rank), rank, 3)
        vector = torch.tensor([rank + 1.0])
        sums.sum(vector)
        sums.close()
        return sums.hosts, vector.item()

    assert play(3, part) == [(((0,), (1,), (2,)), 6.0)] * 3


def test_no_sum_after_an_error_or_the_end() -> None:
    sums = AllReduce(Wires(Post(patience_s=0.01), 0), 0, 2)
    with pytest.raises(PeerLostError, match="rank 1 is silent"):
        sums.sum(torch.zeros(1))
    with pytest.raises(PeerLostError, match="earlier sum"):
        sums.start(torch.zeros(1)).wait()
    sums.close()


def test_mixing_needs_a_power_of_two() -> None:
    with pytest.raises(ConfigError, match="butterfly mixing; got 6; allowed: 1, 2, 4"):
        AllReduce(Wires(Post(), 0), 0, 6).mix(torch.zeros(1), 0)


def test_one_rank_alone_keeps_what_it_has() -> None:
    sums = AllReduce(Wires(Post(), 0), 0, 1)
    vector = torch.arange(4.0)
    sums.sum(vector)
    sums.mix(vector, 3)
    assert vector.tolist() == [0, 1, 2, 3]
    sums.start(vector).wait()
    sums.close()
    with pytest.raises(PeerLostError, match="the sums were closed"):
        sums.start(vector).wait()
    sums.close()


# ---------------------------------------------------------------- a rank is killed


@pytest.mark.parametrize(
    ("hosts", "size"),
    [("aaaa", 4), ("abcd", 4), ("aabb", 4)],
    ids=["in shared memory", "over wires", "both"],
)
def test_a_killed_rank_is_told_to_all_others_in_time(hosts: str, size: int) -> None:
    deadline_s = 2.0
    with ddp.open_store() as address:
        given = [(rank, size, address, hosts[rank], deadline_s) for rank in range(size)]
        with Crew(_sum_until_it_fails, given) as crew:
            crew.receive(PATIENCE_S)
            crew.send("go")
            time.sleep(0.3)  # in the midst of sums
            os.kill(crew.pids[3], signal.SIGKILL)
            killed = time.monotonic()
            heard = [crew._lines[rank].recv() for rank in range(size - 1)]
            took_s = time.monotonic() - killed
            assert took_s < 2 * deadline_s + 2
            for is_well, (kind, words, done) in heard:
                assert is_well
                assert kind == "PeerLostError"
                assert "rank" in words
                assert done > 0
            if hosts == "aaaa":
                assert all("rank 3 of this machine is gone" in h[1][1] for h in heard)
                assert took_s < 1
            crew.send(None)


def _sum_until_it_fails(
    link: Link, rank: int, size: int, address: str, host: str, deadline_s: float
) -> None:
    with ddp.group(address, rank, size):
        wires = ProcessGroupWires(deadline_s=deadline_s)
        sums = AllReduce(wires, rank, size, host=host, deadline_s=deadline_s)
        sums.meet()
        link.send("ready")
        link.receive()
        done = 0
        try:
            while True:
                sums.sum(torch.ones(300_000))
                done += 1
        except PeerLostError as error:
            link.send((type(error).__name__, str(error), done))
        link.receive()
        sums.close()
