"""What Prometheus is told: every name that was promised, and any name of a node."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from convoy.monitor.events import Event, JoinEvent, LeaveEvent, NodesEvent, RefusedEvent, as_record
from convoy.monitor.metrics import metrics_text
from convoy.monitor.view import RunView
from tests.monitor.dashboard.lines import T0, start, step

Labels = frozenset[tuple[str, str]]

NAMES = ['<script>"x\n', "back\\slash", 'a",b="c', "\u00fc\u2028", "{}", "", "# HELP x", "\\n"]


def samples_of(snapshot: dict[str, Any]) -> dict[tuple[str, Labels], float]:
    """Return what a scraper reads, by name and labels."""
    text = metrics_text(snapshot).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def view_of(*events: Event) -> RunView:
    view = RunView("a run")
    for event in events:
        view.take(as_record(event, T0))
    return view


def join(node: int, name: str) -> JoinEvent:
    return JoinEvent(node=node, name=name, pid=1, device="cpu", reason="it has joined")


def nodes() -> NodesEvent:
    return NodesEvent(
        step=1,
        nodes=[0, 1],
        speeds=[30.0, 10.0],
        shares=[75, 25],
        samples=[75, 25],
        busy_s=[1.0, 2.0],
        waiting_s=[1.0, 0.0],
        exchange_s=0.1,
    )


def test_a_run_before_its_start_has_only_what_is_known() -> None:
    found = samples_of(RunView("a run").snapshot())
    assert found[("convoy_events_total", frozenset())] == 0.0
    assert found[("convoy_progress_ratio", frozenset())] == 0.0
    assert ("convoy_loss", frozenset()) not in found
    info = frozenset({("name", "a run"), ("state", "waiting")})
    assert found[("convoy_run_info", info)] == 1.0


def test_a_run_is_told_in_numbers() -> None:
    found = samples_of(view_of(start(), step(400_000, loss=0.75)).snapshot())
    of_run = {name: value for (name, labels), value in found.items() if not labels}
    assert of_run == {
        "convoy_samples_total": 400_000.0,
        "convoy_samples_per_second": 100.0,
        "convoy_loss": 0.75,
        "convoy_accuracy": 0.25,
        "convoy_progress_ratio": 0.1,
        "convoy_events_total": 2.0,
    }


def test_nodes_are_told_in_numbers() -> None:
    lost = LeaveEvent(node=1, fault=True, reason="it was killed")
    snapshot = view_of(start(), join(0, "a"), join(1, "b"), nodes(), lost).snapshot()
    found = samples_of(snapshot)
    labels = [frozenset({("node", "0"), ("name", "a")}), frozenset({("node", "1"), ("name", "b")})]
    expected = {
        "convoy_node_speed": [node["speed"] for node in snapshot["nodes"]],
        "convoy_node_share": [node["share"] for node in snapshot["nodes"]],
        "convoy_node_waiting_ratio": [0.5, 0.0],
        "convoy_node_up": [1.0, 0.0],
        "convoy_node_faults_total": [0.0, 1.0],
        "convoy_node_last_seen_seconds": [T0, T0],
        "convoy_node_cost_seconds_total": [node["costs_s"] for node in snapshot["nodes"]],
    }
    for name, values in expected.items():
        assert [found[(name, one)] for one in labels] == pytest.approx(values), name
    assert not any(name == "convoy_node_staleness" for name, _ in found)  # not known here


def test_refusals_are_counted_by_their_reason() -> None:
    refusal = RefusedEvent(cause='late "x"\n', count=3, reason="it came too late")
    found = samples_of(view_of(start(), refusal).snapshot())
    assert found[("convoy_refused_total", frozenset({("reason", 'late "x"\n')}))] == 3.0


@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_node_comes_through_whole(name: str) -> None:
    view = view_of(start(), join(0, name), join(1, name), nodes())
    found = samples_of(view.snapshot())
    # The parser drops labels that are empty, as Prometheus does.
    assert {dict(labels).get("name", "") for key, labels in found if key == "convoy_node_up"} == {
        name
    }
