"""A run read back from the events it left."""

import json
import math
from pathlib import Path
from typing import Any

from convoy.errors import ConfigError
from convoy.monitor.view import RunView


def read_view(path: Path, name: str) -> RunView:
    """Return the view that all lines of a file of events give together.

    A line that is damaged, or that a killed process left half-written, is passed over: the others
    are still worth showing.
    """
    view = RunView(name)
    try:
        with path.open("rb") as file:
            for line in file:
                record = _parse(line)
                if record is not None:
                    view.take(record)
    except FileNotFoundError:
        raise ConfigError(
            "this run has no events to show",
            got=str(path),
            hint="It ended before it began to train, or the file was removed.",
        ) from None
    except OSError as error:
        raise ConfigError(f"this run's events cannot be read: {error}", got=str(path)) from error
    return view


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        has_time = isinstance(record, dict) and math.isfinite(record["time"])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None
    return record if has_time else None
