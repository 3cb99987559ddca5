"""The stream of events: every sink gets every event, in order, as plain values."""

import json
from dataclasses import FrozenInstanceError

import pytest

from convoy.monitor.events import (
    CheckpointEvent,
    EndEvent,
    EvaluationEvent,
    Event,
    EventStream,
    StartEvent,
    StepEvent,
    WarningEvent,
    as_record,
)


class Listener:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.heard: list[tuple[Event, float]] = []
        self.closed = 0

    def receive(self, event: Event, when: float) -> None:
        self.heard.append((event, when))

    def close(self) -> None:
        self.closed += 1


def test_every_sink_gets_every_event_in_order_at_the_same_time() -> None:
    listeners = [Listener(), Listener()]
    stream = EventStream(iter(listeners))
    events = [WarningEvent(reason=str(number)) for number in range(3)]
    for event in events:
        stream.emit(event)
    assert [event for event, _ in listeners[0].heard] == events
    assert listeners[0].heard == listeners[1].heard


def test_close_closes_every_sink_once() -> None:
    listeners = [Listener(), Listener()]
    EventStream(listeners).close()
    assert [listener.closed for listener in listeners] == [1, 1]


def test_time_is_the_clock_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.monitor.events.time.time", lambda: 12.5)
    listener = Listener()
    EventStream([listener]).emit(WarningEvent(reason="x"))
    assert listener.heard == [(WarningEvent(reason="x"), 12.5)]


def test_record_holds_name_time_and_fields_and_is_plain_json() -> None:
    record = as_record(CheckpointEvent(path="a/b", step=3, reason="epoch 1"), 1.23456)
    expected = {"event": "checkpoint", "time": 1.235, "path": "a/b", "step": 3, "reason": "epoch 1"}
    assert json.loads(json.dumps(record)) == expected


def test_each_kind_has_a_name_of_its_own() -> None:
    kinds: list[type[Event]] = [
        StartEvent,
        StepEvent,
        EvaluationEvent,
        CheckpointEvent,
        WarningEvent,
        EndEvent,
    ]
    names = ["start", "step", "evaluation", "checkpoint", "warning", "end"]
    assert [kind.kind for kind in kinds] == names


def test_event_is_frozen() -> None:
    event = EndEvent(state="finished", reason="x")
    with pytest.raises(FrozenInstanceError):
        event.state = "failed"  # type: ignore[misc]
