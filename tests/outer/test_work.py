"""Orders: whoever joins, leaves or is refused, every sample is trained into the weights once."""

import json
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.outer.work import (
    Order,
    Pace,
    Span,
    Stream,
    StreamWork,
    Terms,
    count_samples,
    cut_spans,
)

SPANS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(1, 20)).map(
        lambda s: Span(s[0], s[1], s[1] + s[2])
    ),
    max_size=6,
)


def places(spans: Iterable[Span]) -> list[tuple[int, int]]:
    return [(span.epoch, place) for span in spans for place in range(span.start, span.stop)]


# ------------------------------------------------------------------ stretches


@given(spans=SPANS, count=st.integers(0, 200))
def test_a_cut_keeps_all_places_in_their_order(spans: list[Span], count: int) -> None:
    first, rest = cut_spans(spans, count)
    assert places([*first, *rest]) == places(spans)
    assert count_samples(first) == min(count, count_samples(spans))
    assert all(span.samples > 0 for span in (*first, *rest))


def test_a_stream_hands_out_epoch_after_epoch() -> None:
    stream = Stream(samples=5, epochs=2)
    assert stream.take(0, 3) == ((0, 0, 3),)
    assert stream.take(1, 4) == ((0, 3, 5), (1, 0, 2))
    assert stream.left == 3
    assert stream.take(0, 9) == ((1, 2, 5),)
    assert stream.take(0, 9) == ()
    assert not stream.is_over


def test_what_comes_back_is_handed_out_first() -> None:
    stream = Stream(samples=10, epochs=1)
    stream.take(0, 4)
    stream.take(1, 2)
    stream.give_back(0)
    assert stream.left == 8
    assert stream.take(2, 3) == ((0, 0, 3),)
    assert stream.take(2, 3) == ((0, 3, 4), (0, 6, 8))


def test_only_what_a_node_has_can_be_finished_and_only_once() -> None:
    stream = Stream(samples=10, epochs=1)
    (span,) = stream.take(0, 4)
    assert stream.finish(1, [span]) == 0
    assert stream.finish(0, [span]) == 4
    assert stream.finish(0, [span]) == 0
    stream.give_back(0)
    assert stream.left == 6


def test_a_stream_goes_on_where_training_stood() -> None:
    stream = Stream(samples=10, epochs=3, start=17)
    assert stream.left == 13
    assert stream.take(0, 5) == ((1, 7, 10), (2, 0, 2))


def test_what_was_under_way_is_open_after_a_restart() -> None:
    before = Stream(samples=10, epochs=2)
    (span,) = before.take(0, 4)
    before.take(1, 3)
    before.take(2, 2)
    before.finish(0, [span])
    before.give_back(2)
    after = Stream(samples=10, epochs=2)
    after.restore(json.loads(json.dumps(before.state())))
    assert after.left == 16
    assert places(after.take(0, 16)) == places([Span(0, 4, 10), Span(1, 0, 10)])


# ------------------------------------------------------------------ every sample once


class Node:
    """What a worker does with orders: the step ahead counts with the next."""

    def __init__(self) -> None:
        self.order: Order | None = None
        self.carried: list[Span] = []

    def submission(self) -> list[Span]:
        assert self.order is not None
        main, _ = cut_spans(self.order.spans, self.order.samples - self.order.ahead)
        return [*self.carried, *main]

    def go_on(self) -> None:
        assert self.order is not None
        _, self.carried = cut_spans(self.order.spans, self.order.samples - self.order.ahead)
        self.order = None


class Run:
    """A service's part of the work, and its nodes."""

    def __init__(self, samples: int, epochs: int, terms: Terms) -> None:
        self._samples, self._epochs, self._terms = samples, epochs, terms
        self.work = StreamWork(Stream(samples, epochs), terms)
        self.nodes: dict[int, Node] = {}
        self.trained: Counter[tuple[int, int]] = Counter()
        self.done = 0

    def join(self, node: int, speed: float) -> None:
        self.work.join(node, speed)
        self.nodes[node] = Node()

    def leave(self, node: int) -> None:
        self.work.leave(node)
        self.nodes.pop(node, None)

    def refuse(self, node: int) -> None:
        if node in self.nodes and self.nodes[node].order is not None:
            self.work.void(node)
            self.nodes[node] = Node()

    def step(self, node: int, seconds: float = 1.0) -> None:
        """Let a node finish what it has, or begin something."""
        worker = self.nodes.get(node)
        if worker is None:
            return
        if worker.order is None:
            worker.order = self.work.order(node, self.done)
            return
        covered = worker.submission()
        finished = self.work.finish(node, worker.order, seconds, 0.1)
        assert finished == count_samples(covered)
        self.trained.update(places(covered))
        self.done += finished
        worker.go_on()

    def restart(self) -> None:
        state = json.loads(json.dumps(self.work.state()))
        self.work = StreamWork(Stream(self._samples, self._epochs), self._terms)
        self.work.restore(state)
        for node in self.nodes:
            self.join(node, 1.0)

    def finish_all(self) -> None:
        if not self.nodes:
            self.join(0, 1.0)
        for _ in range(20 * self._samples * self._epochs + 100):
            if self.work.is_over:
                return
            for node in list(self.nodes):
                self.step(node)
        raise AssertionError("it does not end")


@settings(max_examples=200)
@given(
    samples=st.integers(1, 60),
    epochs=st.integers(1, 3),
    terms=st.builds(
        Terms,
        batch=st.integers(1, 40),
        local_batch=st.just(0) | st.integers(1, 20),
        every=st.integers(0, 5),
        overlap=st.booleans(),
        min_share=st.integers(1, 4),
    ),
    happenings=st.lists(
        st.tuples(
            st.sampled_from(["step"] * 12 + ["join", "leave", "refuse", "refuse", "slow link"]),
            st.integers(0, 2),
            st.floats(0.01, 100),
        ),
        min_size=20,
        max_size=80,
    ),
    restart_at=st.integers(0, 80),
)
def test_whatever_happens_every_sample_of_every_epoch_is_trained_once(
    samples: int,
    epochs: int,
    terms: Terms,
    happenings: list[tuple[str, int, float]],
    restart_at: int,
) -> None:
    run = Run(samples, epochs, terms)
    for node in range(3):
        run.join(node, 1.0)
    for number, (what, node, value) in enumerate(happenings):
        if number == restart_at:
            run.restart()
        if what == "step":
            run.step(node, value)
        elif what == "join":
            run.join(node, value)
        elif what == "leave":
            run.leave(node)
        elif what == "refuse":
            run.refuse(node)
        else:
            run.work.note_exchange(value, 1.0)
        assert run.work.is_over == (run.done == samples * epochs)
    run.finish_all()
    assert run.done == samples * epochs
    assert run.trained == Counter(places(Span(e, 0, samples) for e in range(epochs)))
    assert run.work.order(next(iter(run.nodes)), run.done) is None


def test_the_last_order_has_no_samples_and_hands_in_what_was_done_ahead() -> None:
    work = StreamWork(Stream(samples=30, epochs=1), Terms(batch=10, every=3, overlap=True))
    work.join(0, 1.0)
    first = work.order(0, 0)
    assert first is not None
    assert (first.samples, first.ahead, first.steps) == (30, 10, 2)
    assert work.finish(0, first, 1.0, 0.0) == 20
    last = work.order(0, 20)
    assert last is not None
    assert (last.number, last.spans, last.steps, last.ahead) == (2, (), 0, 0)
    assert (first.carried, last.carried) == (0, 10)
    assert work.finish(0, last, 1.0, 0.0) == 10
    assert work.is_over
    assert work.order(0, 30) is None


def test_without_a_second_step_there_is_none_to_do_ahead() -> None:
    work = StreamWork(Stream(samples=100, epochs=1), Terms(batch=10, every=1, overlap=True))
    work.join(0, 1.0)
    order = work.order(0, 0)
    assert order is not None
    assert (order.samples, order.ahead, order.steps) == (10, 0, 1)


# ------------------------------------------------------------------ how much


def orders(speeds: dict[int, float], terms: Terms) -> dict[int, Order]:
    work = StreamWork(Stream(samples=100_000, epochs=1), terms)
    for node, speed in speeds.items():
        work.join(node, speed)
    found = {node: work.order(node, 0) for node in speeds}
    return {node: order for node, order in found.items() if order is not None}


def test_shares_by_speed_add_up_to_the_batch_and_arrive_together() -> None:
    speeds = {0: 800.0, 1: 600.0, 2: 400.0, 3: 200.0}
    found = orders(speeds, Terms(batch=256, every=4))
    assert [order.samples for order in found.values()] == [408, 308, 204, 104]
    assert {order.steps for order in found.values()} == {4}
    for node, order in found.items():
        assert order.samples / speeds[node] == pytest.approx(1024 / 2000, rel=0.02)
        assert order.meanwhile == pytest.approx(1024, rel=0.02)


@given(
    speeds=st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=6),
    batch=st.integers(6, 500),
    every=st.integers(1, 8),
    overlap=st.booleans(),
)
def test_nobody_is_later_than_the_others_by_more_than_a_sample_a_step(
    speeds: list[float], batch: int, every: int, overlap: bool
) -> None:
    named = dict(enumerate(speeds))
    found = orders(named, Terms(batch=batch, every=every, overlap=overlap, min_share=0))
    ideal = batch * every / sum(speeds)
    for node, order in found.items():
        assert abs(order.samples / speeds[node] - ideal) <= every / speeds[node] + 1e-9


def test_a_local_batch_that_was_asked_for_is_the_same_for_all() -> None:
    found = orders({0: 9.0, 1: 1.0}, Terms(batch=64, local_batch=16, every=2))
    assert [order.samples for order in found.values()] == [32, 32]


def test_the_slowest_still_gets_the_smallest_step() -> None:
    found = orders({0: 1000.0, 1: 0.1}, Terms(batch=64, every=1, min_share=8))
    assert [order.samples for order in found.values()] == [56, 8]


def test_a_node_of_unknown_speed_gets_the_smallest_step() -> None:
    found = orders({0: 10.0, 1: 0.0}, Terms(batch=64, every=1, min_share=8))
    assert [order.samples for order in found.values()] == [64, 8]


def test_shares_follow_what_was_measured_waiting_for_the_exchange_too() -> None:
    work = StreamWork(Stream(samples=10_000, epochs=1), Terms(batch=100, every=1))
    for node in (0, 1):
        work.join(node, 1.0)
    given = [work.order(node, 0) for node in (0, 1)]
    for order, node, busy_s, exchange_s in zip(given, (0, 1), (1.0, 2.0), (0.0, 1.0), strict=True):
        assert order is not None
        work.finish(node, order, busy_s, exchange_s)
    assert work.speeds == {0: pytest.approx(50.0), 1: pytest.approx(50 / 3)}
    again = [work.order(node, 100) for node in (0, 1)]
    assert [order.samples for order in again if order is not None] == [75, 25]


def test_numbers_count_a_nodes_orders_also_after_it_came_back() -> None:
    work = StreamWork(Stream(samples=100, epochs=1), Terms(batch=10))
    found = []
    for _ in range(2):
        work.join(0, 1.0)
        found += [work.order(0, 0), work.order(0, 0)]
    assert [order.number for order in found if order is not None] == [1, 2, 3, 4]


# ------------------------------------------------------------------ how often


@pytest.mark.parametrize(
    ("exchange_s", "every"), [(0.0, 1), (0.1, 1), (0.3, 2), (0.44, 3), (1.5, 10), (1e6, 64)]
)
def test_the_interval_keeps_exchanges_to_a_small_part_of_the_time(
    exchange_s: float, every: int
) -> None:
    work = StreamWork(Stream(samples=100, epochs=1), Terms(batch=10))
    for _ in range(5):
        work.note_exchange(exchange_s, 1.0)
    assert work.every == every


def test_the_interval_does_not_jump_about() -> None:
    work = StreamWork(Stream(samples=100, epochs=1), Terms(batch=10))
    seen = []
    for exchange_s in (1.5, 1.2, 1.4, 0.9, 1.5, 90.0, 1.3):  # one of them is an outlier
        work.note_exchange(exchange_s, 1.0)
        seen.append(work.every)
    assert set(seen) == {10}


def test_the_interval_comes_down_again() -> None:
    work = StreamWork(Stream(samples=100, epochs=1), Terms(batch=10))
    work.note_exchange(1.5, 1.0)
    for _ in range(5):
        work.note_exchange(0.3, 1.0)
    assert work.every == 2


def test_an_interval_that_was_asked_for_stays() -> None:
    work = StreamWork(Stream(samples=100, epochs=1), Terms(batch=10, every=4))
    work.note_exchange(100.0, 1.0)
    assert work.every == 4


def test_a_report_without_a_step_says_nothing_of_the_interval() -> None:
    work = StreamWork(Stream(samples=100, epochs=1), Terms(batch=10))
    work.note_exchange(100.0, 0.0)
    assert work.every == 1


def test_the_interval_is_known_after_a_restart() -> None:
    before, after = (StreamWork(Stream(100, 1), Terms(batch=10)) for _ in range(2))
    before.note_exchange(1.5, 1.0)
    after.restore(json.loads(json.dumps(before.state())))
    assert after.every == 10


# ------------------------------------------------------------------ pace


def test_a_pace_goes_by_the_probe_until_something_was_measured() -> None:
    pace = Pace(200.0)
    assert (pace.speed, pace.time_s) == (200.0, None)
    pace.observe(0, 1.0)
    pace.observe(10, 0.0)
    assert pace.time_s is None
    pace.observe(10, 0.1)
    assert pace.speed == pytest.approx(100.0)


def test_an_outlier_is_passed_over_and_a_change_is_not() -> None:
    pace = Pace(1.0)
    for _ in range(6):
        pace.observe(10, 1.0)
    pace.observe(10, 9.0)
    assert pace.speed == pytest.approx(10.0)
    pace.observe(10, 9.0)
    assert pace.speed == pytest.approx(10 / 9)


# ------------------------------------------------------------------ on the wire


RANGES = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=3).map(tuple)


@given(
    order=st.builds(
        Order,
        number=st.integers(1, 99),
        spans=SPANS.map(tuple),
        steps=st.integers(0, 9),
        ahead=st.integers(0, 9),
        carried=st.integers(0, 9),
        done=st.integers(0, 10**12),
        meanwhile=st.integers(0, 10**9),
        holding=RANGES,
        coming=RANGES,
    )
)
def test_an_order_comes_through_json_as_it_was(order: Order) -> None:
    after = Order.from_dict(json.loads(json.dumps(order.as_dict())))
    assert after == order
    assert hash(after.holding) == hash(order.holding)
    assert after.samples == order.samples
