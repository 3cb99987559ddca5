"""The view of a run: its numbers are those of the events, whatever order and size they come in."""

import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.monitor.events import (
    CheckpointEvent,
    EndEvent,
    EvaluationEvent,
    Event,
    GroupEvent,
    JoinEvent,
    LeaveEvent,
    NodesEvent,
    PausedEvent,
    RefusedEvent,
    SharesEvent,
    StalenessEvent,
    StartEvent,
    StepEvent,
    TimelineEvent,
    as_record,
)
from convoy.monitor.series import Series
from convoy.monitor.sync import Cursor, changes
from convoy.monitor.view import RunView
from convoy.monitor.waits import Waits

T0 = 1_800_000_000.0


def start(strategy: str = "lockstep", **other: Any) -> StartEvent:
    values: dict[str, Any] = {
        "model": "lenet5",
        "parameters": 10,
        "data": "fashion-mini",
        "train_samples": 1000,
        "test_samples": 100,
        "epochs": 4,
        "batch": 100,
        "strategy": strategy,
        "executor": "eager",
        "device": "cpu",
        "precision": "fp32",
        "memory_format": "contiguous",
        "threads": 1,
        "nodes": 2,
        "from_step": 0,
        "reason": "a new run",
    }
    return StartEvent(**(values | other))


def join(node: int) -> JoinEvent:
    return JoinEvent(node=node, name=f"box {node}", pid=7 + node, device="cpu", reason="probed")


def nodes(busy: list[float], samples: list[int], numbers: list[int] | None = None) -> NodesEvent:
    count = len(busy)
    return NodesEvent(
        step=1,
        nodes=numbers or list(range(count)),
        speeds=[30.0, 10.0, 20.0][:count],
        shares=samples,
        samples=samples,
        busy_s=busy,
        waiting_s=[2.0 - b for b in busy],
        exchange_s=0.01,
    )


def step(samples: int, speed: float = 100.0, loss: float = 1.0) -> StepEvent:
    return StepEvent(
        epoch=1,
        step=3,
        steps=10,
        samples=samples,
        loss=loss,
        accuracy=0.5,
        samples_per_s=speed,
        learning_rate=0.1,
    )


def evaluation(epoch: int, accuracy: float) -> EvaluationEvent:
    return EvaluationEvent(
        epoch=epoch,
        samples=epoch * 1000,
        seconds=1.0,
        train_loss=1.0,
        train_accuracy=0.5,
        test_loss=0.9,
        test_accuracy=accuracy,
        samples_per_s=100.0,
    )


def view_of(*events: Event, every_s: float = 1.0) -> RunView:
    view = RunView("run")
    for number, event in enumerate(events):
        view.take(as_record(event, T0 + number * every_s))
    return view


# ---------------------------------------------------------------- what is shown


def test_before_the_first_event_a_run_waits() -> None:
    snapshot = RunView("run").snapshot()
    assert snapshot["run"]["state"] == "waiting"
    assert snapshot["progress"]["fraction"] == 0.0
    assert (snapshot["nodes"], snapshot["log"], snapshot["staleness"]) == ([], [], None)


def test_progress_and_the_time_left_follow_the_steps() -> None:
    progress = view_of(start(), step(1000, speed=250.0)).snapshot()["progress"]
    assert progress["fraction"] == 0.25
    assert progress["left_s"] == 3000 / 250.0
    assert (progress["epoch"], progress["step"], progress["steps"]) == (1, 3, 10)


def test_the_best_accuracy_stays_when_later_ones_are_worse() -> None:
    snapshot = view_of(start(), evaluation(1, 0.7), evaluation(2, 0.6)).snapshot()
    progress = snapshot["progress"]
    assert (progress["test_accuracy"], progress["best_test_accuracy"]) == (0.6, 0.7)
    assert snapshot["series"]["test"]["columns"]["test_accuracy"] == [0.7, 0.6]
    assert snapshot["series"]["test"]["columns"]["time"] == [1.0, 2.0]


def test_nodes_have_the_sums_of_their_intervals_and_the_shares_of_the_last() -> None:
    view = view_of(
        start(), join(0), join(1), nodes([1.0, 2.0], [60, 40]), nodes([2.0, 1.0], [50, 50])
    )
    one, two = view.snapshot()["nodes"]
    assert (one["name"], one["state"], one["speed"]) == ("box 0", "training", 30.0)
    assert (one["samples"], one["busy_s"], one["waiting_s"]) == (110, 3.0, 1.0)
    assert one["waiting"] == 0.25
    assert (one["share"], one["predicted_share"]) == (0.5, 0.75)
    assert one["last_seen"] == T0 + 4
    assert (one["costs_s"], two["costs_s"]) == (1.0, 1.0)
    columns = view.snapshot()["series"]["real"]["columns"]
    assert columns == {"time": [3.0, 4.0], "0": [0.6, 0.5], "1": [0.4, 0.5]}


def test_who_waits_for_whom_is_told_for_lockstep_only() -> None:
    events = (join(0), join(1), nodes([0.5, 2.0], [60, 40]))
    assert view_of(start(), *events).snapshot()["waits"] == [{"node": 0, "for": 1, "seconds": 1.5}]
    assert view_of(start("server"), *events).snapshot()["waits"] == []


def test_a_lost_node_is_marked_and_comes_back() -> None:
    lost = LeaveEvent(node=1, fault=True, reason="node 2 is lost: killed")
    events = [start(), join(0), join(1), nodes([1.0, 1.0], [50, 50]), lost]
    snapshot = view_of(*events).snapshot()
    two = snapshot["nodes"][1]
    assert (two["state"], two["faults"], two["share"], two["speed"]) == ("lost", 1, 0.0, 0.0)
    assert two["reason"] == "node 2 is lost: killed"
    assert snapshot["counts"]["faults"] == 1
    assert snapshot["log"][-1]["level"] == "fault"
    late = view_of(*events, nodes([1.0, 1.0], [50, 50])).snapshot()["nodes"][1]  # of before
    assert (late["state"], late["share"], late["samples"]) == ("lost", 0.0, 100)
    group = GroupEvent(quorum=2, step=9, nodes=[0, 1], pause_s=0.1, reason="a node joined")
    again = view_of(*events, join(1), group).snapshot()["nodes"][1]
    assert (again["state"], again["faults"], again["reason"]) == ("training", 1, "")


def test_standing_aside_is_no_fault_and_keeps_the_speed() -> None:
    aside = LeaveEvent(node=1, fault=False, aside=True, reason="it would slow the others down")
    snapshot = view_of(start(), join(0), join(1), nodes([1.0, 1.0], [5, 5]), aside).snapshot()
    two = snapshot["nodes"][1]
    assert (two["state"], two["faults"], two["speed"], two["share"]) == ("aside", 0, 10.0, 0.0)
    assert snapshot["counts"]["leaves"] == 0


def test_new_shares_show_before_they_are_trained() -> None:
    event = SharesEvent(step=1, nodes=[0, 1], shares=[70, 30], speeds=[3.0, 1.0], reason="faster")
    one, _ = view_of(start(), join(0), join(1), event).snapshot()["nodes"]
    assert (one["share"], one["predicted_share"]) == (0.7, 0.75)


def test_staleness_adds_up_and_grows_longer() -> None:
    first = StalenessEvent(step=1, counts=[5, 1], nodes=[0, 1], latest=[0, 1])
    later = StalenessEvent(step=2, counts=[0, 1, 0, 3], nodes=[0, 1], latest=[3, 1])
    snapshot = view_of(start("server"), join(0), join(1), first, later).snapshot()
    assert snapshot["staleness"] == {"counts": [5, 2, 0, 3], "mean": 1.1}
    assert [node["staleness"] for node in snapshot["nodes"]] == [3, 1]


def test_refusals_are_counted_by_their_cause() -> None:
    events = [RefusedEvent(cause="stale", count=n, reason=f"refused {n}") for n in (1, 4)]
    snapshot = view_of(start("server"), *events).snapshot()
    assert snapshot["refused"] == [{"reason": "stale", "count": 4}]
    assert [entry["level"] for entry in snapshot["log"]][1:] == ["warning", "warning"]


def test_a_pause_ends_with_the_next_step() -> None:
    paused = view_of(start(), step(10), PausedEvent(reason="1 of 2 nodes are here"))
    assert paused.snapshot()["run"]["state"] == "paused"
    paused.take(as_record(step(20), T0 + 9))
    assert paused.snapshot()["run"]["state"] == "running"


def test_an_end_is_an_end_and_nobody_is_gone_after_it() -> None:
    view = view_of(start(), step(10), EndEvent(state="finished", reason="all done"))
    view.mark_gone("killed")
    run = view.snapshot()["run"]
    assert (run["state"], run["reason"], run["ended"]) == ("finished", "all done", T0 + 2)
    killed = view_of(start(), step(10))
    before = killed.number
    killed.mark_gone("no process works on it")
    assert killed.snapshot()["run"]["state"] == "gone"
    assert killed.number > before


def test_the_time_between_an_end_and_a_resume_does_not_count() -> None:
    view = view_of(start(), step(10), EndEvent(state="interrupted", reason="stopped"))
    view.take(as_record(start(reason="goes on"), T0 + 1000))
    view.take(as_record(step(20), T0 + 1001))
    snapshot = view.snapshot()
    assert snapshot["series"]["train"]["columns"]["time"] == [1.0, 3.0]
    assert snapshot["run"]["elapsed_s"] == 3.0
    assert (snapshot["run"]["state"], snapshot["run"]["ended"]) == ("running", None)


def test_a_single_node_has_a_row_of_its_own() -> None:
    (alone,) = view_of(start("single"), step(500, speed=77.0)).snapshot()["nodes"]
    assert (alone["speed"], alone["share"], alone["samples"]) == (77.0, 1.0, 500)


def test_a_timeline_is_the_last_one() -> None:
    spans: list[list[Any]] = [[0, 0.0, 1.0, "conv", "forward", 1]]
    event = TimelineEvent(
        of="step", step=4, rows=["thread 1"], spans=spans, makespan_s=1.0, bound_s=1.0, balance=1.0
    )
    timeline = view_of(start(), event).snapshot()["timeline"]
    assert (timeline["kind"], timeline["spans"]) == ("step", spans)


def test_a_loss_that_is_no_number_is_no_number_in_json() -> None:
    snapshot = view_of(start(), step(10, loss=math.nan, speed=math.inf)).snapshot()
    json.dumps(snapshot, allow_nan=False)
    assert snapshot["series"]["train"]["columns"]["loss"] == [None]


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"event": "step"},
        {"event": "no such", "time": 1.0},
        {"event": "nodes", "time": 1.0, "nodes": 3},
        {"event": "end", "time": "x", "state": 1, "reason": 2},
        {"event": 7, "time": None},
    ],
)
def test_what_is_not_understood_is_passed_over(record: dict[str, Any]) -> None:
    view = view_of(start())
    view.take(record)
    view.take(as_record(step(10), T0 + 5))
    assert view.snapshot()["progress"]["samples"] == 10


# ---------------------------------------------------------------- bounded


def test_a_hundred_thousand_events_stay_small_and_true() -> None:
    view = view_of(start(), join(0), join(1))
    for number in range(50_000):
        view.take(as_record(step(number), T0 + 10 + number))
        view.take(as_record(CheckpointEvent(path="x", step=number, reason="due"), T0 + number))
    snapshot = view.snapshot()
    assert snapshot["counts"]["events"] == 100_003
    assert len(snapshot["log"]) == 500
    times = snapshot["series"]["train"]["columns"]["time"]
    samples = snapshot["series"]["train"]["columns"]["samples"]
    assert 1000 <= len(times) < 2000
    assert all(time == sample + 10 for time, sample in zip(times, samples, strict=True))
    assert samples[0] == 0
    assert samples[-1] > 49_000
    assert len(json.dumps(snapshot)) < 400_000


@given(st.integers(4, 9), st.integers(0, 200))
def test_a_series_keeps_rows_at_even_distances(limit: int, count: int) -> None:
    series = Series(("x",), limit)
    for number in range(count):
        series.append({"x": number})
    kept = [int(x) for x in series.columns["x"] if x is not None]
    assert len(kept) < limit
    assert len({b - a for a, b in pairwise(kept)}) <= 1
    assert not kept or kept[0] == 0


# ---------------------------------------------------------------- keeping a page up to date


class Page:
    """Does what the page does with what it is told."""

    def __init__(self) -> None:
        self.sections: dict[str, Any] = {}
        self.series: dict[str, Any] = {}
        self.log: list[dict[str, Any]] = []

    def apply(self, delta: dict[str, Any]) -> None:
        if delta.get("reset"):
            self.__init__()  # type: ignore[misc]
        self.sections |= delta.get("sections", {})
        for name, tail in delta.get("series", {}).items():
            if tail["from"] == 0:
                self.series[name] = {name: list(cells) for name, cells in tail["columns"].items()}
                continue
            for column, cells in tail["columns"].items():
                assert len(self.series[name][column]) == tail["from"]
                self.series[name][column] += cells
        self.log = [*self.log, *delta.get("log", [])][-500:]


_EVENTS = st.sampled_from(
    [
        start(),
        step(10),
        step(20, loss=2.0),
        evaluation(1, 0.5),
        join(0),
        join(1),
        join(2),
        nodes([1.0, 2.0], [3, 4]),
        nodes([1.0, 2.0, 1.5], [3, 4, 5]),
        LeaveEvent(node=1, fault=True, reason="lost"),
        StalenessEvent(step=1, counts=[1, 2], nodes=[0], latest=[1]),
        EndEvent(state="finished", reason="done"),
    ]
)


@given(st.lists(st.tuples(_EVENTS, st.booleans()), max_size=60))
def test_what_a_page_is_told_adds_up_to_the_snapshot(story: list[tuple[Event, bool]]) -> None:
    view, cursor, page = RunView("run"), Cursor(), Page()
    for series in view.series.values():
        series._limit = 7  # so that it is thinned out
    for number, (event, told) in enumerate(story):
        view.take(as_record(event, T0 + number))
        if told:
            page.apply(json.loads(json.dumps(changes(view, cursor) or {})))
    page.apply(changes(view, cursor) or {})
    assert changes(view, cursor) is None
    snapshot = view.snapshot()
    assert {name: snapshot[name] for name in page.sections} == page.sections
    assert {n: s["columns"] for n, s in snapshot["series"].items()} == page.series
    assert snapshot["log"] == page.log


def test_a_reader_that_comes_late_is_told_once_and_small() -> None:
    view = view_of(start())
    cursor = Cursor()
    first = changes(view, cursor)
    assert first is not None
    assert first["reset"]
    view.take(as_record(step(10), T0 + 5))
    later = changes(view, cursor)
    assert later is not None
    assert "reset" not in later
    assert later["sections"].keys() == {"run", "progress", "counts"}
    assert later["series"].keys() == {"train"}


# ---------------------------------------------------------------- waiting


def test_the_slowest_costs_what_it_is_slower_than_the_next() -> None:
    waits = Waits()
    waits.note({0: 6.0, 1: 8.0, 2: 10.0})
    waits.note({0: 5.0, 1: 4.0})
    assert waits.seconds == {(0, 2): 4.0, (1, 2): 2.0, (1, 0): 1.0}
    assert waits.costs == {2: 2.0, 0: 1.0}
    assert waits.made_others_wait(2) == 6.0


def test_one_node_waits_for_nobody() -> None:
    waits = Waits()
    waits.note({0: 6.0})
    assert (waits.seconds, waits.costs) == ({}, {})
