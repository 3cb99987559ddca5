"""Vectors as bytes on a wire: in chunks, checked, in full or rounded to bf16."""

import zlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from convoy.errors import ConvoyError
from convoy.launch.service import CHUNK_BYTES

Coding = Literal["full", "bf16", "shared"]


class DamagedError(ConvoyError):
    """What arrived is not what was sent."""


def encoded(vector: Tensor, coding: Coding) -> memoryview:
    """Return a vector as bytes."""
    if coding == "bf16":
        vector = vector.to(torch.bfloat16).view(torch.int16)
    return memoryview(vector.contiguous().numpy()).cast("B")


def encoded_bytes(size: int, dtype: torch.dtype, coding: Coding) -> int:
    """Return how many bytes a vector of some size takes."""
    return size * (torch.bfloat16.itemsize if coding == "bf16" else dtype.itemsize)


def checksum(block: memoryview) -> int:
    """Return a checksum that tells whether bytes have changed on the way."""
    return zlib.crc32(block)


def chunks(block: memoryview) -> Iterator[bytes]:
    """Cut bytes into pieces of the size that travels best."""
    for start in range(0, len(block), CHUNK_BYTES):
        yield bytes(block[start : start + CHUNK_BYTES])


class Arriving:
    """A vector that arrives piece by piece, into memory that was set aside for it."""

    def __init__(self, size: int, dtype: torch.dtype, coding: Coding) -> None:
        self._stored = torch.empty(size, dtype=torch.int16 if coding == "bf16" else dtype)
        self._dtype, self._coding = dtype, coding
        self._room = memoryview(self._stored.numpy()).cast("B")
        self._filled = 0

    def add(self, piece: bytes) -> None:
        """Take in the next piece."""
        end = self._filled + len(piece)
        if end > len(self._room):
            raise DamagedError("more arrived than was announced")
        self._room[self._filled : end] = piece
        self._filled = end

    def vector(self, expected_checksum: int) -> Tensor:
        """Return the vector, once it is complete."""
        if self._filled != len(self._room):
            raise DamagedError("less arrived than was announced")
        if checksum(self._room) != expected_checksum:
            raise DamagedError("it was damaged on the way")
        if self._coding == "bf16":
            return self._stored.view(torch.bfloat16).to(self._dtype)
        return self._stored
