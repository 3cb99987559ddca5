"""Tell now and then what ran when inside a step, where the executor can say."""

import time
from typing import Protocol, runtime_checkable

from convoy.inner.tasks.report import make_report
from convoy.inner.tasks.timeline import Timeline
from convoy.monitor.events import EventStream, TimelineEvent

_EVERY_S = 30.0  # one is hundreds of numbers, and the next looks the same
_SETTLED = 10  # steps; the first ones fill caches
_SPANS_AT_MOST = 1500  # shorter ones could not be seen


@runtime_checkable
class Observed(Protocol):
    """An executor that knows what ran when in its last step."""

    def last_timeline(self) -> Timeline | None:
        """Return it, or None where there was no such step."""
        ...


class Timelines:
    """Tells of an executor's steps."""

    def __init__(self) -> None:
        self._told_at: float | None = None

    def tell(self, executor: object, step: int, events: EventStream) -> None:
        """Tell of the last step, unless one was told of a short while ago."""
        now = time.monotonic()
        if not isinstance(executor, Observed) or step < _SETTLED:
            return
        if self._told_at is not None and now - self._told_at < _EVERY_S:
            return
        timeline = executor.last_timeline()
        if timeline is not None:
            self._told_at = now
            events.emit(timeline_event(timeline, step))


def timeline_event(timeline: Timeline, step: int) -> TimelineEvent:
    """Return a step's timeline as an event; of very many spans the longest."""
    report = make_report(timeline)
    critical = set(report.critical)
    longest = sorted(timeline.spans, key=lambda span: span.start_s - span.end_s)[:_SPANS_AT_MOST]
    spans = [
        [
            span.thread,
            round(span.start_s, 7),
            round(span.end_s, 7),
            span.name,
            span.kind,
            int(span.task in critical),
        ]
        for span in sorted(longest, key=lambda span: (span.thread, span.start_s))
    ]
    return TimelineEvent(
        of="step",
        step=step,
        rows=[f"thread {number + 1}" for number in range(timeline.threads)],
        spans=spans,
        makespan_s=report.makespan_s,
        bound_s=report.bound_s,
        balance=report.balance,
    )
