"""Vectors as bytes on a wire: in chunks, checked, in full or rounded to bf16."""

import zlib
from typing import Literal

import torch
from torch import Tensor

from convoy.errors import ConvoyError

Coding = Literal["full", "bf16", "shared"]


class DamagedError(ConvoyError):
    """What arrived is not what was sent."""


def encoded(vector: Tensor, coding: Coding) -> memoryview:
    """Return a vector as bytes."""
    if coding == "bf16":
        vector = vector.to(torch.bfloat16).view(torch.int16)
    return _bytes_of(vector.contiguous())


def encoded_bytes(size: int, dtype: torch.dtype, coding: Coding) -> int:
    """Return how many bytes a vector of some size takes."""
    return size * (torch.bfloat16.itemsize if coding == "bf16" else dtype.itemsize)


def checksum(block: memoryview) -> int:
    """Return a checksum that tells whether bytes have changed on the way."""
    return zlib.crc32(block)


class Arriving:
    """A vector that arrives piece by piece, into memory that was set aside for it."""

    def __init__(self, size: int, dtype: torch.dtype, coding: Coding) -> None:
        self._stored = torch.empty(size, dtype=torch.int16 if coding == "bf16" else dtype)
        self._dtype, self._coding = dtype, coding
        self._room = _bytes_of(self._stored)
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


def _bytes_of(vector: Tensor) -> memoryview:
    """Return the memory of a vector as bytes."""
    return memoryview(vector.numpy().view("uint8"))  # type: ignore[arg-type]
