"""The model: the table of the papers' notes, schedules on unequal links, and what is chosen."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from convoy.collectives.cost import (
    Choice,
    Line,
    Link,
    Method,
    bounds_by_weight,
    choose,
    method_seconds,
    mixing_seconds,
    schedule_seconds,
)
from convoy.collectives.schedule import butterfly_size, even_bounds, mixing, numbers_sent

ALEXNET = Link(20e-6, 0.8e-9, add_s=0.05e-9)
BYTES = 9_878_784
METHODS = (Method.DOUBLING, Method.HALVING, Method.RING, Method.TREE)


def model(
    method: Method, length: int, links: list[Link], bounds: tuple[int, ...] | None = None
) -> float:
    """Return what a method takes on links of any speed."""
    size = len(links)
    parts = {Method.HALVING: butterfly_size(size), Method.RING: size}.get(method, 1)
    chosen = Choice(method, tuple(range(size)), bounds or even_bounds(length, parts), 0.0, "")
    return schedule_seconds([chosen.schedule(rank) for rank in range(size)], 4, links)


@pytest.mark.parametrize(
    ("ranks", "milliseconds"),
    [
        (4, (16.834, 12.305, 12.345, 32.680)),
        (6, (33.174, None, 13.783, 49.020)),
        (8, (25.251, 14.382, 14.542, 49.020)),
        (16, (33.668, 15.441, 15.881, 65.360)),
    ],
)
def test_the_table_of_the_notes(ranks: int, milliseconds: tuple[float | None, ...]) -> None:
    for method, ms in zip(METHODS, milliseconds, strict=True):
        if ms is not None:
            assert 1e3 * method_seconds(method, BYTES, ranks, ALEXNET) == pytest.approx(
                ms, abs=6e-4
            )
    assert 1e3 * mixing_seconds(BYTES, ALEXNET) == pytest.approx(8.417, abs=6e-4)


def test_halving_on_six_ranks_has_a_butterfly_of_four() -> None:
    # The notes' 30.003 ms puts P where "strictly pof2 belongs", as they say: 5/6 instead of 3/4.
    strictly = 30.003 - 1e3 * BYTES * (2 * 0.8e-9 + 0.05e-9) * (5 / 6 - 3 / 4)
    found = 1e3 * method_seconds(Method.HALVING, BYTES, 6, ALEXNET)
    assert found == pytest.approx(strictly, abs=1e-3)


def test_short_vectors_on_eight_ranks() -> None:
    found = [1e3 * method_seconds(method, 4096, 8, ALEXNET) for method in METHODS[:3]]
    assert found == pytest.approx([0.070, 0.126, 0.286], abs=1e-3)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", range(1, 17))
def test_on_equal_links_a_schedule_takes_what_its_formula_says(method: Method, size: int) -> None:
    length = 240 * size
    by_schedule = model(method, length, [ALEXNET] * size)
    assert by_schedule == pytest.approx(method_seconds(method, 4 * length, size, ALEXNET))


def test_a_step_of_mixing_takes_what_its_formula_says() -> None:
    steps = [mixing(rank, 4, 1, 100) for rank in range(4)]
    assert schedule_seconds(steps, 4, [ALEXNET] * 4) == pytest.approx(mixing_seconds(400, ALEXNET))


def test_a_round_lasts_as_long_as_its_slowest_exchange() -> None:
    slow = Link(1e-3, 1e-6)
    assert model(Method.DOUBLING, 1000, [ALEXNET, slow]) == pytest.approx(5e-3, rel=1e-3)
    shared = Link(1e-3, 1e-6, back_s=1e-6)  # both directions through the same air
    assert model(Method.DOUBLING, 1000, [ALEXNET, shared]) == pytest.approx(9e-3, rel=1e-3)


# ---------------------------------------------------------------- choosing


@pytest.mark.parametrize(
    ("num_bytes", "ranks", "method"),
    [
        (4096, 8, Method.DOUBLING),
        (BYTES, 8, Method.HALVING),
        (BYTES, 6, Method.RING),
        (4096, 6, Method.DOUBLING),
    ],
)
def test_short_doubling_long_halving_long_and_odd_ring(
    num_bytes: int, ranks: int, method: Method
) -> None:
    chosen = choose(num_bytes // 4, 4, [ALEXNET] * ranks)
    assert chosen.method is method
    assert chosen.seconds == pytest.approx(method_seconds(method, num_bytes, ranks, ALEXNET), 1e-3)
    assert chosen.reason.startswith(f"{method} should take")


def test_what_the_wires_offer_is_taken_where_it_is_faster() -> None:
    links = [ALEXNET] * 4
    assert choose(1000, 4, links, Line(1e-6, 1e-12)).method is Method.AROUND
    assert choose(1000, 4, links, Line(1.0, 1e-12)).method is Method.DOUBLING


def both_ways(byte_s: float) -> Link:
    """Return a link on which both directions share what there is."""
    return Link(20e-6, byte_s, back_s=byte_s, add_s=0.05e-9)


def test_where_directions_share_a_link_a_slow_rank_gets_a_small_part() -> None:
    links = [both_ways(0.8e-9)] * 3 + [both_ways(1.6e-9)]
    chosen = choose(1_000_000, 4, links)
    assert chosen.method is Method.HALVING
    assert chosen.seconds < 0.93 * model(Method.HALVING, 1_000_000, links)
    parts = [stop - start for start, stop in pairwise(chosen.bounds)]
    assert parts[3] < min(parts[:3]) / 3  # the last place has the last part


def test_a_rank_that_is_far_slower_moves_the_vector_once_each_way() -> None:
    links = [both_ways(0.8e-9)] * 3 + [both_ways(16e-9)]
    chosen = choose(1_000_000, 4, links)
    assert chosen.method is Method.TREE
    assert numbers_sent(chosen.schedule(3)) == 1_000_000


@given(data=some.data(), size=some.integers(2, 9))
def test_no_candidate_is_faster_than_the_choice(data: some.DataObject, size: int) -> None:
    link = some.builds(
        Link,
        some.floats(1e-6, 1e-3),
        some.floats(1e-10, 1e-7),
        some.floats(0, 1e-8),
        some.floats(0, 1e-10),
    )
    links = data.draw(some.lists(link, min_size=size, max_size=size))
    length = data.draw(some.integers(0, 1_000_000))
    chosen = choose(length, 4, links)
    assert chosen == choose(length, 4, list(links))
    assert sorted(chosen.order) == list(range(size))
    for method in METHODS:
        assert chosen.seconds <= model(method, length, links) * (1 + 1e-9)


def test_parts_by_weight_are_whole_and_in_order() -> None:
    assert bounds_by_weight(10, [1, 1, 0, 2]) == (0, 2, 5, 5, 10)
    assert bounds_by_weight(0, [1, 2]) == (0, 0, 0)
