"""IDPA: predicted times become equal, and nothing is handed out twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.outer.allocation.idpa import (
    Holding,
    allocate,
    batch_volumes,
    finish_time,
    hand_out,
    iterations_with,
)


def run(
    samples: int, batches: int, nominal: list[float], times: list[list[float]], **mode: str
) -> list[tuple[int, ...]]:
    """Hand out a data set; `times` are measured after each iteration, the last ones stay."""
    held, given_out = [0] * len(nominal), []
    for a, volume in enumerate(batch_volumes(samples, batches)):
        known = times[min(a, len(times)) - 1] if a else [None] * len(nominal)
        holdings = [Holding(h, n, t) for h, n, t in zip(held, nominal, known, strict=True)]
        increments = allocate(holdings, volume, **mode)  # type: ignore[arg-type]
        given_out.append(increments)
        held = [h + i for h, i in zip(held, increments, strict=True)]
    return given_out


def test_idpa_1_corrects_what_the_nominal_speeds_got_wrong() -> None:
    times = [0.010, 0.010, 0.005]
    given_out = run(1200, 4, [2.0, 2.5, 3.0], [times])
    assert given_out == [(80, 100, 120), (70, 50, 180), (75, 75, 150), (75, 75, 150)]
    final = [sum(node) for node in zip(*given_out, strict=True)]
    assert final == [300, 300, 600]
    assert [n * t for n, t in zip(final, times, strict=True)] == pytest.approx([3.0] * 3)


def test_idpa_1_foresees_the_time_of_the_next_iteration() -> None:
    times = (0.010, 0.010, 0.005)
    held = [(80, 100, 120), (150, 150, 300), (225, 225, 450)]
    found = [
        finish_time([Holding(h, 1.0, t) for h, t in zip(now, times, strict=True)], 300)
        for now in held
    ]
    assert found == pytest.approx([1.5, 2.25, 3.0])


@pytest.mark.parametrize(
    ("mode", "final", "balance"),
    [
        ("cumulative", (300, 300, 600), 1.0),
        ("uniform", (400, 400, 400), 0.833),
        ("nominal", (320, 400, 480), 0.800),  # worse than uniform
    ],
)
def test_idpa_1_beside_the_simpler_ways(mode: str, final: tuple[int, ...], balance: float) -> None:
    times = [0.010, 0.010, 0.005]
    given_out = run(1200, 4, [2.0, 2.5, 3.0], [times], mode=mode)
    held = tuple(sum(node) for node in zip(*given_out, strict=True))
    assert held == final
    took = [n * t for n, t in zip(held, times, strict=True)]
    assert sum(took) / 3 / max(took) == pytest.approx(balance, abs=5e-4)


def test_idpa_2_who_has_too_much_gets_nothing_more() -> None:
    given_out = run(900, 3, [1.0] * 3, [[0.01, 0.01, 0.08]])
    assert given_out == [(100, 100, 100), (150, 150, 0), (150, 150, 0)]


def test_idpa_3_whole_samples_by_largest_remainder() -> None:
    times = [[0.012, 0.009, 0.0075], [0.013, 0.009, 0.007]]
    given_out = run(1000, 3, [2.1, 2.4, 3.3], times)
    assert batch_volumes(1000, 3) == (333, 333, 334)
    assert given_out == [(90, 102, 141), (79, 124, 130), (63, 110, 161)]
    assert tuple(sum(node) for node in zip(*given_out, strict=True)) == (232, 336, 432)


def test_per_batch_leaves_the_first_error_in_place() -> None:
    given_out = run(1200, 4, [2.0, 2.5, 3.0], [[0.010, 0.010, 0.005]], mode="per-batch")
    assert given_out == [(80, 100, 120), (75, 75, 150), (75, 75, 150), (75, 75, 150)]


def test_one_batch_is_a_split_by_nominal_speed() -> None:
    assert run(1000, 1, [1.0, 3.0], [[0.1, 0.1]]) == [(250, 750)]


def test_a_node_that_was_not_measured_is_judged_by_its_nominal_speed() -> None:
    measured = [Holding(100, 1.0, 0.01), Holding(200, 2.0, 0.005)]
    assert allocate([*measured, Holding(0, 2.0)], 500) == (60, 120, 320)


def test_fewer_samples_than_nodes() -> None:
    assert allocate([Holding(0, 1.0)] * 5, 3) == (1, 1, 1, 0, 0)
    assert allocate([Holding(0, 1.0)] * 5, 0) == (0, 0, 0, 0, 0)


def test_the_samples_of_a_lost_node_form_one_more_batch() -> None:
    left = [Holding(100, 1.0, 0.01), Holding(200, 1.0, 0.005)]
    assert allocate(left, 150) == (50, 100)


@pytest.mark.parametrize(
    ("batches", "iterations", "adjusted"), [(1, 10, 10), (2, 10, 11), (3, 10, 11), (4, 10, 12)]
)
def test_as_many_samples_are_visited(batches: int, iterations: int, adjusted: int) -> None:
    assert iterations_with(batches, iterations) == adjusted
    visits = sum(min(i, batches) for i in range(1, adjusted + 1)) / batches
    assert iterations <= visits < iterations + 1


def test_stretches_follow_each_other() -> None:
    assert hand_out({2: 5, 0: 0, 1: 3}, 7) == {2: range(7, 12), 0: range(12, 12), 1: range(12, 15)}


NODES = st.lists(
    st.tuples(st.integers(0, 500), st.floats(0.1, 10), st.none() | st.floats(1e-4, 1.0)),
    min_size=1,
    max_size=8,
)


@given(nodes=NODES, volume=st.integers(0, 2000), mode=st.sampled_from(["cumulative", "per-batch"]))
def test_a_batch_is_handed_out_whole_and_nothing_is_taken_back(
    nodes: list[tuple[int, float, float | None]], volume: int, mode: str
) -> None:
    holdings = [Holding(*node) for node in nodes]
    increments = allocate(holdings, volume, mode)  # type: ignore[arg-type]
    assert sum(increments) == volume
    assert min(increments) >= 0


@given(nodes=NODES.filter(lambda nodes: all(t for _, _, t in nodes)), volume=st.integers(1, 2000))
def test_whoever_gets_something_finishes_with_the_others(
    nodes: list[tuple[int, float, float]], volume: int
) -> None:
    holdings = [Holding(*node) for node in nodes]
    increments = allocate(holdings, volume)
    took = [(n[0] + i) * n[2] for n, i in zip(nodes, increments, strict=True)]
    given_to = [j for j, i in enumerate(increments) if i > 1]
    if given_to:
        latest = max(took[j] - nodes[j][2] for j in given_to)
        for j in given_to:  # to within one sample
            assert took[j] + nodes[j][2] >= latest - 1e-9


@given(samples=st.integers(0, 10**6), batches=st.integers(1, 50))
def test_volumes_add_up_and_differ_by_one_at_most(samples: int, batches: int) -> None:
    volumes = batch_volumes(samples, batches)
    assert sum(volumes) == samples
    assert max(volumes) - min(volumes) <= 1
