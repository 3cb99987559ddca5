"""What a page has to be told so that it shows the present view: only what has changed.

A reader has no queue of messages. It is told the difference between what it knows and what is,
whenever it is ready for it: one that reads slowly misses steps in between, never the outcome, and
one that never reads costs nothing.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from convoy.monitor.view import RunView


@dataclass
class Cursor:
    """What one reader has been told.

    Attributes:
        number: of the view it was told of; -1: nothing.
        sections: each section's text.
        series: each series' generation and length.
        log: the number of the last entry of the log.
    """

    number: int = -1
    sections: dict[str, str] = field(default_factory=dict)
    series: dict[str, tuple[int, int]] = field(default_factory=dict)
    log: int = -1


def changes(view: RunView, cursor: Cursor) -> dict[str, Any] | None:
    """Return what has changed since a reader was last told, and note that it is told now.

    Returns:
        `sections` that differ, whole; `series` as tails; `log` as its new entries; with `reset`
        where the reader knew nothing. None: nothing has changed.
    """
    if cursor.number == view.number:
        return None
    delta: dict[str, Any] = {}
    if cursor.number < 0:
        delta["reset"] = True
    cursor.number = view.number
    parts = {
        "sections": _changed_sections(view, cursor),
        "series": _tails(view, cursor),
        "log": _new_entries(view, cursor),
    }
    return delta | {name: part for name, part in parts.items() if part}


def _changed_sections(view: RunView, cursor: Cursor) -> dict[str, Any]:
    changed = {}
    for name, section in view.sections().items():
        text = json.dumps(section)
        if cursor.sections.get(name) != text:
            cursor.sections[name] = text
            changed[name] = section
    return changed


def _tails(view: RunView, cursor: Cursor) -> dict[str, Any]:
    tails = {}
    for name, series in view.series.items():
        generation, length = cursor.series.get(name, (-1, 0))
        start = length if generation == series.generation else 0
        if generation == series.generation and len(series) == length:
            continue
        cursor.series[name] = (series.generation, len(series))
        tails[name] = {
            "generation": series.generation,
            "from": start,
            "columns": series.tail(start),
        }
    return tails


def _new_entries(view: RunView, cursor: Cursor) -> list[dict[str, Any]]:
    entries = [entry for entry in view.log if entry["number"] > cursor.log]
    if entries:
        cursor.log = entries[-1]["number"]
    return entries
