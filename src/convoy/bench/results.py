"""Runs of a long study that are done: kept in a file, so that they need not be made again."""

import json
import statistics
from pathlib import Path
from typing import Any

from convoy.errors import ConfigError
from convoy.files import write_atomically

Key = dict[str, Any]


class Results:
    """What each run gave, by what it was; the file is whole, whatever is killed when.

    Args:
        path: of the file; it may be missing. None: nothing is kept.

    Raises:
        ConfigError: the file holds something else.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._records: list[Key] = _read(path) if path is not None and path.exists() else []

    def find(self, key: Key) -> float | None:
        """Return what a run gave, the mean where it was made several times; None: it was not."""
        found = [
            record["accuracy"]
            for record in self._records
            if all(record.get(name) == value for name, value in key.items())
        ]
        return statistics.mean(found) if found else None

    def add(self, key: Key, accuracy: float) -> None:
        """Keep what a run gave."""
        self._records.append({**key, "accuracy": round(accuracy, 4)})
        if self._path is not None:
            lines = ",\n".join(json.dumps(record) for record in self._records)
            write_atomically(self._path, f"[\n{lines}\n]\n")


def _read(path: Path) -> list[Key]:
    try:
        records = json.loads(path.read_text())
        if not isinstance(records, list):
            raise ValueError
        if not all(isinstance(record["accuracy"], int | float) for record in records):
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError("this file holds no results of a study", got=str(path)) from None
    return records
