"""The trace of a step, as Perfetto reads it."""

import json
from pathlib import Path
from typing import Any

import pytest

from convoy.errors import StorageError
from convoy.inner.tasks.perfetto import make_trace, write_trace
from convoy.inner.tasks.report import make_report
from convoy.inner.tasks.timeline import Help, Span, Timeline
from tests.inner.tasks.graphs import DAG_1


def events(phase: str, threads: int = 2) -> list[dict[str, Any]]:
    """Return the events of one kind in the trace of DAG-1."""
    return [e for e in make_trace(DAG_1.run(threads))["traceEvents"] if e["ph"] == phase]


def test_every_task_is_one_event_in_microseconds() -> None:
    found = {event["args"]["task"]: event for event in events("X")}
    assert len(events("X")) == len(found) == 13
    for span in DAG_1.run(2).spans:
        event = found[span.task]
        assert (event["name"], event["cat"], event["tid"]) == (span.name, span.kind, span.thread)
        assert event["ts"] == span.start_s * 1e6
        assert event["dur"] == DAG_1.costs[span.task] * 1e6
        assert event["args"]["waited_us"] == (span.start_s - span.ready_s) * 1e6
        assert event["args"]["after"] == list(span.after)


def test_threads_have_names() -> None:
    named = {e["tid"]: e["args"]["name"] for e in events("M", 3) if e["name"] == "thread_name"}
    assert named == {0: "thread 0", 1: "thread 1", 2: "thread 2"}


def test_the_critical_path_is_marked_and_has_an_arrow_for_each_edge() -> None:
    report = make_report(DAG_1.run(2))
    marked = [e["args"]["task"] for e in events("X") if e["args"].get("critical")]
    assert marked == list(report.critical)  # in the order of time
    tasks = {event["args"]["task"]: event for event in events("X")}
    starts, ends = events("s"), events("f")
    assert [e["id"] for e in starts] == [e["id"] for e in ends] == list(range(6))
    for arrow, task in zip(starts, report.critical, strict=False):
        assert tasks[task]["ts"] < arrow["ts"] < tasks[task]["ts"] + tasks[task]["dur"]
        assert arrow["tid"] == tasks[task]["tid"]
    for arrow, task in zip(ends, report.critical[1:], strict=True):
        assert tasks[task]["ts"] < arrow["ts"] < tasks[task]["ts"] + tasks[task]["dur"]
        assert (arrow["tid"], arrow["bp"]) == (tasks[task]["tid"], "e")


def test_help_is_an_event_of_the_helper() -> None:
    spans = (Span(0, "a", "forward", 0, 0.0, 0.0, 4.0), Span(1, "b", "error", 1, 0.0, 0.0, 2.0))
    trace = make_trace(Timeline(2, spans, (Help(0, 1, 2.0, 3.5),)))
    *_, found = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert (found["name"], found["cat"], found["tid"]) == ("helps with a", "forward", 1)
    assert (found["ts"], found["dur"], found["args"]) == (2e6, 1.5e6, {"task": 0})
    assert trace["otherData"]["busy_s"] == (4.0, 3.5)


def test_the_file_is_json_with_the_figures_beside_the_events() -> None:
    write_trace(DAG_1.run(2), Path("a.json"), "my net")
    read = json.loads(Path("a.json").read_text())
    assert read["otherData"]["makespan_s"] == 19
    assert read["traceEvents"][0]["args"] == {"name": "my net"}


def test_a_step_of_nothing_has_no_task_events() -> None:
    assert {event["ph"] for event in make_trace(Timeline(1, ()))["traceEvents"]} == {"M"}


def test_a_folder_that_is_not_there_is_told() -> None:
    with pytest.raises(StorageError, match=r"none/a\.json could not be written"):
        write_trace(DAG_1.run(2), Path("none/a.json"))
