"""The figures of a timeline."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.inner.tasks.report import critical_path, make_report
from convoy.inner.tasks.timeline import Help, Span, Timeline
from tests.inner.tasks.graphs import DAG_1, Graph, graphs


def test_dag_1_on_two_threads() -> None:
    report = make_report(DAG_1.run(2))
    assert (report.tasks, report.threads, report.makespan_s) == (13, 2, 19)
    assert report.balance == pytest.approx(16.5 / 17)
    assert [DAG_1.names[task] for task in report.critical][-5:] == ["f", "L", "bf", "g1", "u"]
    assert (report.critical_s, report.critical_wait_s) == (15, 4)
    assert report.bound_s == 16.5
    assert report.closeness == pytest.approx(16.5 / 19)


@pytest.mark.parametrize(("threads", "wait"), [(2, 4), (3, 4), (4, 0)])
def test_of_equal_chains_the_one_that_waited_is_told(threads: int, wait: float) -> None:
    report = make_report(DAG_1.run(threads))
    assert report.critical_wait_s == wait
    assert report.critical_s + report.critical_wait_s == report.makespan_s


def test_measured_times_decide_what_is_critical() -> None:
    spans = (
        Span(10, "a", "forward", 0, 0.0, 0.0, 1.0),
        Span(20, "slow", "error", 1, 1.0, 1.5, 4.5, (10,)),
        Span(30, "quick", "error", 0, 1.0, 1.0, 2.0, (10,)),
        Span(40, "end", "update", 0, 4.5, 4.75, 5.0, (20, 30)),
    )
    report = make_report(Timeline(3, spans[::-1]))
    assert report.critical == (10, 20, 40)
    assert report.critical_s == 4.25
    assert report.critical_wait_s == 0.75
    assert report.busy_s == (2.25, 3.0, 0.0)
    assert report.balance == pytest.approx(5.25 / 9)


def test_help_counts_as_work_of_the_helper() -> None:
    spans = (Span(0, "a", "forward", 0, 0.0, 0.0, 4.0), Span(1, "b", "error", 1, 0.0, 0.0, 2.0))
    report = make_report(Timeline(2, spans, (Help(0, 1, 2.0, 3.5), Help(0, 1, 3.5, 4.0))))
    assert (report.busy_s, report.work_s, report.helps) == ((4.0, 4.0), 8.0, 2)
    assert report.balance == report.closeness == 1.0


def test_all_figures_are_plain_values() -> None:
    report = make_report(DAG_1.run(4))
    assert report.as_dict() == {
        "tasks": 13,
        "threads": 4,
        "makespan_s": 15.0,
        "work_s": 33.0,
        "busy_s": report.busy_s,
        "helps": 0,
        "critical": report.critical,
        "critical_s": 15.0,
        "critical_wait_s": 0.0,
        "balance": report.balance,
        "bound_s": 15.0,
        "closeness": 1.0,
    }


def test_a_step_without_tasks_or_time_is_as_good_as_can_be() -> None:
    nothing = make_report(Timeline(2, ()))
    assert (nothing.makespan_s, nothing.balance, nothing.closeness) == (0, 1, 1)
    no_time = make_report(Timeline(1, (Span(0, "a", "forward", 0, 0.0, 0.0, 0.0),)))
    assert (no_time.critical, no_time.balance, no_time.closeness) == ((0,), 1, 1)


def test_a_task_that_was_not_run_cannot_be_waited_for() -> None:
    spans = (Span(0, "a", "forward", 0, 0.0, 0.0, 1.0, (7,)),)
    with pytest.raises(ValueError, match="task 7 is waited for"):
        make_report(Timeline(1, spans))


@given(graph=graphs(), threads=st.integers(1, 6))
def test_the_critical_path_is_a_chain_and_none_is_longer(graph: Graph, threads: int) -> None:
    timeline = graph.run(threads)
    chain = critical_path(timeline)
    assert all(before.task in after.after for before, after in pairwise(chain))
    ends: dict[int, float] = {}
    for span in sorted(timeline.spans, key=lambda s: s.task):  # edges go to higher numbers
        ends[span.task] = graph.costs[span.task] + max((ends[p] for p in span.after), default=0.0)
    assert sum(graph.costs[span.task] for span in chain) == max(ends.values())


@given(graph=graphs(), threads=st.integers(1, 6), shuffler=st.randoms(use_true_random=False))
def test_the_order_of_the_spans_does_not_matter(
    graph: Graph, threads: int, shuffler: Random
) -> None:
    timeline = graph.run(threads)
    spans = list(timeline.spans)
    shuffler.shuffle(spans)
    shuffled, before = make_report(Timeline(threads, tuple(spans))), make_report(timeline)
    assert shuffled == before
