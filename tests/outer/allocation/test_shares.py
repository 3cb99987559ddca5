"""A batch is handed out whole, in proportion, and nobody gets a crumb."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.outer.allocation.shares import apportion, apportion_within

POSITIVE = st.floats(1e-3, 1e6)
WEIGHTS = st.lists(POSITIVE | st.just(0.0) | st.integers(1, 5).map(float), min_size=1, max_size=9)
TOTALS = st.integers(0, 64) | st.integers(0, 5000)
LEAST = st.integers(0, 40)


@pytest.mark.parametrize(
    ("weights", "total", "least", "expected"),
    [
        ([0.8, 0.6, 0.4, 0.2], 256, 0, (102, 77, 51, 26)),
        ([0.8, 0.6, 0.4, 0.2], 256, 8, (102, 77, 51, 26)),
        ([0.2, 0.4, 0.6, 0.8], 256, 8, (26, 51, 77, 102)),
        ([50, 1], 256, 8, (248, 8)),
        ([50, 1, 1, 1], 256, 8, (232, 8, 8, 8)),
        ([3, 1, 2], 20, 8, (12, 0, 8)),
        ([1, 1, 1], 10, 0, (4, 3, 3)),
        ([1, 1, 1], 2, 0, (1, 1, 0)),
        ([1, 2], 7, 8, (0, 7)),
        ([5, 0, 5], 64, 8, (32, 0, 32)),
        ([0, 0], 5, 0, (5, 0)),
        ([1, 2, 3], 0, 8, (0, 0, 0)),
    ],
)
def test_known_shares(
    weights: list[float], total: int, least: int, expected: tuple[int, ...]
) -> None:
    assert apportion(weights, total, least) == expected


def test_nobody_cannot_share() -> None:
    with pytest.raises(ValueError, match="nobody to share with"):
        apportion([], 64)


@given(weights=WEIGHTS, total=TOTALS, least=LEAST)
def test_the_whole_batch_is_handed_out(weights: list[float], total: int, least: int) -> None:
    shares = apportion(weights, total, least)
    assert len(shares) == len(weights)
    assert sum(shares) == total
    assert min(shares) >= 0


@given(weights=WEIGHTS, total=TOTALS, least=LEAST)
def test_a_share_is_nothing_or_at_least_the_minimum(
    weights: list[float], total: int, least: int
) -> None:
    shares = apportion(weights, total, least)
    if total >= least:
        assert all(share == 0 or share >= least for share in shares)
    else:
        assert sorted(shares) == [0] * (len(weights) - 1) + [total]
        assert total == 0 or weights[shares.index(total)] == max(weights)


@given(weights=WEIGHTS, total=TOTALS, least=LEAST)
def test_a_faster_node_never_gets_fewer(weights: list[float], total: int, least: int) -> None:
    shares = apportion(weights, total, least)
    for (fast, more), (slow, fewer) in itertools.permutations(zip(weights, shares, strict=True), 2):
        assert fast <= slow or more >= fewer


@given(weights=WEIGHTS.filter(any), total=TOTALS)
def test_without_a_minimum_shares_are_the_exact_parts_to_within_one(
    weights: list[float], total: int
) -> None:
    shares = apportion(weights, total)
    for weight, share in zip(weights, shares, strict=True):
        assert abs(share - total * weight / sum(weights)) < 1 + 1e-9


@given(weights=WEIGHTS.filter(any), total=TOTALS, least=LEAST)
def test_a_weight_of_zero_gets_nothing_while_others_have_weight(
    weights: list[float], total: int, least: int
) -> None:
    shares = apportion(weights, total, least)
    assert all(share == 0 for weight, share in zip(weights, shares, strict=True) if not weight)


@given(weights=st.lists(POSITIVE, min_size=1, max_size=9), spare=st.integers(0, 500), least=LEAST)
def test_everybody_is_served_where_the_total_is_enough_for_all(
    weights: list[float], spare: int, least: int
) -> None:
    shares = apportion(weights, least * len(weights) + spare, least)
    assert min(shares) >= least


@given(weights=WEIGHTS, total=TOTALS, least=LEAST)
def test_the_same_numbers_give_the_same_shares(
    weights: list[float], total: int, least: int
) -> None:
    first = apportion(weights, total, least)
    assert apportion(tuple(weights), total, least) == first
    assert apportion(list(weights), total, least) == first


@given(
    weights=st.lists(POSITIVE, min_size=1, max_size=9, unique=True),
    total=TOTALS,
    least=LEAST,
    seed=st.integers(0, 999),
)
def test_the_order_of_unequal_nodes_does_not_matter(
    weights: list[float], total: int, least: int, seed: int
) -> None:
    order = list(range(len(weights)))
    random.Random(seed).shuffle(order)
    shares = apportion(weights, total, least)
    shuffled = apportion([weights[i] for i in order], total, least)
    assert shuffled == tuple(shares[i] for i in order)


@given(weight=POSITIVE | st.just(0.0), total=TOTALS, least=LEAST)
def test_one_node_gets_all(weight: float, total: int, least: int) -> None:
    assert apportion([weight], total, least) == (total,)


@given(factor=st.sampled_from([2.0**-20, 0.25, 4.0, 2.0**30]), weights=WEIGHTS, total=TOTALS)
def test_only_the_proportions_count(factor: float, weights: list[float], total: int) -> None:
    scaled = [weight * factor for weight in weights]
    assert apportion(scaled, total, 8) == apportion(weights, total, 8)


@given(weights=WEIGHTS, total=TOTALS, least=LEAST, data=st.data())
def test_nobody_gets_more_than_it_can_take(
    weights: list[float], total: int, least: int, data: st.DataObject
) -> None:
    limits = st.lists(st.integers(0, total), min_size=len(weights), max_size=len(weights))
    most = data.draw(limits.filter(lambda found: sum(found) >= total))
    shares = apportion_within(weights, total, most, least)
    assert sum(shares) == total
    assert all(share <= limit for share, limit in zip(shares, most, strict=True))
    loose = [total] * len(weights)
    assert apportion_within(weights, total, loose, least) == apportion(weights, total, least)


def test_what_is_too_much_for_one_goes_to_the_others_by_their_weights() -> None:
    assert apportion_within([6, 3, 1], 100, [20, 100, 100]) == (20, 60, 20)
    assert apportion_within([6, 3, 1], 100, [20, 30, 100]) == (20, 30, 50)
