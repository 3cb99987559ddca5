"""Schedules: vectors of the papers' notes, counts by the formulas, the same bits for all."""

from math import ceil, log2

import pytest
from hypothesis import given
from hypothesis import strategies as some

from convoy.collectives.schedule import (
    Schedule,
    butterfly_size,
    doubling,
    even_bounds,
    halving,
    messages_sent,
    mixing,
    numbers_added,
    numbers_sent,
    part_of,
    partner,
    place_of,
    relabelled,
    ring,
    tree,
)
from tests.collectives.walking import walk

ONES = [1, 2, 3, 4]
METHODS = ("doubling", "halving", "ring", "tree")


def schedules(method: str, size: int, length: int) -> list[Schedule]:
    ranks = range(size)
    match method:
        case "doubling":
            return [doubling(rank, size, length) for rank in ranks]
        case "halving":
            bounds = even_bounds(length, butterfly_size(size))
            return [halving(rank, size, bounds) for rank in ranks]
        case "ring":
            return [ring(rank, size, even_bounds(length, size)) for rank in ranks]
        case _:
            return [tree(rank, size, length) for rank in ranks]


def tens(size: int) -> list[list[int]]:
    """Return what rank r starts with in the notes: 10^r times (1, 2, 3, 4)."""
    return [[10**rank * one for one in ONES] for rank in range(size)]


def times(factor: int, start: int = 0, stop: int = 4) -> list[int]:
    return [factor * one for one in ONES[start:stop]]


def test_b1_doubling_on_four_ranks() -> None:
    first, second = walk(schedules("doubling", 4, 4), tens(4))
    assert first == [times(11), times(11), times(1100), times(1100)]
    assert second == [times(1111)] * 4


def test_b2_halving_on_four_ranks() -> None:
    all_ranks = schedules("halving", 4, 4)
    apart, further, back, together = walk(all_ranks, tens(4))
    kept = [(0, 2), (2, 4), (0, 2), (2, 4)]
    assert [v[a:b] for v, (a, b) in zip(apart, kept, strict=True)] == [
        [11, 22],
        [33, 44],
        [1100, 2200],
        [3300, 4400],
    ]
    assert [further[0][0], further[1][2], further[2][1], further[3][3]] == [1111, 3333, 2222, 4444]
    assert [v[a:b] for v, (a, b) in zip(back, kept, strict=True)] == [
        [1111, 2222],
        [3333, 4444],
        [1111, 2222],
        [3333, 4444],
    ]
    assert together == [times(1111)] * 4
    assert [numbers_sent(schedule) for schedule in all_ranks] == [6] * 4
    sent = [[(s.peer, s.start, s.stop) for s in step.sends] for step in all_ranks[0]]
    assert sent == [[(1, 2, 4)], [(2, 1, 2)], [(2, 0, 1)], [(1, 0, 2)]]


def test_b3_doubling_on_six_ranks() -> None:
    fold, first, second, last = walk(schedules("doubling", 6, 4), tens(6))
    assert (fold[1], fold[3]) == (times(11), times(1100))
    assert first[1] == first[3] == times(1111)
    assert first[4] == first[5] == times(110000)
    assert [second[rank] for rank in (1, 3, 4, 5)] == [times(111111)] * 4
    assert last == [times(111111)] * 6


def test_b3_halving_on_six_ranks() -> None:
    rounds = walk(schedules("halving", 6, 4), tens(6))
    fold, apart, further, back, together, last = rounds
    assert (fold[1], fold[3]) == (times(11), times(1100))
    assert (apart[1][:2], apart[3][2:]) == (times(1111, 0, 2), times(1111, 2, 4))
    assert (apart[4][:2], apart[5][2:]) == (times(110000, 0, 2), times(110000, 2, 4))
    assert [further[1][0], further[3][2], further[4][1], further[5][3]] == [
        111111,
        333333,
        222222,
        444444,
    ]
    assert back[1][:2] == back[4][:2] == times(111111, 0, 2)
    assert back[3][2:] == back[5][2:] == times(111111, 2, 4)
    assert [together[rank] for rank in (1, 3, 4, 5)] == [times(111111)] * 4
    assert last == [times(111111)] * 6


def test_b4_mixing_on_four_ranks() -> None:
    weights = [0.0] * 4
    after = []
    for step in range(4):
        moved = [w - gradient for w, gradient in zip(weights, (1, 2, 3, 6), strict=True)]
        steps = [mixing(rank, 4, step, 1) for rank in range(4)]
        (sums,) = walk(steps, [[w] for w in moved])
        weights = [total / 2 for (total,) in sums]
        after.append((moved, weights))
        assert sum(weights) / 4 == -3 * (step + 1)
    assert after == [
        ([-1, -2, -3, -6], [-1.5, -1.5, -4.5, -4.5]),
        ([-2.5, -3.5, -7.5, -10.5], [-5, -7, -5, -7]),
        ([-6, -9, -8, -13], [-7.5, -7.5, -10.5, -10.5]),
        ([-8.5, -9.5, -13.5, -16.5], [-11, -13, -11, -13]),
    ]


def test_whoever_mixes_reaches_everybody_within_a_round() -> None:
    for size in (1, 2, 4, 8):
        assert all(
            partner(partner(r, size, s), size, s) == r for r in range(size) for s in range(9)
        )
        reached = {0}
        for step in range(size.bit_length() - 1):
            reached |= {partner(rank, size, step) for rank in reached}
        assert reached == set(range(size))
    assert mixing(0, 1, 3, 10) == ()
    with pytest.raises(AssertionError, match="power of two"):
        partner(0, 6, 0)


# ---------------------------------------------------------------- any size


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", range(1, 18))
def test_the_sum_is_right_for_any_number_of_ranks(method: str, size: int) -> None:
    for length in (0, 1, 2, 3, 7, 16, 33):
        vectors = [[(rank + 1) * (place + 3) for place in range(length)] for rank in range(size)]
        rounds = walk(schedules(method, size, length), vectors)
        after = rounds[-1] if rounds else vectors
        assert after == [[sum(column) for column in zip(*vectors, strict=True)]] * size


@pytest.mark.parametrize("method", METHODS)
@given(data=some.data(), size=some.integers(2, 9))
def test_all_ranks_get_the_same_bits(method: str, data: some.DataObject, size: int) -> None:
    numbers = some.floats(-1e6, 1e6, width=32)
    length = data.draw(some.integers(1, 12))
    vectors = [
        data.draw(some.lists(numbers, min_size=length, max_size=length)) for _ in range(size)
    ]
    after = walk(schedules(method, size, length), vectors)[-1]
    assert all(vector == after[0] for vector in after)


@given(data=some.data(), size=some.integers(1, 12))
def test_parts_may_be_of_any_size(data: some.DataObject, size: int) -> None:
    for parts, build in ((butterfly_size(size), halving), (size, ring)):
        lengths = data.draw(some.lists(some.integers(0, 6), min_size=parts, max_size=parts))
        bounds = [sum(lengths[:count]) for count in range(parts + 1)]
        vectors = [[(rank + 2) ** 2 * (p + 1) for p in range(bounds[-1])] for rank in range(size)]
        rounds = walk([build(rank, size, bounds) for rank in range(size)], vectors)
        after = rounds[-1] if rounds else vectors
        assert after == [[sum(column) for column in zip(*vectors, strict=True)]] * size


@pytest.mark.parametrize("size", range(1, 10))
def test_who_stands_where_changes_nothing(size: int) -> None:
    order = [(3 * rank + 1) % size if size % 3 else size - 1 - rank for rank in range(size)]
    assert sorted(order) == list(range(size))
    bounds = even_bounds(20, butterfly_size(size))
    placed = [relabelled(halving(order.index(r), size, bounds), order) for r in range(size)]
    vectors = [[10**rank] * 20 for rank in range(size)]
    rounds = walk(placed, vectors)
    after = rounds[-1] if rounds else vectors
    assert after == [[sum(10**rank for rank in range(size))] * 20] * size


def test_parts_belong_to_places_in_reversed_bits() -> None:
    for size in (2, 3, 8, 13):
        places = butterfly_size(size)
        bounds = even_bounds(places, places)
        for rank in range(size):
            place = place_of(rank, size)
            if place is None:
                continue
            rounds = places.bit_length() - 1
            steps = halving(rank, size, bounds)
            last = steps[rounds if size > places else rounds - 1]
            (receive,) = last.receives
            assert (receive.start, receive.stop) == (
                part_of(place, places),
                part_of(place, places) + 1,
            )


# ---------------------------------------------------------------- counts (section 2.6)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_counts_of_a_butterfly_are_those_of_the_formulas(size: int) -> None:
    length, rounds = 48 * size, int(log2(size))
    for schedule in schedules("doubling", size, length):
        assert messages_sent(schedule) == rounds
        assert numbers_sent(schedule) == numbers_added(schedule) == rounds * length
    for schedule in schedules("halving", size, length):
        assert messages_sent(schedule) == 2 * rounds
        assert numbers_sent(schedule) == 2 * length * (size - 1) // size
        assert numbers_added(schedule) == length * (size - 1) // size
    for schedule in (mixing(rank, size, 1, length) for rank in range(size)):
        assert (messages_sent(schedule), numbers_sent(schedule)) == (1, length)
        assert numbers_added(schedule) == length


@pytest.mark.parametrize("size", range(1, 18))
def test_counts_of_ring_and_tree_are_those_of_the_formulas(size: int) -> None:
    length = 48 * size
    for schedule in schedules("ring", size, length):
        assert messages_sent(schedule) == 2 * (size - 1)
        assert numbers_sent(schedule) == 2 * length * (size - 1) // size
        assert numbers_added(schedule) == length * (size - 1) // size
    trees = schedules("tree", size, length)
    assert all(len(schedule) == 2 * ceil(log2(size)) for schedule in trees)
    assert sum(map(messages_sent, trees)) == 2 * (size - 1)
    assert sum(map(numbers_sent, trees)) == 2 * (size - 1) * length
    assert numbers_added(trees[0]) == ceil(log2(size)) * length


@pytest.mark.parametrize("size", [3, 5, 6, 7, 12])
def test_those_that_sit_out_move_one_vector_each_way(size: int) -> None:
    length, places = 480, butterfly_size(size)
    rounds = int(log2(places))
    extra = size - places
    for method in ("doubling", "halving"):
        all_ranks = schedules(method, size, length)
        inside = rounds * length if method == "doubling" else 2 * length * (places - 1) // places
        per_round = 1 if method == "doubling" else 2
        for rank, schedule in enumerate(all_ranks):
            assert len(schedule) == rounds * per_round + 2
            if rank < 2 * extra and rank % 2 == 0:
                assert (messages_sent(schedule), numbers_sent(schedule)) == (1, length)
                assert numbers_added(schedule) == 0
            else:
                gives_back = rank < 2 * extra
                assert messages_sent(schedule) == rounds * per_round + gives_back
                assert numbers_sent(schedule) == inside + gives_back * length


def test_a_message_without_numbers_is_not_sent() -> None:
    for method in METHODS:
        assert sum(messages_sent(schedule) for schedule in schedules(method, 7, 0)) == 0
    assert messages_sent(schedules("halving", 8, 1)[3]) < 6
