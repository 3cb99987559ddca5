"""Beats: the mean over samples, late ones in the next; nothing that was answered is lost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.outer.merger import Merger, Reply
from convoy.outer.rules.beat import Beat
from convoy.outer.rules.discount import inverse
from convoy.outer.rules.rule import Rule, Submission
from convoy.outer.rules.window import Window
from tests.outer.counting import COUNTING, Counted


def three_nodes(rule: Rule | None = None) -> Merger[float]:
    merger: Merger[float] = Merger(rule or Beat(), 0.0)
    for node in range(3):
        merger.join(node, now=0.0)
    return merger


def late_third() -> Merger[float]:
    """Return a beat that has ended without node 2, at time 21."""
    merger = three_nodes()
    merger.submit(Submission(0, 1, 1.0), now=10.0)
    merger.submit(Submission(1, 1, 3.0), now=11.0)
    assert merger.deadline == 20.0
    assert [reply.node for reply in merger.tick(21.0)] == [0, 1]
    return merger


def test_everybody_in_time_gives_the_mean_over_samples() -> None:
    merger: Merger[np.ndarray] = Merger(Beat(), np.array([1.0, -1.0]))
    merger.join(0)
    merger.join(1)
    assert merger.submit(Submission(0, 1, np.array([1.0, 0.0]), samples=30), 1.0) == []
    replies = merger.submit(Submission(1, 1, np.array([0.0, 2.0]), samples=10), 2.0)
    assert [(reply.node, reply.version, reply.staleness) for reply in replies] == [
        (0, 2, 0),
        (1, 2, 0),
    ]
    assert merger.weights.tolist() == [1.75, -0.5]


def test_a_beat_ends_without_those_who_are_late_but_not_before_its_time() -> None:
    merger = three_nodes()
    merger.submit(Submission(0, 1, 1.0), now=10.0)
    before = merger.deadline
    merger.submit(Submission(1, 1, 3.0), now=11.0)
    assert (before, merger.deadline) == (None, 20.0)  # one of three is no quorum
    assert merger.tick(19.9) == []
    assert [(r.node, r.weights) for r in merger.tick(20.0)] == [(0, 2.0), (1, 2.0)]
    assert merger.deadline is None


def test_a_late_one_is_answered_at_once_and_counts_in_the_next_beat() -> None:
    merger = late_third()
    (reply,) = merger.submit(Submission(2, 1, 4.0, samples=2), now=22.0)
    assert (reply.node, reply.version, reply.weights, reply.staleness) == (2, 2, 2.0, 1)
    for node in range(3):
        merger.submit(Submission(node, 2, 0.0, samples=2), now=30.0)
    assert merger.version == 3
    assert merger.weights == pytest.approx(2.0 + 2**-0.5 * 4.0 * 2 / 8)


def test_age_is_discounted_as_asked_for() -> None:
    merger = three_nodes(Beat(inverse()))
    merger.submit(Submission(0, 1, 0.0), now=1.0)
    merger.submit(Submission(1, 1, 0.0), now=1.0)
    for now in (2.0, 4.0, 6.0):
        merger.tick(now)
        merger.submit(Submission(0, merger.version, 0.0), now + 1)
        merger.submit(Submission(1, merger.version, 0.0), now + 1)
    assert merger.version == 4
    (reply,) = merger.submit(Submission(2, 1, 9.0), now=7.5)
    assert reply.staleness == 3
    merger.submit(Submission(2, 4, 0.0), now=7.6)
    assert merger.weights == pytest.approx(9.0 / 3 / 4)


def test_without_samples_nothing_moves_but_the_version() -> None:
    merger = three_nodes()
    for node in range(3):
        merger.submit(Submission(node, 1, 5.0, samples=0))
    assert (merger.weights, merger.version) == (0.0, 2)


def test_who_is_lost_ends_the_beat_of_those_who_wait() -> None:
    merger = three_nodes()
    merger.submit(Submission(0, 1, 1.0), now=1.0)
    merger.submit(Submission(1, 1, 3.0), now=1.0)
    assert [reply.node for reply in merger.leave(2, now=1.5)] == [0, 1]
    assert merger.weights == 2.0


def test_what_was_answered_outlives_its_node() -> None:
    merger = late_third()
    merger.submit(Submission(2, 1, 4.0), now=22.0)
    merger.leave(2, now=23.0)
    merger.submit(Submission(0, 2, 0.0), now=30.0)
    merger.submit(Submission(1, 2, 0.0), now=30.0)
    assert merger.weights == pytest.approx(2.0 + 2**-0.5 * 4.0 / 3)


def test_what_waits_is_void_when_its_node_is_lost() -> None:
    merger = three_nodes()
    merger.submit(Submission(0, 1, 100.0), now=1.0)
    merger.leave(0, now=1.5)
    merger.submit(Submission(1, 1, 1.0), now=2.0)
    merger.submit(Submission(2, 1, 1.0), now=2.0)
    assert merger.weights == 1.0


def test_flush_merges_what_is_left_and_nothing_twice() -> None:
    merger = late_third()
    merger.submit(Submission(2, 1, 4.0), now=22.0)
    merger.flush(23.0)
    assert merger.weights == pytest.approx(2.0 + 2**-0.5 * 4.0)
    version = merger.version
    merger.flush(24.0)
    assert (merger.version, merger.buffered) == (version, [])


def test_flush_leaves_alone_who_waits_for_an_answer() -> None:
    merger = late_third()
    merger.submit(Submission(2, 1, 4.0), now=22.0)
    merger.submit(Submission(0, 2, 8.0), now=23.0)
    merger.flush(24.0)
    replies = [*merger.leave(1, 25.0), *merger.leave(2, 25.0)]
    assert [reply.node for reply in replies] == [0]
    assert merger.weights == pytest.approx(2.0 + (2**-0.5 * 4.0 + 8.0) / 2)


def test_only_rules_with_a_window_have_a_deadline() -> None:
    merger: Merger[float] = Merger(Counted(), 0.0, window=Window())
    merger.join(0)
    merger.join(1)
    merger.submit(Submission(0, 1, 1.0), now=1.0)
    assert merger.deadline is None
    assert merger.tick(1e9) == []


# ------------------------------------------------------------------ nothing is lost


Ids = tuple[int, ...]
HAPPENINGS = st.lists(
    st.tuples(
        st.sampled_from(["submit"] * 8 + ["join", "join", "tick", "tick", "leave", "flush"]),
        st.integers(0, 2),
        st.sampled_from([0.0, 1.0, 5.0]),
    ),
    min_size=20,
    max_size=60,
)


class Service:
    """A merger and its nodes; notes what was handed in and what was answered."""

    def __init__(self, rule: type[Rule], bound: int | None) -> None:
        self._rule, self._bound = rule, bound
        self.merger: Merger[Ids] = Merger(rule(), (), bound=bound)
        self.training: dict[int, int] = {}  # by node: the version it trains from
        self.pending: dict[int, int] = {}  # by node: what it handed in and was not answered
        self.answered: list[int] = []

    def happen(self, what: str, node: int, number: int, now: float) -> None:
        replies: list[Reply[Ids]] = []
        if what in ("join", "leave"):
            self.pending.pop(node, None)
            self.training.pop(node, None)
        if what == "join":
            replies = [self.merger.join(node, now)]
        elif what == "leave":
            replies = self.merger.leave(node, now)
        elif what == "tick":
            replies = self.merger.tick(now)
        elif what == "flush":
            self.merger.flush(now)
        elif node in self.training:
            self.pending[node] = number
            base = self.training.pop(node)
            replies = self.merger.submit(Submission(node, base, (number,)), now)
        for reply in replies:
            if reply.node in self.pending:
                self.answered.append(self.pending.pop(reply.node))
            self.training[reply.node] = reply.version

    def restart(self) -> None:
        before = self.merger
        self.merger = Merger(self._rule(), before.weights, bound=self._bound)
        self.merger.restore(before.version, before.memory, before.buffered)
        self.pending.clear()
        self.training.clear()

    def check(self) -> None:
        buffered = [i for submission in self.merger.buffered for i in submission.increment]
        assert sorted([*self.merger.weights, *buffered]) == sorted(self.answered)


@settings(max_examples=200)
@given(
    happenings=HAPPENINGS,
    restart_at=st.integers(0, 60),
    bound=st.none() | st.integers(2, 4),
)
@pytest.mark.parametrize("rule", COUNTING)
def test_all_that_was_answered_is_in_the_weights_once_and_nothing_else(
    rule: type[Rule],
    happenings: list[tuple[str, int, float]],
    restart_at: int,
    bound: int | None,
) -> None:
    service = Service(rule, bound)
    now = 0.0
    for number, (what, node, passed) in enumerate(happenings):
        if number == restart_at:
            service.restart()
        now += passed
        service.happen(what, node, number, now)
        service.check()
    for node in range(3):  # whoever still trains leaves, and then nobody waits any more
        if node in service.training:
            service.happen("leave", node, -1, now)
    service.happen("flush", -1, -1, now)
    service.check()
    assert service.merger.buffered == []
