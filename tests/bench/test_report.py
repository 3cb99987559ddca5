"""A benchmark's report: medians, spreads, bars, and contenders that are treated alike."""

import json
import statistics
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from convoy.bench.report import Bar, Report, Row, interleave, median_ratio


@pytest.mark.parametrize(
    ("values", "median"), [((3.0, 1.0, 2.0), 2.0), ((1.0, 2.0), 1.5), ((5.0,), 5.0)]
)
def test_median_is_the_middle_value(values: tuple[float, ...], median: float) -> None:
    assert Row("t", "s", "u", values).median == median


def test_spread_is_from_lowest_to_highest_as_a_part_of_the_median() -> None:
    assert Row("t", "s", "u", (90.0, 100.0, 120.0)).spread == pytest.approx(0.3)
    assert Row("t", "s", "u", (7.0, 7.0)).spread == 0.0


def test_row_as_plain_values() -> None:
    assert Row("t", "s", "u", (3.0, 1.0, 2.0)).as_dict() == {
        "task": "t",
        "system": "s",
        "unit": "u",
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
        "values": [3.0, 1.0, 2.0],
    }


@pytest.mark.parametrize(
    ("bar", "met"),
    [
        (Bar("x", 0.97, at_least=0.97), True),
        (Bar("x", 0.9699, at_least=0.97), False),
        (Bar("x", 1.5, at_most=1.5), True),
        (Bar("x", 1.51, at_most=1.5), False),
        (Bar("x", 2.0, at_least=1.0, at_most=3.0), True),
        (Bar("x", 4.0, at_least=1.0, at_most=3.0), False),
        (Bar("x", 0.0), True),
        (Bar("x", float("nan"), at_least=0.97), False),
    ],
)
def test_bar_is_met_within_its_bounds(bar: Bar, *, met: bool) -> None:
    assert bar.is_met is met
    assert bar.as_dict()["met"] is met


def test_bar_shows_only_the_bounds_it_has() -> None:
    assert Bar("x", 1.0, at_least=0.5).as_dict() == {
        "name": "x",
        "value": 1.0,
        "at_least": 0.5,
        "met": True,
    }


def test_report_has_its_keys_and_is_plain_json() -> None:
    report = Report("single", 3, (Row("t", "s", "u", (1.0,)),), (Bar("b", 1.0, at_most=2.0),))
    record = json.loads(json.dumps(report.as_dict()))
    assert list(record) == ["bench", "machine", "versions", "repeats", "rows", "bars"]
    assert (record["bench"], record["repeats"]) == ("single", 3)
    assert record["rows"][0]["system"] == "s"
    assert record["bars"][0]["at_most"] == 2.0
    assert record["machine"]["cores"] >= 1
    assert {"python", "torch", "numpy"} <= set(record["versions"])


class Contenders:
    """Three systems that note when they are asked to work, and how fast each slice was."""

    def __init__(self, speeds: dict[str, list[float]] | None = None) -> None:
        self.calls: list[str] = []
        self.made = 0
        self._speeds = speeds

    def of(self, *names: str) -> Callable[[ExitStack], dict[str, Callable[[], float]]]:
        def work(name: str) -> Callable[[], float]:
            def run() -> float:
                self.calls.append(name)
                return self._speeds[name].pop(0) if self._speeds else 1.0

            return run

        def make(stack: ExitStack) -> dict[str, Callable[[], float]]:
            self.made += 1
            stack.callback(self.calls.append, "|")
            return {name: work(name) for name in names}

        return make


def test_contenders_take_turns_and_none_runs_twice_in_a_row() -> None:
    contenders = Contenders()
    interleave(contenders.of("a", "b", "c"), repeats=1, slices=3, tell=lambda _: None)
    assert "".join(contenders.calls) == "abcabcabcabc|"  # the first turn is to warm up


def test_those_that_warm_up_by_themselves_need_no_turn_for_it() -> None:
    contenders = Contenders({"a": [9.0, 3.0], "b": [1.0, 1.0]})
    make = contenders.of("a", "b")
    values = interleave(make, repeats=2, slices=1, tell=lambda _: None, warm_up=False)
    assert "".join(contenders.calls) == "ab|ab|"
    assert values["a"] == (9.0, 3.0)


def test_each_round_starts_afresh_and_is_cleaned_up() -> None:
    contenders = Contenders()
    interleave(contenders.of("a", "b"), repeats=2, slices=1, tell=lambda _: None)
    assert contenders.made == 2
    assert "".join(contenders.calls) == "abab|abab|"


@pytest.mark.parametrize(("repeats", "slices"), [(1, 1), (3, 2), (2, 5)])
def test_every_contender_works_as_often_and_gets_as_many_values(repeats: int, slices: int) -> None:
    contenders = Contenders()
    values = interleave(
        contenders.of("a", "b"), repeats=repeats, slices=slices, tell=lambda _: None
    )
    assert contenders.calls.count("a") == contenders.calls.count("b") == repeats * (slices + 1)
    assert {name: len(found) for name, found in values.items()} == {"a": repeats, "b": repeats}


def test_value_is_the_speed_over_all_slices_of_equal_work() -> None:
    contenders = Contenders({"a": [9.0, 1.0, 3.0, 9.0, 2.0, 2.0]})
    (values,) = interleave(contenders.of("a"), repeats=2, slices=2, tell=lambda _: None).values()
    assert list(values) == pytest.approx([statistics.harmonic_mean([1.0, 3.0]), 2.0])


def test_each_round_is_told() -> None:
    told: list[str] = []
    interleave(Contenders().of("a", "b"), repeats=2, slices=1, tell=told.append)
    assert told == ["round 1 of 2: a 1, b 1", "round 2 of 2: a 1, b 1"]


def test_ratio_is_the_median_of_the_rounds_ratios_so_that_drift_cancels() -> None:
    assert median_ratio([10.0, 20.0, 40.0], [5.0, 10.0, 10.0]) == 2.0


def test_ratio_needs_as_many_values_on_both_sides() -> None:
    with pytest.raises(ValueError, match="shorter"):
        median_ratio([1.0, 2.0], [1.0])
