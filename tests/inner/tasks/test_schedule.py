"""List scheduling: the makespans of the notes, and what must hold for any graph."""

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.inner.tasks.priorities import Kind, order_of
from convoy.inner.tasks.report import make_report
from convoy.inner.tasks.schedule import simulate
from convoy.inner.tasks.timeline import Timeline
from tests.inner.tasks.graphs import DAG_1, DAG_2, Graph, graphs

KINDS = st.sampled_from(["rank", "level"])
THREADS = st.integers(1, 6)


@pytest.mark.parametrize(("threads", "makespan"), [(1, 33), (2, 19), (3, 19), (4, 15)])
def test_dag_1_takes_as_long_as_the_notes_say(threads: int, makespan: float) -> None:
    report = make_report(DAG_1.run(threads))
    assert report.makespan_s == makespan
    assert (report.work_s, report.critical_s) == (33, 15)


def test_dag_1_on_two_threads_is_even() -> None:
    assert make_report(DAG_1.run(2)).busy_s == (17, 16)


def test_dag_2_shows_that_levels_lose() -> None:
    assert make_report(DAG_2.run(2, "rank")).makespan_s == 11
    assert make_report(DAG_2.run(2, "level")).makespan_s == 12


def test_the_best_task_goes_to_the_thread_that_has_worked_least() -> None:
    # After 2 s both threads are free; thread 1 has worked for one of them only.
    timeline = simulate([2, 1, 5], [[2], [], []], [7, 1, 5], 2)
    placed = {span.task: (span.thread, span.start_s) for span in timeline.spans}
    assert placed == {0: (0, 0), 1: (1, 0), 2: (1, 2)}


def test_of_equals_the_first_task_and_the_first_thread_go_first() -> None:
    timeline = simulate([1] * 4, [[]] * 4, [0] * 4, 2)
    placed = [(span.task, span.thread, span.start_s) for span in timeline.spans]
    assert placed == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]


def test_names_kinds_and_predecessors_are_handed_on() -> None:
    timeline = simulate([1, 1], [[1], []], [1, 0], 1, names=["a", "b"], kinds=["forward", "error"])
    first, second = timeline.spans
    assert (first.name, first.kind, first.after) == ("a", "forward", ())
    assert (second.name, second.kind, second.after, second.ready_s) == ("b", "error", (0,), 1.0)


@pytest.mark.parametrize(
    ("costs", "edges", "order", "threads", "words"),
    [
        ([1, 1], [[1], [0]], [0, 0], 1, "in a circle"),
        ([1], [[]], [0], 0, "need a thread"),
        ([-1], [[]], [0], 1, "0 or more"),
        ([float("nan")], [[]], [0], 1, "0 or more"),
        ([1], [[]], [0, 1], 1, "1 costs and 2 priorities for 1 tasks"),
    ],
)
def test_what_cannot_be_scheduled_is_refused(
    costs: list[float], edges: list[list[int]], order: list[float], threads: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        simulate(costs, edges, order, threads)


def test_no_tasks_take_no_time() -> None:
    assert simulate([], [], [], 2) == Timeline(2, ())


@given(graph=graphs(), threads=THREADS, kind=KINDS)
def test_every_task_runs_once_for_its_time_after_those_it_needs(
    graph: Graph, threads: int, kind: Kind
) -> None:
    timeline = graph.run(threads, kind)
    spans = {span.task: span for span in timeline.spans}
    assert len(timeline.spans) == len(spans) == len(graph.costs)
    for task, span in spans.items():
        assert span.end_s - span.start_s == graph.costs[task]
        assert span.ready_s == max((spans[before].end_s for before in span.after), default=0.0)
        assert span.start_s >= span.ready_s
        assert 0 <= span.thread < threads


@given(graph=graphs(), threads=THREADS, kind=KINDS)
def test_no_thread_does_two_things_at_once(graph: Graph, threads: int, kind: Kind) -> None:
    timeline = graph.run(threads, kind)
    for thread in range(threads):
        own = sorted((s.start_s, s.end_s) for s in timeline.spans if s.thread == thread)
        assert all(before[1] <= after[0] for before, after in pairwise(own))


@given(graph=graphs(), threads=THREADS, kind=KINDS)
def test_the_makespan_lies_between_its_bound_and_grahams(
    graph: Graph, threads: int, kind: Kind
) -> None:
    report = make_report(graph.run(threads, kind))
    graham_s = report.work_s / threads + report.critical_s * (1 - 1 / threads)
    assert report.bound_s - 1e-9 <= report.makespan_s <= graham_s + 1e-9


@given(graph=graphs(), threads=THREADS, kind=KINDS)
def test_nobody_is_idle_while_a_task_could_run(graph: Graph, threads: int, kind: Kind) -> None:
    spans = graph.run(threads, kind).spans
    for span in spans:
        for moment in (span.ready_s, (span.ready_s + span.start_s) / 2):
            if moment < span.start_s:
                assert sum(s.start_s <= moment < s.end_s for s in spans) == threads


@given(graph=graphs(), threads=THREADS, kind=KINDS)
def test_twice_the_cost_takes_twice_the_time_in_the_same_order(
    graph: Graph, threads: int, kind: Kind
) -> None:
    twice = Graph(graph.names, tuple(2 * cost for cost in graph.costs), graph.successors)
    slow, fast = twice.run(threads, kind).spans, graph.run(threads, kind).spans
    assert [(s.task, s.thread, s.start_s / 2) for s in slow] == [
        (s.task, s.thread, s.start_s) for s in fast
    ]


@given(graph=graphs())
def test_one_thread_takes_as_long_as_all_work(graph: Graph) -> None:
    report = make_report(graph.run(1))
    assert report.makespan_s == report.work_s == sum(graph.costs)


def test_20000_tasks_are_scheduled_at_once() -> None:
    count, source = 20_000, random.Random(0)
    successors = [
        [min(i + source.randint(1, 60), count - 1) for _ in range(3)] for i in range(count)
    ]
    successors[-1] = []
    successors = [sorted(set(after) - {i}) for i, after in enumerate(successors)]
    costs = [source.random() for _ in range(count)]
    started = time.perf_counter()
    timeline = simulate(costs, successors, order_of("rank", costs, successors), 16)
    assert make_report(timeline).closeness > 0.9
    assert time.perf_counter() - started < 5
