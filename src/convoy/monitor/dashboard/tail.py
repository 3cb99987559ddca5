"""The complete lines of a file that another process writes to, a bounded piece at a time."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

_CHUNK_BYTES = 1 << 16  # some hundred lines: folded in within a few milliseconds
_LINE_AT_MOST = 1 << 22


@dataclass(frozen=True)
class Piece:
    """What was read in one go.

    Attributes:
        lines: those that are complete.
        is_end: there is no more for now.
        is_anew: the file was cut short or replaced; these are the first lines of the new one.
    """

    lines: list[bytes] = field(default_factory=list)
    is_end: bool = True
    is_anew: bool = False


class Tail:
    """Reads on in a file; one that is not there yet, or cannot be read, is simply empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""  # of a line whose end is not written yet

    def read(self) -> Piece:
        """Return the lines that are next."""
        try:
            is_anew = self._open()
            data = self._file.read(_CHUNK_BYTES) if self._file is not None else b""
        except OSError:
            return Piece()
        *lines, rest = (self._rest + data).split(b"\n")
        # What is longer is no event: its end, when it comes, is passed over as a damaged line.
        self._rest = rest if len(rest) <= _LINE_AT_MOST else b""
        return Piece(lines, is_end=not data, is_anew=is_anew)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> bool:
        """Open the file, if it is there; tell whether it is another than before."""
        is_anew = self._file is not None and self._is_other(self._file)
        if is_anew:
            self.close()
            self._rest = b""
        if self._file is None and self._path.is_file():
            self._file = self._path.open("rb", buffering=0)
        return is_anew

    def _is_other(self, file: BinaryIO) -> bool:
        try:
            there = self._path.stat()
        except OSError:
            return False  # it was removed, or moved with its folder: what was read still holds
        ours = os.fstat(file.fileno())
        is_same = (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)
        return not is_same or there.st_size < file.tell()
