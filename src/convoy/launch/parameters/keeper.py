"""Keeps the parameter service's state on disk: two files in turn, so that one is always whole.

A state is written to a new file, flushed and renamed over the older of the two. Whatever moment
the process is killed at, the newer one is complete; if a disk damages it, the other is there.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from convoy.files import failpoint, sync_folder

_NAMES = ("state-a", "state-b")
_DIGEST_BYTES = 32

State = tuple[dict[str, Tensor], dict[str, Any]]


class Keeper:
    """Writes states, and finds the newest again.

    Args:
        folder: where the two files are.

    Attributes:
        count: the number of the state that was found or written last.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob("*.partial"):
            partial.unlink()
        found = self._read_all()
        self.damaged = [name for name, state in found.items() if state is None]
        whole = {name: state for name, state in found.items() if state is not None}
        newest = max(whole, key=lambda name: whole[name][1]["count"], default=None)
        self.newest: State | None = whole[newest] if newest is not None else None
        self.count = self.newest[1]["count"] if self.newest is not None else 0
        self._next = 1 if newest == _NAMES[0] else 0

    def write(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> int:
        """Write a state; return its number when it is safe."""
        self.count += 1
        meta = {"convoy": json.dumps({**values, "count": self.count})}
        block = safetensors.torch.save({n: t.contiguous() for n, t in tensors.items()}, meta)
        path = self._folder / _NAMES[self._next]
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            file.write(hashlib.blake2b(block, digest_size=_DIGEST_BYTES).digest())
            failpoint("service.mid-write")
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
        failpoint("service.before-rename")
        partial.replace(path)
        sync_folder(self._folder)
        failpoint("service.after-rename")
        self._next = 1 - self._next
        return self.count

    def _read_all(self) -> dict[str, State | None]:
        there = (name for name in _NAMES if (self._folder / name).exists())
        return {name: _read(self._folder / name) for name in there}


def _read(path: Path) -> State | None:
    """Return the state in a file, or None if it is damaged."""
    content = path.read_bytes()
    digest, block = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.blake2b(block, digest_size=_DIGEST_BYTES).digest() != digest:
        return None
    try:
        length = int.from_bytes(block[:8], "little")
        header = json.loads(block[8 : 8 + length])
        return safetensors.torch.load(block), json.loads(header["__metadata__"]["convoy"])
    except (SafetensorError, KeyError, ValueError):
        return None
