"""Schedules acted out: in chunks, over messages, with the sums and counts of the formulas."""

from math import log2

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from convoy.collectives.cost import Choice, Method
from convoy.collectives.exchange import Exchange
from convoy.collectives.schedule import butterfly_size, even_bounds
from convoy.collectives.wires import PeerLostError
from tests.collectives.post import Post, Wires, play

METHODS = (Method.DOUBLING, Method.HALVING, Method.RING, Method.TREE)


def choice(method: Method, size: int, length: int) -> Choice:
    parts = {Method.HALVING: butterfly_size(size), Method.RING: size}.get(method, 1)
    return Choice(method, tuple(range(size)), even_bounds(length, parts), 0.0, "")


def mine(rank: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(length, generator=torch.Generator().manual_seed(rank)).to(dtype)


def sums(chosen: Choice, post: Post, chunk_bytes: int = 16, turns: int = 1) -> list[Tensor]:
    """Return what each rank ends with."""
    size, length = len(chosen.order), chosen.bounds[-1]

    def part(rank: int) -> Tensor:
        exchange = Exchange(Wires(post, rank), chunk_bytes)
        for _ in range(turns):
            vector = mine(rank, length)
            exchange.run(chosen.schedule(rank), vector)
        return vector

    found: list[Tensor] = play(size, part)
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", range(1, 9))
def test_every_method_adds_up_in_chunks(method: Method, size: int) -> None:
    for length in (0, 1, 5, 67):
        found = sums(choice(method, size, length), Post(), turns=2)
        expected = torch.stack([mine(rank, length) for rank in range(size)]).sum(0)
        torch.testing.assert_close(found[0], expected)
        assert all(torch.equal(vector, found[0]) for vector in found)


@settings(max_examples=30)
@given(data=some.data(), size=some.integers(2, 6), chunk_bytes=some.integers(4, 40))
def test_parts_and_chunks_of_any_size(data: some.DataObject, size: int, chunk_bytes: int) -> None:
    parts = butterfly_size(size)
    lengths = data.draw(some.lists(some.integers(0, 20), min_size=parts, max_size=parts))
    bounds = tuple(sum(lengths[:count]) for count in range(parts + 1))
    order = tuple(data.draw(some.permutations(range(size))))
    found = sums(Choice(Method.HALVING, order, bounds, 0.0, ""), Post(), chunk_bytes)
    expected = torch.stack([mine(rank, bounds[-1]) for rank in range(size)]).sum(0)
    torch.testing.assert_close(found[0], expected)
    assert all(torch.equal(vector, found[0]) for vector in found)


def test_chunks_change_no_bit() -> None:
    for method in METHODS:
        whole = sums(choice(method, 5, 100), Post(), chunk_bytes=1 << 20)
        assert torch.equal(sums(choice(method, 5, 100), Post(), chunk_bytes=12)[0], whole[0])


@pytest.mark.parametrize("size", [2, 4, 8])
def test_messages_and_bytes_on_the_wires_are_those_of_the_formulas(size: int) -> None:
    length, rounds = 16 * size, int(log2(size))
    counts = {
        Method.DOUBLING: (rounds, rounds * length),
        Method.HALVING: (2 * rounds, 2 * length * (size - 1) // size),
        Method.RING: (2 * (size - 1), 2 * length * (size - 1) // size),
    }
    for method, (messages, numbers) in counts.items():
        post = Post()
        sums(choice(method, size, length), post, chunk_bytes=1 << 20)
        assert set(post.messages.values()) == {messages}
        assert set(post.bytes.values()) == {4 * numbers}


def test_any_kind_of_number_may_follow() -> None:
    post = Post()
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.int64)

    def part(rank: int) -> list[float]:
        exchange = Exchange(Wires(post, rank), 24)
        found = []
        for length, dtype in zip((3, 40, 9, 17), kinds, strict=True):
            vector = torch.full((length,), rank + 1, dtype=dtype)
            exchange.run(choice(Method.DOUBLING, 3, length).schedule(rank), vector)
            found.append(float(vector.sum() / length))
        return found

    assert play(3, part) == [[6.0] * 4] * 3


def test_the_error_of_the_wires_is_passed_on() -> None:
    exchange = Exchange(Wires(Post(patience_s=0.01), 0))
    with pytest.raises(PeerLostError, match="rank 1 is silent"):
        exchange.run(choice(Method.RING, 2, 10).schedule(0), torch.zeros(10))
