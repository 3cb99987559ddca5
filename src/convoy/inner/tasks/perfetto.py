"""A step as a trace that ui.perfetto.dev and chrome://tracing open.

The format is Chrome's: "X" is a task, or help with one, with its start and duration in
microseconds, "M" names a thread, and a pair of "s" and "f" is an arrow, here from each task of
the critical path to the next.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from convoy.errors import StorageError
from convoy.files import write_atomically
from convoy.inner.tasks.report import make_report
from convoy.inner.tasks.timeline import Help, Span, Timeline

_PROCESS = 1
_US = 1e6  # microseconds of a second

Event = dict[str, Any]


def write_trace(timeline: Timeline, path: Path, title: str = "One step") -> None:
    """Write a timeline as a trace.

    Raises:
        StorageError: the file cannot be written.
    """
    try:
        write_atomically(path, json.dumps(make_trace(timeline, title)) + "\n")
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error}") from error


def make_trace(timeline: Timeline, title: str = "One step") -> dict[str, Any]:
    """Return a timeline in the form of a trace, with the figures of its report beside it."""
    report = make_report(timeline)
    spans = {span.task: span for span in timeline.spans}
    chain = [spans[task] for task in report.critical]
    critical = set(report.critical)
    events = [_about_process(title)]
    for thread in range(timeline.threads):
        events += _about_thread(thread)
    for span in sorted(timeline.spans, key=lambda span: (span.start_s, span.task)):
        events.append(_task(span, is_critical=span.task in critical))
    events += [_help(help_, spans[help_.task]) for help_ in timeline.helps]
    for number, (before, after) in enumerate(pairwise(chain)):
        events += _arrow(number, before, after)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": report.as_dict()}


def _about_process(title: str) -> Event:
    return {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": title}}


def _about_thread(thread: int) -> list[Event]:
    where = {"ph": "M", "pid": _PROCESS, "tid": thread}
    return [
        {**where, "name": "thread_name", "args": {"name": f"thread {thread}"}},
        {**where, "name": "thread_sort_index", "args": {"sort_index": thread}},
    ]


def _task(span: Span, *, is_critical: bool) -> Event:
    facts: dict[str, Any] = {
        "task": span.task,
        "waited_us": (span.start_s - span.ready_s) * _US,
        "after": list(span.after),
    }
    if is_critical:
        facts["critical"] = True
    return {
        "ph": "X",
        "pid": _PROCESS,
        "tid": span.thread,
        "name": span.name,
        "cat": span.kind,
        "ts": span.start_s * _US,
        "dur": (span.end_s - span.start_s) * _US,
        "args": facts,
    }


def _help(help_: Help, helped: Span) -> Event:
    return {
        "ph": "X",
        "pid": _PROCESS,
        "tid": help_.thread,
        "name": f"helps with {helped.name}",
        "cat": helped.kind,
        "ts": help_.start_s * _US,
        "dur": (help_.end_s - help_.start_s) * _US,
        "args": {"task": helped.task},
    }


def _arrow(number: int, before: Span, after: Span) -> list[Event]:
    common = {"pid": _PROCESS, "name": "critical path", "cat": "critical", "id": number}
    return [
        {**common, "ph": "s", "tid": before.thread, "ts": _middle_us(before)},
        {**common, "ph": "f", "bp": "e", "tid": after.thread, "ts": _middle_us(after)},
    ]


def _middle_us(span: Span) -> float:
    """Return a moment that lies in this task only: at its edges another one may touch it."""
    return (span.start_s + span.end_s) / 2 * _US
