"""Vectors in shared memory: on one machine only the notice travels, the numbers stay in place.

A node makes a block with room for two vectors, what it hands in and what it is given, and
tells the service its name. Only a block of the same user, of the right size and with a name of
the right form is opened.
"""

import contextlib
import mmap
import os
import re
import secrets
import stat
from pathlib import Path

import torch

_FOLDER = Path("/dev/shm")  # noqa: S108 - where Linux keeps shared memory
_FORM = re.compile(r"convoy-[0-9a-f]{32}")


class SharedVectors:
    """A block of shared memory with room for two vectors.

    Attributes:
        name: by which the other side opens it.
        up, down: what the node hands in, and what it is given.
        bytes_each: of each of them.
    """

    def __init__(self, name: str, handle: int, size: int, dtype: torch.dtype) -> None:
        self.name = name
        length = 2 * size * dtype.itemsize
        self._map = mmap.mmap(handle, length)
        os.close(handle)
        both = torch.frombuffer(self._map, dtype=dtype)
        self.up, self.down = both[:size], both[size:]
        self.bytes_each = size * dtype.itemsize

    @classmethod
    def make(cls, size: int, dtype: torch.dtype) -> "SharedVectors | None":
        """Make a block; None where this machine has no shared memory to give."""
        name = f"convoy-{secrets.token_hex(16)}"
        try:
            handle = os.open(_FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError:
            return None
        try:
            os.posix_fallocate(handle, 0, 2 * size * dtype.itemsize)
        except OSError:  # full: better known now than by a signal in mid-run
            os.close(handle)
            remove(name)
            return None
        return cls(name, handle, size, dtype)

    @classmethod
    def open(cls, name: str, size: int, dtype: torch.dtype) -> "SharedVectors | None":
        """Open a block that somebody else has made; None where it is not what it should be."""
        if not _FORM.fullmatch(name) or size == 0:
            return None
        try:
            handle = os.open(_FOLDER / name, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            return None
        found = os.fstat(handle)
        fits = found.st_size == 2 * size * dtype.itemsize
        if not (stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid() and fits):
            os.close(handle)
            return None
        return cls(name, handle, size, dtype)


def remove(name: str) -> None:
    """Let a block vanish when nobody uses it any more."""
    if _FORM.fullmatch(name):
        with contextlib.suppress(OSError):
            (_FOLDER / name).unlink()
