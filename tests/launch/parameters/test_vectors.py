"""Vectors on the wire: in full to the bit, rounded within a bound, and never damaged."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convoy.launch.parameters.vectors import (
    Arriving,
    Coding,
    DamagedError,
    checksum,
    encoded,
    encoded_bytes,
)

FLOATS = st.lists(st.floats(width=32), max_size=50)


def sent(vector: torch.Tensor, coding: Coding, chunk: int = 7) -> torch.Tensor:
    """Let a vector arrive in pieces."""
    block = encoded(vector, coding)
    assert len(block) == encoded_bytes(len(vector), vector.dtype, coding)
    arriving = Arriving(len(vector), vector.dtype, coding)
    for start in range(0, len(block), chunk):
        arriving.add(bytes(block[start : start + chunk]))
    return arriving.vector(checksum(block))


@given(values=FLOATS, chunk=st.integers(1, 300))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_full_every_bit_arrives(dtype: torch.dtype, values: list[float], chunk: int) -> None:
    vector = torch.tensor(values, dtype=dtype)
    found = sent(vector, "full", chunk)
    assert found.dtype == dtype
    assert found.numpy().tobytes() == vector.numpy().tobytes()


@given(values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=50))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_bf16_a_number_is_off_by_a_256th_at_most(
    dtype: torch.dtype, values: list[float]
) -> None:
    vector = torch.tensor(values, dtype=dtype)
    found = sent(vector, "bf16")
    assert found.dtype == dtype
    tiny = 2.0**-126 * 2.0**-7  # below that, numbers have fewer digits
    assert bool(((found - vector).abs() <= vector.abs() / 256 + tiny).all())
    assert torch.equal(sent(found, "bf16"), found)  # rounded once, it stays


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), -0.0])
@pytest.mark.parametrize("coding", ["full", "bf16"])
def test_special_numbers_arrive(value: float, coding: Coding) -> None:
    found = sent(torch.tensor([value]), coding)
    assert str(found.item()) == str(value)


def test_bf16_takes_half_of_fp32() -> None:
    assert encoded_bytes(1000, torch.float32, "bf16") == 2000
    assert encoded_bytes(1000, torch.float32, "full") == 4000


def test_part_of_a_larger_tensor_travels_alone() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(sent(whole[:, 1], "full"), whole[:, 1])
    assert torch.equal(sent(whole[1], "bf16"), whole[1])


@pytest.mark.parametrize("coding", ["full", "bf16"])
def test_less_and_more_than_was_announced_is_refused(coding: Coding) -> None:
    block = encoded(torch.ones(10), coding)
    arriving = Arriving(10, torch.float32, coding)
    arriving.add(bytes(block[:-1]))
    with pytest.raises(DamagedError, match="less arrived"):
        arriving.vector(checksum(block))
    with pytest.raises(DamagedError, match="more arrived"):
        arriving.add(b"12")
    arriving.add(bytes(block[-1:]))
    assert torch.equal(arriving.vector(checksum(block)), torch.ones(10))


@given(place=st.integers(0, 39), change=st.integers(1, 255))
def test_one_changed_byte_is_noticed(place: int, change: int) -> None:
    block = encoded(torch.ones(10), "full")
    damaged = bytearray(block)
    damaged[place] ^= change
    arriving = Arriving(10, torch.float32, "full")
    arriving.add(bytes(damaged))
    with pytest.raises(DamagedError, match="damaged on the way"):
        arriving.vector(checksum(block))
