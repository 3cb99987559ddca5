"""Timelines in the stream of events: now and then, and of the step that was done last."""

import pytest

from convoy.inner.tasks.timeline import Span, Timeline
from convoy.monitor.events import EventStream, TimelineEvent
from convoy.outer import timelines
from convoy.outer.timelines import Timelines, timeline_event
from tests.conftest import Recorder


def _timeline(count: int = 3) -> Timeline:
    spans = [
        Span(n, f"task {n}", "forward", n % 2, 0.0, float(n), n + 1.0 + n / 100, tuple(range(n)))
        for n in range(count)
    ]
    return Timeline(2, tuple(spans))


class Watched:
    """An executor that knows what ran when."""

    def last_timeline(self) -> Timeline | None:
        return _timeline()


class Unused:
    """One that has done no step yet."""

    def last_timeline(self) -> Timeline | None:
        return None


def test_a_timeline_is_told_at_first_and_then_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("convoy.outer.timelines.time.monotonic", lambda: now[0])
    seen, told = Recorder(), Timelines()
    for step in range(100):
        told.tell(Watched(), step, EventStream([seen]))
        now[0] += 1.0
    steps = [event.step for event in seen.events if isinstance(event, TimelineEvent)]
    assert steps == [10, 40, 70]


@pytest.mark.parametrize("executor", [object(), Unused()])
def test_who_knows_nothing_tells_nothing(executor: object) -> None:
    seen = Recorder()
    Timelines().tell(executor, 99, EventStream([seen]))
    assert seen.events == []


def test_spans_and_figures_are_those_of_the_step() -> None:
    event = timeline_event(_timeline(), 7)
    assert (event.of, event.step, event.rows) == ("step", 7, ["thread 1", "thread 2"])
    assert [span[:5] for span in event.spans] == [
        [0, 0.0, 1.0, "task 0", "forward"],
        [0, 2.0, 3.02, "task 2", "forward"],
        [1, 1.0, 2.01, "task 1", "forward"],
    ]
    assert event.makespan_s == pytest.approx(3.02)
    assert {span[5] for span in event.spans} == {1}


def test_of_very_many_spans_the_longest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "_SPANS_AT_MOST", 5)
    event = timeline_event(_timeline(20), 0)
    assert sorted(span[1] for span in event.spans) == [15.0, 16.0, 17.0, 18.0, 19.0]
