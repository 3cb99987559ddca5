"""The journal: a line of JSON for each event, and a full disk that stops nothing."""

import json
import logging
from pathlib import Path

import pytest

from convoy.monitor.events import EndEvent, Event, EventStream, WarningEvent
from convoy.monitor.journal import Journal


def read(path: Path) -> list[dict[str, object]]:
    """Return the records of a journal."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_each_event_is_one_line_of_json(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    journal.receive(WarningEvent(reason='a "naïve"\nreason\u2028'), 1.0)
    journal.receive(EndEvent(state="finished", reason="done"), 2.0)
    journal.close()
    records = read(tmp_path / "events.jsonl")
    assert [record["event"] for record in records] == ["warning", "end"]
    assert records[0]["reason"] == 'a "naïve"\nreason\u2028'


def test_event_is_on_disk_as_soon_as_it_is_received(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")
    journal.receive(WarningEvent(reason="now"), 1.0)
    assert read(tmp_path / "events.jsonl")[0]["reason"] == "now"
    journal.close()


def test_second_journal_appends(tmp_path: Path) -> None:
    for reason in ("first", "second"):
        journal = Journal(tmp_path / "events.jsonl")
        journal.receive(WarningEvent(reason=reason), 1.0)
        journal.close()
    assert [r["reason"] for r in read(tmp_path / "events.jsonl")] == ["first", "second"]


def test_journal_that_hears_nothing_makes_no_file(tmp_path: Path) -> None:
    Journal(tmp_path / "events.jsonl").close()
    assert list(tmp_path.iterdir()) == []


def test_full_disk_raises_nothing_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            journal.receive(WarningEvent(reason=str(number)), 1.0)
        journal.close()
    assert [record.getMessage() for record in caplog.records] == [
        "events cannot be written to /dev/full: [Errno 28] No space left on device"
    ]


class Listener:
    """Remembers whether it was closed."""

    closed = False

    def receive(self, event: Event, when: float) -> None:
        del event, when

    def close(self) -> None:
        self.closed = True


def test_full_disk_does_not_keep_other_sinks_from_the_end() -> None:
    other = Listener()
    stream = EventStream([Journal(Path("/dev/full")), other])
    stream.emit(WarningEvent(reason="x"))
    stream.close()
    assert other.closed


def test_missing_folder_raises_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path / "gone" / "events.jsonl")
    journal.receive(WarningEvent(reason="x"), 1.0)
    journal.close()
    assert "events cannot be written" in caplog.text
