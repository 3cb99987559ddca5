"""The part of a data set that this machine was given, on its disk, filled bit by bit."""

import contextlib
import errno
import fcntl
import math
import mmap
import os
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from convoy.data.card import DataCard
from convoy.data.images import ImageSet
from convoy.errors import DataError, StorageError
from convoy.files import (
    new_folder,
    read_manifest,
    remove_folder,
    remove_partials,
    write_manifest,
)

_FORMAT = "convoy-pieces-1"
_HERE = 1  # in the file of presence; whatever else stands there means: not here
_MAP_NORESERVE = 0x4000  # of Linux; the module mmap names it from Python 3.13 on


class Pieces:
    """Training images of which only some are here, each with a checksum.

    A sample counts as here only after all its bytes are on the disk, and is not written again
    while it counts: however a process ends, and however many write at once, a sample that is
    here is right. Images that are not here take no room: the files have holes.

    Args:
        cache: the folder that holds all of Convoy's cached data.
        card: the data set. What lies there of another shape is removed.

    Raises:
        StorageError: the disk refuses.
    """

    def __init__(self, cache: Path, card: DataCard) -> None:
        self.card = card
        with _storing(), _alone(cache / "pieces" / f"{card.digest}.lock"):
            columns = _open_or_start_afresh(cache / "pieces" / card.digest, card)
        self._images, self._labels, self._checksums, self._presence = columns

    @property
    def held(self) -> int:
        """Return how many samples are here."""
        return int((self._presence.rows == _HERE).sum())

    def missing(self, indices: Tensor) -> Tensor:
        """Return those of some samples' numbers that are not here, in their order."""
        return indices[torch.from_numpy(~self._are_here(self._numbers(indices)))]

    def put(self, indices: Tensor, images_nchw: Tensor, labels: Tensor) -> None:
        """Keep samples; those that are here already stay as they are.

        Raises:
            DataError: they are not samples of this data set.
            StorageError: the disk refuses; what was kept before stays.
        """
        numbers = self._numbers(indices)
        self._check(len(numbers), images_nchw, labels)
        fresh = ~self._are_here(numbers)
        numbers, pixels, targets = numbers[fresh], images_nchw.numpy()[fresh], labels.numpy()[fresh]
        sums = [_checksum(image, label) for image, label in zip(pixels, targets, strict=True)]
        content = (self._images, pixels), (self._labels, targets), (self._checksums, sums)
        with _storing():
            for column, rows in content:
                column.write(numbers, rows)
            for column, _ in content:
                column.sync()
            self._presence.write(numbers, [_HERE] * len(numbers))

    def verify(self) -> int:
        """Forget the samples that are no longer as they were kept; return how many."""
        damaged = [
            number
            for number in np.flatnonzero(self._presence.rows == _HERE)
            if _checksum(self._images.rows[number], self._labels.rows[number])
            != self._checksums.rows[number]
        ]
        with _storing():
            self._presence.write(np.array(damaged, np.int64), [0] * len(damaged))
        return len(damaged)

    def image_set(self) -> ImageSet:
        """Return all images without copying one; those that are not here are black.

        What is put later appears in it. What is done to it never reaches the disk.
        """
        images, labels = (torch.from_numpy(c.rows) for c in (self._images, self._labels))
        return ImageSet(images, labels, self.card.classes)

    def _are_here(self, numbers: np.ndarray) -> np.ndarray:
        here: np.ndarray = self._presence.rows[numbers] == _HERE
        return here

    def _numbers(self, indices: Tensor) -> np.ndarray:
        numbers = indices.to(torch.int64).numpy()
        self.card.check_numbers(numbers)
        return numbers

    def _check(self, count: int, images: Tensor, labels: Tensor) -> None:
        got = tuple(images.shape), images.dtype, tuple(labels.shape), labels.dtype
        dtype = getattr(torch, self.card.dtype)
        if got != ((count, *self.card.shape_CHW), dtype, (count,), torch.int64):
            raise DataError(f"these are not samples of {self.card.name}", got=got)
        if not bool(((labels >= 0) & (labels < len(self.card.classes))).all()):
            raise DataError(f"a label is none of the classes of {self.card.name}")


class _Column:
    """Equal rows in one file: read through a map, written as a file.

    To write into a hole through a map ends the process with SIGBUS where the disk is full; a
    file says so. The map is private, as torch wants writable memory but the file must not
    change; and nothing is reserved for it, as it may be larger than the memory.

    Raises:
        ValueError: the file is too short.
    """

    def __init__(self, path: Path, dtype: str, shape: tuple[int, ...]) -> None:
        size = np.dtype(dtype).itemsize * math.prod(shape)
        with path.open("r+b", buffering=0) as file:
            flags, access = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            mapped = mmap.mmap(file.fileno(), size, flags=flags, prot=access)
            self._handle = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._handle)
        self.rows = np.frombuffer(mapped, dtype).reshape(shape)

    def write(self, numbers: np.ndarray, rows: np.ndarray | list[int]) -> None:
        """Set the rows with these numbers."""
        content = memoryview(np.asarray(rows, self.rows.dtype).tobytes())
        length = self.rows.nbytes // len(self.rows)
        for place, number in enumerate(numbers.tolist()):
            row = content[place * length : (place + 1) * length]
            if os.pwrite(self._handle, row, number * length) != length:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        os.fdatasync(self._handle)


def _open_or_start_afresh(folder: Path, card: DataCard) -> list[_Column]:
    try:
        return _open(folder, card)
    except (FileNotFoundError, ValueError):
        pass  # nothing is there yet, or it cannot be used
    remove_partials(folder.parent)
    if folder.exists():
        remove_folder(folder)
    with new_folder(folder) as partial:
        for name, (dtype, shape) in _columns(card).items():
            (partial / name).touch()
            os.truncate(partial / name, np.dtype(dtype).itemsize * math.prod(shape))
        write_manifest(partial / "manifest.json", _FORMAT, _layout(card))
    return _open(folder, card)


def _open(folder: Path, card: DataCard) -> list[_Column]:
    if read_manifest(folder / "manifest.json", _FORMAT) != _layout(card):
        raise ValueError("laid out for other images")
    return [_Column(folder / name, *kind) for name, kind in _columns(card).items()]


def _layout(card: DataCard) -> dict[str, Any]:
    return {"count": card.count, "shape": list(card.shape_CHW), "dtype": card.dtype}


def _columns(card: DataCard) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return type and shape of what the files hold."""
    return {
        "images": (card.dtype, (card.count, *card.shape_CHW)),
        "labels": ("int64", (card.count,)),
        "checksums": ("uint32", (card.count,)),
        "presence": ("uint8", (card.count,)),
    }


def _checksum(image: np.ndarray, label: np.int64) -> int:
    return zlib.crc32(label.tobytes(), zlib.crc32(np.ascontiguousarray(image).data))


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process at a time decide what to do about a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _storing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"samples cannot be kept on this disk: {error}") from error
