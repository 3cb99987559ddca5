"""Memory that is used again: never while somebody has it, and with the same bits."""

import gc

import pytest
import torch

from convoy.memory.rooms import Rooms


def test_memory_is_used_again_when_nobody_has_it() -> None:
    rooms = Rooms()
    first = rooms.empty(1000, torch.float32)
    place = first.data_ptr()
    part = first[10:20]
    del first
    assert rooms.empty(1000, torch.float32).data_ptr() != place  # a part of it is still there
    del part
    gc.collect()
    places = [rooms.empty(1000, torch.float32) for _ in range(3)]
    assert place in [room.data_ptr() for room in places]
    assert len({room.data_ptr() for room in places}) == 3


def test_rooms_of_other_lengths_are_apart() -> None:
    rooms = Rooms()
    assert rooms.empty(5, torch.float64).shape == (5,)
    assert rooms.empty(10, torch.float32).shape == (10,)
    assert rooms.empty(7, torch.float32).dtype is torch.float32
    assert rooms.empty(0, torch.float32).numel() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 5, 16_384, 300_001, 1 << 20])
@pytest.mark.parametrize("factor", [1.0, 1 / 3, 0.0, -0.7])
def test_a_sum_has_the_bits_of_plain_arithmetic(
    size: int, factor: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    vector, other = (torch.randn(size, generator=generator, dtype=dtype) for _ in range(2))
    before = vector.clone(), other.clone()
    total = Rooms().added(vector, other, factor)
    assert torch.equal(total, vector + other * factor)
    assert torch.equal(vector, before[0])
    assert torch.equal(other, before[1])


def test_vectors_are_joined_and_copied() -> None:
    rooms = Rooms()
    first, second = torch.arange(4.0), torch.arange(3.0)
    assert torch.equal(rooms.joined(first, second), torch.cat((first, second)))
    copied = rooms.copy(first)
    assert torch.equal(copied, first)
    assert copied.data_ptr() != first.data_ptr()
