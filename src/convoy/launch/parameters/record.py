"""The record of a run's submissions: what happened to the parameter service, in order.

Every line is one happening: who was admitted or removed, who pulled, who handed in what with
which report, when a beat ended. The numbers themselves are not in it: they follow from the data
and the orders, which is what `convoy replay` shows.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from convoy.errors import StorageError

_LINE_AT_MOST = 1 << 16


class Record:
    """Appends happenings to a file, each at once; a last line that was torn by a kill goes."""

    def __init__(self, path: Path) -> None:
        _drop_torn_line(path)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, kind: str, **values: Any) -> None:
        """Add a line."""
        self._file.write(json.dumps({"event": kind, **values}) + "\n")
        self._file.flush()

    def __enter__(self) -> "Record":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def _drop_torn_line(path: Path) -> None:
    """Remove what a kill left of a last line: the next one begins a line of its own."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _LINE_AT_MOST)
        file.seek(start)
        file.truncate(start + file.read().rfind(b"\n") + 1)


def read_record(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the happenings of a run; a last line that was torn by a kill is left out."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"the record cannot be read: {error}", got=str(path)) from None
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            yield json.loads(line)
        except ValueError:
            if number < len(lines):
                raise StorageError(
                    f"line {number} of the record is damaged", got=str(path)
                ) from None
