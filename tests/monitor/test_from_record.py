"""A record read back is the event that was written; anything else is refused."""

import dataclasses
import json
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.monitor.events import KINDS, Event, GroupEvent, NoteEvent, as_record, from_record

SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(),
    int: st.integers(-(2**62), 2**62),
    float: st.floats(allow_nan=False),
    bool: st.booleans(),
    Any: st.integers() | st.text() | st.lists(st.integers(), max_size=2),
}


def _values(hint: Any) -> st.SearchStrategy[Any]:
    if get_origin(hint) is list:
        return st.lists(_values(get_args(hint)[0]), max_size=3)
    return SCALARS[hint]


def _events(kind: type[Event]) -> st.SearchStrategy[Event]:
    hints = get_type_hints(kind)
    fields = {field.name: _values(hints[field.name]) for field in dataclasses.fields(kind)}
    return st.builds(kind, **fields)


def _every_kind() -> list[type[Event]]:
    def below(kind: type[Event]) -> list[type[Event]]:
        return [k for child in kind.__subclasses__() for k in (child, *below(child))]

    return [kind for kind in below(Event) if kind.__module__ == Event.__module__]


def test_every_kind_of_event_can_be_read_by_its_name() -> None:
    assert {kind.kind: kind for kind in _every_kind()} == KINDS
    assert len(KINDS) == len(_every_kind()) == 17


@pytest.mark.parametrize("kind", _every_kind(), ids=lambda kind: str(kind.kind))
@given(data=st.data())
def test_a_record_read_back_is_the_event(kind: type[Event], data: st.DataObject) -> None:
    event = data.draw(_events(kind))
    record = as_record(event, 12.3456)
    for read in (record, json.loads(json.dumps(record))):
        again = from_record(read)
        assert type(again) is kind
        assert again == event


def test_a_record_is_left_as_it_was() -> None:
    record = as_record(NoteEvent(text="x"), 1.0)
    from_record(record)
    assert record == {"event": "note", "time": 1.0, "text": "x"}


def test_a_record_needs_no_time() -> None:
    assert from_record({"event": "note", "text": "x"}) == NoteEvent(text="x")


def test_a_field_with_a_default_may_be_missing() -> None:
    defaults = {
        kind: [f.name for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING]
        for kind in KINDS.values()
    }
    assert [name for names in defaults.values() for name in names] == ["nodes", "aside", "of"]


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"time": 1.0, "text": "x"},
        {"event": "nothing", "text": "x"},
        {"event": "Note", "text": "x"},
        {"event": "", "text": "x"},
        {"event": None, "text": "x"},
        {"event": ["note"], "text": "x"},
        {"event": {"note": 1}, "text": "x"},
        {"event": "note"},
        {"event": "note", "text": "x", "more": 1},
        {"event": "note", "text": "x", "kind": "note"},
        {"event": "note", "text": "x", "self": 1},
        {"event": "note", "reason": "x"},
        {"event": "end", "state": "finished"},
    ],
    ids=str,
)
def test_a_record_of_another_form_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="this is no event: "):
        from_record(record)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(GroupEvent)])
def test_a_record_that_lacks_a_field_is_refused(name: str) -> None:
    event = GroupEvent(quorum=1, step=2, nodes=[0, 1], pause_s=0.1, reason="x")
    record = as_record(event, 1.0)
    del record[name]
    with pytest.raises(ValueError, match=name):
        from_record(record)
