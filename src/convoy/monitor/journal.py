"""Events as lines of JSON in a file."""

import contextlib
import json
import logging
from pathlib import Path
from typing import IO

from convoy.monitor.events import Event, as_record

_log = logging.getLogger(__name__)


class Journal:
    """Appends each event to a file, a line each; a full disk never stops training."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self._failed = False

    def receive(self, event: Event, when: float) -> None:
        """Write an event."""
        try:
            if self._file is None:
                self._file = self._path.open("a", encoding="utf-8")
            self._file.write(json.dumps(as_record(event, when)) + "\n")
            self._file.flush()
        except OSError as error:
            if not self._failed:
                _log.warning("events cannot be written to %s: %s", self._path, error)
            self._failed = True

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # the full disk was told already
                self._file.close()
