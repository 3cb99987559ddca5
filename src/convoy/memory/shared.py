"""Vectors in shared memory: on one machine only the notice travels, the numbers stay in place.

A node makes a block for what it hands in, and tells the service its name. From its call until
the answer the block belongs to the service, which merges straight from it. The answer tells the
name of a block of the service's, in which the new weights are: it is the node's to read until
its next call. A node cannot write to it: what it changes, it changes in a copy of its own.

Only a block of the same user, of the right size and with a name of the right form is opened.
Whoever makes a block removes it, and holds a lock on it as long as it lives: what is left by one
that was killed has no lock, and the next service sweeps it away.
"""

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from convoy.memory.rooms import Rooms, plain_memory

_FOLDER = Path("/dev/shm")  # noqa: S108 - where Linux keeps shared memory
_FORM = re.compile(r"convoy-[0-9a-f]{32}")


class SharedVector:
    """A vector in shared memory.

    Attributes:
        name: by which the other side opens it.
        vector: the numbers.
    """

    def __init__(self, name: str, memory: mmap.mmap, dtype: torch.dtype) -> None:
        self.name = name
        self.vector = torch.frombuffer(memory, dtype=dtype)

    @classmethod
    def make(cls, size: int, dtype: torch.dtype) -> "SharedVector | None":
        """Make a block; None where this machine has no shared memory to give."""
        made = _make(size * dtype.itemsize) if size else None
        return cls(*made, dtype) if made is not None else None

    @classmethod
    def open(cls, name: str, size: int, dtype: torch.dtype) -> "SharedVector | None":
        """Open a block that a node has made; None where it is not what it should be."""
        memory = _open(name, size * dtype.itemsize, mmap.ACCESS_WRITE)
        return cls(name, memory, dtype) if memory is not None else None

    @classmethod
    def look_at(cls, name: str, size: int, dtype: torch.dtype) -> "SharedVector | None":
        """Open a block of the service's to read it; None where it is not what it should be."""
        memory = _open(name, size * dtype.itemsize, mmap.ACCESS_COPY)
        return cls(name, memory, dtype) if memory is not None else None


class SharedRooms(Rooms):
    """Room for the service's own vectors, which nodes of this machine can look at."""

    def __init__(self) -> None:
        super().__init__(self._make_named)
        self._names: dict[int, str] = {}

    def name_of(self, vector: Tensor) -> str | None:
        """Return by which name nodes find a vector; None where it is not in shared memory."""
        return self._names.get(vector.data_ptr())

    def close(self) -> None:
        """Let all of it vanish when nobody uses it any more."""
        for name in self._names.values():
            remove(name)

    def _make_named(self, length: int) -> mmap.mmap:
        made = _make(length)
        if made is None:
            return plain_memory(length)
        name, memory = made
        self._names[np.frombuffer(memory, np.uint8).ctypes.data] = name  # it is never unmapped
        return memory


def sweep() -> None:
    """Let all blocks vanish whose makers were killed."""
    for path in _FOLDER.glob("convoy-*"):
        if not _FORM.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(handle)


def remove(name: str) -> None:
    """Let a block vanish when nobody uses it any more."""
    if _FORM.fullmatch(name):
        with contextlib.suppress(OSError):
            (_FOLDER / name).unlink()


def _make(length: int) -> tuple[str, mmap.mmap] | None:
    name = f"convoy-{secrets.token_hex(16)}"
    try:
        handle = os.open(_FOLDER / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return None
    try:
        # The map holds a copy of the handle, and with it the lock: while its maker lives, nobody
        # sweeps the block away. Who swept it before the lock was there has seen an empty one.
        fcntl.flock(handle, fcntl.LOCK_SH)
        os.posix_fallocate(handle, 0, length)  # full: better known now than by a signal in mid-run
        memory = mmap.mmap(handle, length)
        (_FOLDER / name).stat()
        return name, memory
    except OSError:
        remove(name)
        return None
    finally:
        os.close(handle)


def _open(name: str, length: int, access: int) -> mmap.mmap | None:
    if not _FORM.fullmatch(name) or length == 0:
        return None
    mode = os.O_RDONLY if access == mmap.ACCESS_COPY else os.O_RDWR
    try:
        handle = os.open(_FOLDER / name, mode | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        found = os.fstat(handle)
        is_right = stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()
        if not is_right or found.st_size != length:
            return None
        return mmap.mmap(handle, length, access=access)
    except OSError:
        return None
    finally:
        os.close(handle)
