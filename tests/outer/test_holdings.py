"""Samples that nodes keep: IDPA's batches come when they should, and nothing is held twice."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.outer.holdings import EVERY_PASS, HeldWork
from convoy.outer.work import Order


def held_work(samples: int, batches: int, expect: int, **options: Any) -> HeldWork:
    chosen = {"mode": "cumulative", "local_batch": 10, "every": EVERY_PASS, "epochs": 1000}
    return HeldWork(samples, batches=batches, expect=expect, **{**chosen, **options})


def order_of(work: HeldWork, node: int) -> Order:
    order = work.order(node, 0)
    assert order is not None
    return order


def do_pass(work: HeldWork, node: int, time_s: float) -> Order:
    """Let a node pass over what it holds, at so many seconds a sample."""
    order = order_of(work, node)
    assert work.finish(node, order, order.samples * time_s, exchange_s=99.0) == order.samples
    return order


def run_idpa(
    samples: int, batches: int, nominal: Sequence[float], times: Sequence[Sequence[float]]
) -> list[tuple[int, ...]]:
    """Hand a data set out to nodes that pass once for each batch; return what each was given."""
    work = held_work(samples, batches, expect=len(nominal))
    for node, speed in enumerate(nominal):
        work.join(node, speed)
    seen = [tuple(work.held.values())]
    for a in range(batches - 1):
        for node, time_s in enumerate(times[min(a, len(times) - 1)]):
            do_pass(work, node, time_s)
        seen.append(tuple(work.held.values()))
    before = [(0,) * len(nominal), *seen]
    return [
        tuple(b - a for a, b in zip(*pair, strict=True)) for pair in zip(before, seen, strict=False)
    ]


def test_idpa_1_from_measured_passes() -> None:
    given_out = run_idpa(1200, 4, [2.0, 2.5, 3.0], [[0.010, 0.010, 0.005]])
    assert given_out == [(80, 100, 120), (70, 50, 180), (75, 75, 150), (75, 75, 150)]


def test_idpa_2_from_measured_passes() -> None:
    given_out = run_idpa(900, 3, [1.0] * 3, [[0.01, 0.01, 0.08]])
    assert given_out == [(100, 100, 100), (150, 150, 0), (150, 150, 0)]


def test_idpa_3_from_measured_passes() -> None:
    """Of two passes the median counts: the second is such that it is the example's number."""
    first, second = [0.012, 0.009, 0.0075], [0.013, 0.009, 0.007]
    reported = [2 * b - a for a, b in zip(first, second, strict=True)]
    given_out = run_idpa(1000, 3, [2.1, 2.4, 3.3], [first, reported])
    assert given_out == [(90, 102, 141), (79, 124, 130), (63, 110, 161)]


# ------------------------------------------------------------------ when


def test_nothing_is_handed_out_before_all_expected_nodes_are_there() -> None:
    work = held_work(100, 1, expect=2)
    work.join(0, 1.0)
    assert work.order(0, 0) is None
    work.join(1, 3.0)
    assert work.held == {0: 25, 1: 75}


def test_the_next_batch_waits_for_everybodys_first_pass_and_nobody_waits_for_it() -> None:
    work = held_work(400, 2, expect=2)
    work.join(0, 1.0)
    work.join(1, 1.0)
    slow = order_of(work, 1)
    passes = [do_pass(work, 0, 0.001) for _ in range(3)]
    assert [order.spans for order in passes] == [((0, 0, 100),), ((1, 0, 100),), ((2, 0, 100),)]
    assert work.held == {0: 100, 1: 100}
    work.finish(1, slow, 0.3, 0.0)
    assert work.held == {0: 300, 1: 100}


def test_what_arrives_during_a_pass_is_part_of_the_next() -> None:
    work = held_work(400, 2, expect=2, every=5)
    work.join(0, 1.0)
    work.join(1, 1.0)
    do_pass(work, 0, 0.01)
    do_pass(work, 0, 0.01)
    first = do_pass(work, 0, 0.01)
    do_pass(work, 1, 0.01)
    do_pass(work, 1, 0.01)
    assert work.held == {0: 200, 1: 200}
    second = do_pass(work, 0, 0.01)
    assert first.spans == ((1, 0, 50),)
    assert second.spans == ((1, 50, 100),)
    assert second.holding == first.holding == ((0, 100),)
    third = order_of(work, 0)
    assert third.spans == ((2, 0, 50),)
    assert third.holding == ((0, 100), (200, 300))


def test_a_node_without_samples_gets_no_order_until_the_next_batch() -> None:
    work = held_work(200, 2, expect=1)
    work.join(0, 1.0)
    work.join(1, 1.0)
    assert work.held == {0: 100, 1: 0}
    assert work.order(1, 0) is None
    do_pass(work, 0, 0.01)
    assert work.held == {0: 100, 1: 100}
    assert order_of(work, 1).samples == 100


def test_a_lost_nodes_samples_go_to_the_others_with_the_next_batch() -> None:
    work = held_work(600, 2, expect=3)
    for node in range(3):
        work.join(node, 1.0)
    work.leave(2)
    assert work.held == {0: 100, 1: 100}
    do_pass(work, 0, 0.01)
    do_pass(work, 1, 0.01)
    assert work.held == {0: 300, 1: 300}


def test_a_node_that_is_lost_holds_no_batch_up() -> None:
    work = held_work(600, 2, expect=3)
    for node in range(3):
        work.join(node, 1.0)
    do_pass(work, 0, 0.01)
    do_pass(work, 1, 0.01)
    assert work.held == {0: 100, 1: 100, 2: 100}
    work.leave(2)
    assert work.held == {0: 300, 1: 300}


def test_who_comes_last_gets_all_that_others_left() -> None:
    work = held_work(600, 1, expect=2)
    work.join(0, 1.0)
    work.join(1, 1.0)
    work.leave(0)
    work.leave(1)
    work.join(2, 5.0)
    assert work.held == {2: 600}


def test_samples_that_travel_are_announced_a_pass_before_they_are_used() -> None:
    work = held_work(400, 2, expect=2, sent=True)
    work.join(0, 1.0)
    work.join(1, 1.0)
    first = [do_pass(work, node, 0.01) for node in (0, 1)]
    assert [(o.holding, o.coming) for o in first] == [(((0, 100),), ()), (((100, 200),), ())]
    announced = [do_pass(work, node, 0.01) for node in (0, 1)]
    assert [(o.samples, o.holding, o.coming) for o in announced] == [
        (100, ((0, 100),), ((200, 300),)),
        (100, ((100, 200),), ((300, 400),)),
    ]
    used = [do_pass(work, node, 0.01) for node in (0, 1)]
    assert [(o.samples, o.holding, o.coming) for o in used] == [
        (200, ((0, 100), (200, 300)), ()),
        (200, ((100, 200), (300, 400)), ()),
    ]


# ------------------------------------------------------------------ how much


def test_an_interval_cuts_a_pass_into_stretches() -> None:
    work = held_work(95, 1, expect=1, every=4)
    work.join(0, 1.0)
    orders = [do_pass(work, 0, 0.01) for _ in range(4)]
    assert [order.spans for order in orders] == [
        ((0, 0, 40),),
        ((0, 40, 80),),
        ((0, 80, 95),),
        ((1, 0, 40),),
    ]
    assert [order.steps for order in orders] == [4, 4, 2, 4]
    assert [order.number for order in orders] == [1, 2, 3, 4]


def test_it_is_over_when_as_much_was_trained_as_all_epochs_have() -> None:
    work = held_work(100, 1, expect=2, epochs=2)
    work.join(0, 1.0)
    work.join(1, 1.0)
    for _ in range(3):
        do_pass(work, 0, 0.01)
        assert not work.is_over
    do_pass(work, 1, 0.01)
    assert work.is_over
    assert work.order(0, 0) is None


def test_orders_say_what_all_nodes_train_meanwhile() -> None:
    work = held_work(400, 1, expect=2)
    work.join(0, 1.0)
    work.join(1, 3.0)
    assert [order_of(work, node).meanwhile for node in (0, 1)] == [400, 400]


@pytest.mark.parametrize("mode", ["cumulative", "per-batch", "nominal", "uniform"])
@given(
    samples=st.integers(0, 300),
    batches=st.integers(1, 5),
    expect=st.integers(1, 3),
    sent=st.booleans(),
    happenings=st.lists(
        st.tuples(
            st.sampled_from(["pass"] * 6 + ["join", "join", "leave", "void"]),
            st.integers(0, 3),
            st.floats(0.001, 10),
        ),
        max_size=50,
    ),
)
def test_no_sample_is_held_twice_and_none_is_lost(
    mode: str,
    samples: int,
    batches: int,
    expect: int,
    sent: bool,
    happenings: list[tuple[str, int, float]],
) -> None:
    work = held_work(samples, batches, expect, mode=mode, sent=sent)
    members: set[int] = set()
    for what, node, value in happenings:
        if what == "join":
            work.join(node, value)
            members.add(node)
        elif what == "leave":
            work.leave(node)
            members.discard(node)
        elif what == "void":
            work.void(node)
        elif node in members:
            order = work.order(node, 0)
            if order is not None:
                size = sum(stop - start for start, stop in order.holding)
                assert 0 < order.samples <= size <= work.held[node]
                assert order.spans[-1].stop <= size
                work.finish(node, order, order.samples * value, 0.0)
        assert set(work.held) == members
        owned = [part for held in work._nodes.values() for part in held.ranges]
        places = [place for part in (*owned, *work._free) for place in part]
        assert sorted(places) == list(range(work._place))
        assert work._place + sum(work._volumes) == samples


def test_a_node_of_unknown_speed_gets_orders_too() -> None:
    work = held_work(100, 1, expect=1)
    work.join(0, 0.0)
    assert order_of(work, 0).meanwhile == 100


def test_after_a_restart_nobody_waits_for_nodes_that_were_lost_before() -> None:
    before = held_work(300, 1, expect=3, epochs=10)
    for node in range(3):
        before.join(node, 1.0)
    do_pass(before, 0, 0.01)
    before.leave(2)
    after = held_work(300, 1, expect=3, epochs=10)
    after.restore(json.loads(json.dumps(before.state())))
    after.join(0, 1.0)
    assert after.order(0, 100) is None  # of the two, one is not back yet
    after.join(1, 1.0)
    assert after.held == {0: 150, 1: 150}
    for _ in range(20):
        assert not after.is_over
        do_pass(after, 0, 0.01)
    assert after.is_over
