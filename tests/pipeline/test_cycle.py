"""What every stage did last, as people see it."""

import pytest

from convoy.pipeline.cycle import cycle_event

_NOTHING = [0.0, 0.0, 0.0, 0.0]  # where a stage has done fewer jobs than there is room for


def test_jobs_become_spans_that_begin_at_zero() -> None:
    rows = [
        [[0.0, 7.0, 10.0, 11.0], [1.0, 5.0, 11.5, 13.5], _NOTHING],
        [[0.0, 6.0, 10.5, 11.5], [1.0, 6.0, 11.5, 12.0], [0.0, 7.0, 12.0, 13.0]],
    ]
    event = cycle_event(rows, [3, 0], step=42)
    assert (event.of, event.step) == ("cycle", 42)
    assert event.rows == ["stage 1 (node 4)", "stage 2 (node 1)"]
    assert event.spans == [
        [0, 0.0, 1.0, "F7", "forward", 0],
        [0, 1.5, 3.5, "B5", "backward", 0],
        [1, 0.5, 1.5, "F6", "forward", 0],
        [1, 1.5, 2.0, "B6", "backward", 0],
        [1, 2.0, 3.0, "F7", "forward", 0],
    ]
    assert event.makespan_s == 3.5
    assert event.bound_s == 3.0  # what the busiest stage had to do
    assert event.balance == pytest.approx((3.0 + 2.5) / (2 * 3.0))


def test_stages_that_do_equally_much_are_in_balance() -> None:
    rows = [[[0.0, 1.0, 0.0, 2.0]], [[1.0, 0.0, 1.0, 3.0]]]
    event = cycle_event(rows, [0, 1], step=1)
    assert event.balance == 1.0
    assert (event.makespan_s, event.bound_s) == (3.0, 2.0)


def test_a_stage_that_did_nothing_has_its_row() -> None:
    event = cycle_event([[_NOTHING], [[0.0, 0.0, 5.0, 6.0]]], [0, 1], step=1)
    assert len(event.rows) == 2
    assert [span[0] for span in event.spans] == [1]
    assert event.balance == 0.5


@pytest.mark.parametrize("rows", [[], [[]], [[_NOTHING, _NOTHING], [_NOTHING]]])
def test_where_nobody_did_anything_there_is_nothing_to_see(rows: list[list[list[float]]]) -> None:
    event = cycle_event(rows, list(range(len(rows))), step=0)
    assert event.spans == []
    assert (event.makespan_s, event.bound_s, event.balance) == (0.0, 0.0, 1.0)
    assert len(event.rows) == len(rows)


def test_times_are_told_in_whole_microseconds() -> None:
    event = cycle_event([[[0.0, 0.0, 1.0, 1.12345678]]], [0], step=0)
    assert event.spans[0][1:3] == [0.0, 0.123457]
    assert event.makespan_s == 0.123457
