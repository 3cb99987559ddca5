"""Ranks and levels: the values of the notes, and what must hold for any graph."""

import time
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.inner.tasks.priorities import (
    Kind,
    levels,
    order_of,
    reversed_edges,
    runnable_order,
    upward_ranks,
)
from tests.inner.tasks.graphs import DAG_1, DAG_2, Graph, graphs


def test_dag_1_has_the_ranks_of_the_notes() -> None:
    ranks = dict(zip(DAG_1.names, upward_ranks(DAG_1.costs, DAG_1.successors), strict=True))
    assert ranks == {
        **dict.fromkeys(("c1", "c2", "c3", "c4"), 15),
        **dict.fromkeys(("p1", "p2"), 11),
        **{"f": 10, "L": 7, "bf": 6, "g1": 4, "g2": 4, "gf": 3, "u": 1},
    }
    assert sum(DAG_1.costs) == 33
    assert max(ranks.values()) == 15


def test_dag_2_by_level_does_not_see_the_long_chain() -> None:
    depths = levels(reversed_edges(DAG_2.successors))
    assert depths == [0, 0, 0, 1, 1, 1, 2]
    assert order_of("level", DAG_2.costs, DAG_2.successors) == [0, 0, 0, -1, -1, -1, -2]
    assert order_of("rank", DAG_2.costs, DAG_2.successors) == [2, 2, 11, 1, 1, 10, 5]


@pytest.mark.parametrize("edges", [[[0]], [[1], [0]], [[1], [2], [3], [1]], [[], [2], [1]]])
@pytest.mark.parametrize("kind", ["rank", "level"])
def test_a_circle_is_refused(edges: list[list[int]], kind: Kind) -> None:
    with pytest.raises(ValueError, match="in a circle"):
        order_of(kind, [1.0] * len(edges), edges)


def test_costs_and_tasks_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="1 costs for 2 tasks"):
        upward_ranks([1.0], [[], []])


def test_no_tasks_have_no_order() -> None:
    assert upward_ranks([], []) == []
    assert levels([]) == []


@given(graph=graphs())
def test_the_rank_falls_along_every_edge_by_the_cost_at_least(graph: Graph) -> None:
    ranks = upward_ranks(graph.costs, graph.successors)
    for task, after in enumerate(graph.successors):
        for successor in after:
            assert ranks[task] >= graph.costs[task] + ranks[successor]


@given(graph=graphs(), kind=st.sampled_from(["rank", "level"]))
def test_who_is_needed_never_goes_after_who_needs_it(graph: Graph, kind: Kind) -> None:
    order = order_of(kind, graph.costs, graph.successors)
    places = {task: place for place, task in enumerate(runnable_order(graph.successors))}
    for task, after in enumerate(graph.successors):
        assert all(order[task] >= order[successor] for successor in after)
        assert all(places[task] < places[successor] for successor in after)


@given(graph=graphs(), shuffler=st.randoms(use_true_random=False))
def test_the_rank_does_not_depend_on_the_numbering(graph: Graph, shuffler: Random) -> None:
    new = list(range(len(graph.costs)))
    shuffler.shuffle(new)
    costs, successors = [0.0] * len(new), [[0]] * len(new)
    for task, after in enumerate(graph.successors):
        costs[new[task]] = graph.costs[task]
        successors[new[task]] = [new[successor] for successor in after]
    for kind in ("rank", "level"):
        before = order_of(kind, graph.costs, graph.successors)
        renumbered = order_of(kind, costs, successors)
        assert [renumbered[new[task]] for task in range(len(new))] == before


@pytest.mark.parametrize("kind", ["rank", "level"])
def test_a_chain_of_20000_tasks_is_ordered_at_once(kind: Kind) -> None:
    count = 20_000
    chain = [[i + 1] for i in range(count - 1)] + [[]]
    started = time.perf_counter()
    order = order_of(kind, [1.0] * count, chain)
    assert order[0] - order[-1] == count - 1
    assert time.perf_counter() - started < 2
