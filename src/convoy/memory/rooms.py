"""Memory for long vectors that is used again.

A fresh tensor of 128 MB costs 60 ms before a number is in it: the system hands its pages out one
by one, and zeroes each. Adding two such vectors takes 20 ms. So whoever makes long vectors again
and again takes the memory from here; it comes back by itself when nobody has the tensor any more,
and is kept for the next.
"""

import contextlib
import mmap
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_BLOCK = 1 << 18  # numbers that fit into a core's cache, three times
_SMALL = 1 << 14  # numbers for which Python takes longer than the arithmetic


class Rooms:
    """Gives room for vectors.

    Args:
        make: returns new memory of so many bytes.
    """

    def __init__(self, make: Callable[[int], mmap.mmap] | None = None) -> None:
        self._make = make or plain_memory
        self._free: dict[int, deque[mmap.mmap]] = {}

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return a vector with nothing sensible in it."""
        length = size * dtype.itemsize
        if length == 0:
            return torch.empty(size, dtype=dtype)
        free = self._free.setdefault(length, deque())
        try:
            memory = free.pop()
        except IndexError:
            memory = self._make(length)
        # The tensor, and all views of it, hold the array; its end is theirs.
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, free.append, memory).atexit = False
        return torch.from_numpy(array).view(dtype)

    def copy(self, vector: Tensor) -> Tensor:
        """Return a copy of a vector."""
        return self.empty(vector.numel(), vector.dtype).copy_(vector)

    def joined(self, *parts: Tensor) -> Tensor:
        """Return vectors one after another."""
        whole = self.empty(sum(part.numel() for part in parts), parts[0].dtype)
        return torch.cat(parts, out=whole)

    def added(self, vector: Tensor, other: Tensor, factor: float) -> Tensor:
        """Return `vector + other * factor`, bit for bit, in one pass over the memory."""
        if vector.device.type != "cpu" or vector.numel() < _SMALL:
            return vector + other * factor
        total = self.empty(vector.numel(), vector.dtype)
        if factor == 1.0:
            return torch.add(vector, other, out=total)
        product = torch.empty(_BLOCK, dtype=vector.dtype)
        parts = zip(*(t.split(_BLOCK) for t in (vector, other, total)), strict=True)
        for first, second, room in parts:
            scaled = torch.mul(second, factor, out=product[: len(second)])
            torch.add(first, scaled, out=room)
        return total


def plain_memory(length: int) -> mmap.mmap:
    """Return new memory of this process."""
    memory = mmap.mmap(-1, length)
    with contextlib.suppress(OSError, AttributeError):  # fewer, larger pages, where there are any
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
