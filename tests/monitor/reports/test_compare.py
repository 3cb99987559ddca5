"""Runs beside each other: every figure by hand, and names that are told apart and stay text."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from convoy.monitor.reports.chart import _ticks, svg_chart
from convoy.monitor.reports.compare import Entry, compare, evaluation_curves, seconds_to, tell_apart
from convoy.monitor.reports.compare_page import comparison_page
from convoy.monitor.reports.compare_table import COLUMNS, cells, common_sentence, show_setting
from convoy.monitor.reports.curve import Curve, number, short, time_unit
from convoy.monitor.view import RunView
from tests.monitor.reports.made_runs import events, records

HOSTILE = "<script>alert(1)</script>\"'&"


def entry(
    name: str,
    accuracies: Sequence[float] = (0.5, 0.7, 0.8),
    *,
    summary: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **more: Any,
) -> Entry:
    """Return a run made by hand."""
    view = RunView(name)
    for record in records(events(accuracies=accuracies, **more)):
        view.take(record)
    return Entry(name, view.snapshot(), summary or {}, config or {})


# ---------------------------------------------------------------- figures


def test_the_common_accuracy_is_the_lowest_of_the_best() -> None:
    slow, fast = entry("slow", (0.3, 0.6, 0.75, 0.74)), entry("fast", (0.7, 0.9), epoch_s=5.0)
    found = compare([slow, fast])
    assert found.common_accuracy == 0.75
    assert [row.seconds_to_common for row in found.rows] == [30.0, 10.0]
    assert [row.best_accuracy for row in found.rows] == [0.75, 0.9]
    assert [row.last_accuracy for row in found.rows] == [0.74, 0.9]
    assert [row.seconds for row in found.rows] == [41.0, 11.0]


def test_the_first_test_that_reaches_an_accuracy_counts() -> None:
    run = entry("a", (0.5, 0.8, 0.6, 0.9))
    assert seconds_to(run, 0.5) == 10.0
    assert seconds_to(run, 0.55) == 20.0
    assert seconds_to(run, 0.9) == 40.0
    assert seconds_to(run, 0.91) is None


def test_without_a_test_there_is_no_common_accuracy() -> None:
    found = compare([entry("a"), entry("untested", ())])
    assert found.common_accuracy is None
    assert [row.seconds_to_common for row in found.rows] == [None, None]
    assert found.rows[1].best_accuracy is None
    assert "unknown yet" in common_sentence(found)


def test_the_rest_of_a_row_is_what_events_and_summary_say() -> None:
    run = entry("a", summary={"samples_per_s": 1234.5})
    row, unended = compare([run, entry("b", summary={"samples_per_s": 1.0}, ended=False)]).rows
    busy = sum(node["busy_s"] for node in run.snapshot["nodes"])
    waiting = sum(node["waiting_s"] for node in run.snapshot["nodes"])
    assert (row.state, row.model, row.strategy) == ("finished", "lenet5", "lockstep")
    assert (row.nodes, row.faults) == (3, 1)
    assert row.idle == round(waiting / (busy + waiting), 4)
    assert row.samples_per_s == 1234.5
    assert unended.samples_per_s == 950.0  # its summary is of an earlier end
    assert unended.state == "running"


def test_a_run_alone_is_not_idle_and_one_that_never_started_has_no_figures() -> None:
    alone, empty = compare(
        [entry("a", names=(), strategy="single"), Entry("e", RunView("e").snapshot(), {}, {})]
    ).rows
    assert (alone.idle, alone.nodes) == (None, 1)
    assert cells(empty) == ["e", "waiting", *["-"] * 2, "0", "-", "-", "0.0 s", *["-"] * 3, "0"]


def test_only_options_that_differ_are_named() -> None:
    first = entry("a", config={"lr": 0.1, "batch": 64, "speeds": [1.0]})
    second = entry("b", config={"lr": 0.2, "batch": 64, "speeds": [1.0], "new": True})
    found = compare([first, second])
    assert found.differences == {"lr": {"a": 0.1, "b": 0.2}, "new": {"a": None, "b": True}}
    assert found.as_dict()["differences"] == found.differences
    assert compare([first, first]).differences == {}


def test_damaged_cells_count_for_nothing() -> None:
    run = entry("a")
    run.snapshot["series"]["test"]["columns"]["test_accuracy"][1] = "many"
    run.snapshot["series"]["test"]["columns"]["test_accuracy"][2] = None
    assert compare([run, entry("b")]).common_accuracy == 0.5
    assert number(True) is number("1") is number(float("inf")) is None


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/a/x", "/a/y"], ["x", "y"]),
        (["/a/x", "/b/x", "/b/y"], ["a/x", "b/x", "y"]),
        (["/1/a/x", "/2/a/x", "/2/b/x"], ["1/a/x", "2/a/x", "b/x"]),
        (["/x", "/a/x"], ["/x", "a/x"]),
    ],
)
def test_runs_of_the_same_name_are_told_apart(paths: list[str], names: list[str]) -> None:
    assert tell_apart([Path(path) for path in paths]) == names


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), ([], "-"), ([0.8, 0.2], "0.8,0.2"), (True, "true"), (0.1, "0.1"), ("x", "x")],
)
def test_settings_are_shown_as_they_are_typed(value: object, text: str) -> None:
    assert show_setting(value) == text


# ---------------------------------------------------------------- the page


def test_the_page_shows_every_cell_and_every_point() -> None:
    entries = [entry("one", config={"lr": 0.1}), entry("two", (0.4, 0.6), config={"lr": 0.2})]
    found = compare(entries)
    page = comparison_page(entries, found)
    for text in (*COLUMNS, *cells(found.rows[0]), *cells(found.rows[1]), "lr", "0.1", "0.2"):
        assert f">{text}<" in page or f"/svg>{text}<" in page
    assert page.count("<title>one: ") == page.count("<title>two: ") + 2 == 6
    assert "one: 80 at 30" in page
    assert "no such thing" not in page


def test_hostile_names_stay_text_in_the_page() -> None:
    entries = [entry(HOSTILE, config={"data": HOSTILE}), entry("b\udcff", config={"data": "x"})]
    page = comparison_page(entries, compare(entries))
    assert "<script" not in page
    assert HOSTILE not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;&amp;" in page
    assert "script-src 'none'" in page
    page.encode()


def test_the_page_of_runs_without_tests_is_drawn_too() -> None:
    entries = [entry("a", ()), entry("b", ())]
    assert "same options" in comparison_page(entries, compare(entries))


def test_a_chart_breaks_its_line_where_nothing_is_known() -> None:
    curve = Curve("a", [0, 1, 2, 3, None], [1.0, None, 2.0, 3.0, 4.0], 0)
    drawing = ElementTree.fromstring(svg_chart([curve], "loss"))
    (line,) = (path for path in drawing.iter("path") if path.get("class") == "curve")
    assert re.sub(r"[^ML]", "", line.get("d") or "") == "MML"
    assert len(list(drawing.iter("title"))) == 3


@pytest.mark.parametrize(
    ("span", "texts"),
    [
        ((0.13, 0.62), ["0.2", "0.3", "0.4", "0.5", "0.6"]),
        ((0.0, 12.0), ["0", "2", "4", "6", "8", "10", "12"]),
        ((0.0, 60_000.0), [f"{n},000" if n else "0" for n in range(0, 61, 10)]),
        ((0.751, 0.768), ["0.755", "0.760", "0.765"]),
    ],
)
def test_ticks_are_round_numbers(span: tuple[float, float], texts: list[str]) -> None:
    assert [text for _, text in _ticks(span)] == texts


# ---------------------------------------------------------------- curves


def test_curves_are_drawn_over_each_other_in_different_looks() -> None:
    curves = evaluation_curves([entry("a"), entry("b")], "test_accuracy", 100.0)
    assert [curve.label for curve in curves] == ["a", "b"]
    assert curves[0].values == pytest.approx([50, 70, 80])
    assert curves[0].times == [10.0, 20.0, 30.0]
    looks = {(c.colour, c.marker, c.dashes) for c in (Curve("", [], [], n) for n in range(280))}
    assert len(looks) == 280


@pytest.mark.parametrize(
    ("longest", "unit"), [(0, (1, "s")), (180, (1, "s")), (600, (60, "min")), (20_000, (3600, "h"))]
)
def test_time_has_the_unit_that_suits_it(longest: float, unit: tuple[float, str]) -> None:
    assert time_unit([Curve("a", [1, None, longest], [0, 0, 0], 0)]) == unit


def test_long_names_lose_their_middle() -> None:
    assert short("a\n b") == "a b"
    assert short(28 * "x") == 28 * "x"
    cut = short("20261116-101500-lenet5-fashion-mini-2")
    assert (len(cut), cut[:9], cut[-2:]) == (28, "20261116-", "-2")
    assert short("\ud800") == "?"


def test_a_count_that_no_machine_can_reach_is_no_number() -> None:
    assert number(10**400) is number(1e308) is number(float("nan")) is None
