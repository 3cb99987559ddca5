"""Every rule, in whatever order things happen: versions, bases, barriers and bounds."""

import random
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.outer.merger import Merger, Reply
from convoy.outer.rules import catalog
from convoy.outer.rules.bound import least_bound, may_merge
from convoy.outer.rules.catalog import make_rule
from convoy.outer.rules.delta import Delta
from convoy.outer.rules.rule import Rule, Submission
from convoy.outer.rules.sgwu import plain_mean

NODES = 4
RULES: dict[str, Callable[[], Rule]] = {
    text: partial(make_rule, text, NODES)
    for text in (
        *catalog.RULES,
        "agwu:scale=nodes,quality=relative",
        "fedbuff:size=2",
        "delayed-nesterov:every=3",
    )
}


def play(rule: Rule, seed: int, *, bound: int | None = None) -> list[Reply[float]]:
    """Let nodes join, hand in, die and come back in a random order; return all they were told."""
    rng = random.Random(seed)
    merger: Merger[float] = Merger(rule, 0.0, bound=bound)
    busy: dict[int, Reply[float]] = {}  # who trains, and from what
    told: list[Reply[float]] = []

    def hear(replies: list[Reply[float]]) -> None:
        told.extend(replies)
        busy.update({reply.node: reply for reply in replies})

    for now in range(120):
        node = rng.randrange(NODES)
        if merger.deadline is not None and merger.deadline <= now:
            hear(merger.tick(now))
        elif node not in merger.bases:
            hear([merger.join(node, now)])
        elif rng.random() < 0.05 and len(merger.bases) > 1:
            busy.pop(node, None)
            hear(merger.leave(node, now))
        elif node in busy:
            base = busy.pop(node)
            goal = 1.0 + node
            increment = 0.5 * (goal - base.weights)
            hear(
                merger.submit(
                    Submission(
                        node,
                        base.version,
                        increment,
                        samples=rng.randint(1, 9),
                        quality=rng.random(),
                        rate=0.5,
                    ),
                    now,
                )
            )
        check(merger, told)
    return told


def check(merger: Merger[float], told: list[Reply[float]]) -> None:
    versions = [reply.version for reply in told]
    assert versions == sorted(versions)
    assert merger.version <= (versions[-1] if versions else 1) + 1
    assert all(base <= merger.version for base in merger.bases.values())
    outstanding = merger._outstanding
    assert len(outstanding) <= len(merger.bases)
    if merger._rule.needs_base:
        assert set(outstanding) == set(merger.bases.values())


@given(seed=st.integers(0, 10**6))
@pytest.mark.parametrize("name", RULES)
def test_versions_go_up_by_one_and_weights_stay_finite(name: str, seed: int) -> None:
    told = play(RULES[name](), seed)
    assert told
    merged = sorted({reply.version for reply in told})
    assert merged == list(range(merged[0], merged[-1] + 1)) or "fedbuff" in name
    assert all(abs(reply.weights) < 1e6 for reply in told)


@given(seed=st.integers(0, 10**6))
@pytest.mark.parametrize("name", RULES)
def test_the_same_order_gives_the_same_weights(name: str, seed: int) -> None:
    assert play(RULES[name](), seed) == play(RULES[name](), seed)


@given(seed=st.integers(0, 10**6), slack=st.integers(0, 4))
@pytest.mark.parametrize(
    "name", [n for n in RULES if not RULES[n]().has_barrier and "fedbuff" not in n]
)
def test_nothing_older_than_the_bound_is_merged(name: str, seed: int, slack: int) -> None:
    bound = least_bound(NODES) + slack
    told = play(RULES[name](), seed, bound=bound)
    assert max((reply.staleness or 0 for reply in told), default=0) <= bound


@given(seed=st.integers(0, 10**6), slack=st.integers(0, 3), nodes=st.integers(1, 6))
def test_somebody_may_always_go_on(seed: int, slack: int, nodes: int) -> None:
    """With every node waiting, the oldest is let through."""
    rng = random.Random(seed)
    bound = least_bound(nodes) + slack
    merger: Merger[float] = Merger(Delta(), 0.0, bound=bound)
    at = {node: merger.join(node) for node in range(nodes)}
    for _ in range(60):
        node = rng.choice(list(at)) if at else -1
        assert node >= 0, "all nodes are held"
        base = at.pop(node)
        for reply in merger.submit(Submission(node, base.version, 1.0)):
            at[reply.node] = reply


def test_a_fast_node_is_held_before_a_slow_one_becomes_stale() -> None:
    merger: Merger[float] = Merger(Delta(), 0.0, bound=2)
    fast = merger.join(0)
    merger.join(1)
    for _ in range(2):
        (fast,) = merger.submit(Submission(0, fast.version, 1.0))
    assert merger.submit(Submission(0, fast.version, 1.0)) == []  # the slow one would be 3 behind
    slow, released = merger.submit(Submission(1, 1, 1.0))
    assert (slow.node, slow.staleness) == (1, 2)
    assert released.node == 0


def test_a_dead_node_holds_nobody_up() -> None:
    merger: Merger[float] = Merger(Delta(), 0.0, bound=1)
    fast = merger.join(0)
    merger.join(1)
    (fast,) = merger.submit(Submission(0, fast.version, 1.0))
    assert merger.submit(Submission(0, fast.version, 1.0)) == []
    (released,) = merger.leave(1)
    assert released.node == 0
    barrier: Merger[float] = Merger(plain_mean(), 0.0)
    for node in (0, 1, 2):
        barrier.join(node)
    assert barrier.submit(Submission(0, 1, 1.0)) == []
    assert barrier.submit(Submission(1, 1, 3.0)) == []
    replies = barrier.leave(2)
    assert [reply.node for reply in replies] == [0, 1]
    assert barrier.weights == 2.0


def test_what_a_node_handed_in_before_it_came_back_is_void() -> None:
    barrier: Merger[float] = Merger(plain_mean(), 0.0)
    barrier.join(0)
    barrier.join(1)
    barrier.submit(Submission(0, 1, 100.0))
    barrier.join(0)  # a new start of the same node
    assert barrier.submit(Submission(1, 1, 1.0)) == []
    barrier.submit(Submission(0, 1, 3.0))
    assert barrier.weights == 2.0


@pytest.mark.parametrize(
    ("bases", "node", "bound", "may"),
    [
        ({0: 5, 1: 5}, 0, 1, True),
        ({0: 5, 1: 4}, 0, 1, False),
        ({0: 5, 1: 4}, 1, 1, True),
        ({0: 5, 1: 4, 2: 4}, 0, 3, True),
        ({0: 5, 1: 4, 2: 4}, 0, 2, False),  # the second of them would come too late
    ],
)
def test_the_best_order_decides(bases: dict[int, int], node: int, bound: int, may: bool) -> None:
    assert may_merge(node, 5, bases, bound) is may
