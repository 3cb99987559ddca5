"""The gate: nonsense is refused before it spoils the weights, and its maker is shut out."""

import math

import pytest

from convoy.outer.gate import Gate


def problem(
    gate: Gate, norm: float, node: int = 0, weights: float = 1.0, rate: float = 0.1
) -> str | None:
    return gate.problem_with(node, norm, rate, lambda: weights)


def seasoned(usual: float = 1.0) -> Gate:
    gate = Gate()
    for _ in range(4):
        assert problem(gate, usual) is None
    return gate


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(norm: float) -> None:
    assert problem(Gate(), norm) == "not finite"
    assert problem(seasoned(), norm) == "not finite"


def test_the_first_are_measured_by_the_weights() -> None:
    assert problem(Gate(), 110.0, weights=10.0) is None
    assert problem(Gate(), 111.0, weights=10.0) == "far too long"
    assert problem(Gate(), 9.0, weights=0.0) is None


def test_later_ones_are_measured_by_what_is_usual() -> None:
    assert problem(seasoned(0.5), 50.0, weights=1e9) is None
    assert problem(seasoned(0.5), 51.0, weights=1e9) == "far too long"


def test_what_is_usual_moves_along_but_not_by_what_was_refused() -> None:
    gate = seasoned()
    for _ in range(200):
        assert problem(gate, 1e6, node=9) == "far too long"
    for _ in range(100):
        problem(gate, 90.0)
    assert problem(gate, 5000.0) is None


def test_what_grows_with_the_rates_it_was_trained_with_is_taken_in() -> None:
    gate = Gate()
    for _ in range(4):  # a step each, at the start of a warm-up
        assert problem(gate, 0.001, rate=0.0003) is None
    assert problem(gate, 3.0, rate=0.3) is None  # thirty steps, later
    assert problem(gate, 3.0, rate=0.0003) == "far too long"
    assert problem(gate, 3e4, rate=0.3) == "far too long"


def test_what_shrinks_slower_than_the_rates_is_taken_in() -> None:
    gate = seasoned(1.0)
    assert problem(gate, 0.5, rate=1e-9) is None  # the last step of a cosine
    assert problem(gate, 0.5, rate=0.0) is None
    assert problem(gate, 101.0, rate=0.0) == "far too long"


def test_where_nothing_has_moved_yet_nothing_is_too_long() -> None:
    assert problem(seasoned(0.0), 1e6) is None


def test_three_times_nonsense_in_a_row_shuts_a_node_out_and_no_other() -> None:
    gate = Gate()
    for _ in range(2):
        problem(gate, math.nan)
        problem(gate, 1e9)
        problem(gate, 1.0)  # in between it was good
    assert not gate.is_shut(0)
    for _ in range(3):
        assert not gate.is_shut(0)
        problem(gate, math.nan)
    assert gate.is_shut(0)
    assert not gate.is_shut(1)


def test_refusals_are_counted_by_reason() -> None:
    gate = seasoned()
    problem(gate, math.nan)
    problem(gate, 1e9)
    problem(gate, 1e9)
    gate.count("aborted")
    assert gate.refused == {"not finite": 1, "far too long": 2, "aborted": 1}
