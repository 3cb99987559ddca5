"""The order of jobs and the versions they read: the paper's vectors, and an event simulator."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.pipeline.schedule import (
    Job,
    held_at_most,
    hybrid_speedup,
    jobs_of,
    lead_of,
    paper_timeline,
    version_read,
)

ORDERS = ["stale", "1f1b"]


def simulate(
    stages: int, order: str, batches: int, seconds: list[tuple[int, int]]
) -> list[dict[Job, int]]:
    """Run a pipeline by events: each stage does its next job as soon as its input is there.

    Returns the number of updates that each stage's weights had when each job read them.
    """
    queues = [deque(jobs_of(lead_of(order, stages, stage), batches)) for stage in range(stages)]
    arrived: set[tuple[int, Job]] = {(0, Job(m, "forward")) for m in range(batches)}
    busy_until, updates = [0] * stages, [0] * stages
    read: list[dict[Job, int]] = [{} for _ in range(stages)]
    coming: list[tuple[int, int, Job]] = []  # when, where, what
    now = 0
    while any(queues):
        arrived |= {(stage, job) for when, stage, job in coming if when <= now}
        coming = [each for each in coming if each[0] > now]
        for stage, queue in enumerate(queues):
            if not queue or busy_until[stage] > now:
                continue
            job = queue[0]
            own = stage == stages - 1 and job.kind == "backward"
            if not own and (stage, job) not in arrived:
                continue
            queue.popleft()
            read[stage][job] = updates[stage]
            updates[stage] += job.kind == "backward"
            busy_until[stage] = now + seconds[stage][job.kind == "backward"]
            after = stage + 1 if job.kind == "forward" else stage - 1
            if 0 <= after < stages:
                coming.append((busy_until[stage], after, job))
        now += 1
        assert now < 10_000, "the pipeline stands still"
    return read


@given(
    st.integers(1, 6),
    st.sampled_from(ORDERS),
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=6, max_size=6),
)
def test_versions_depend_on_the_order_alone(
    stages: int, order: str, batches: int, seconds: list[tuple[int, int]]
) -> None:
    for stage, read in enumerate(simulate(stages, order, batches, seconds)):
        lead = lead_of(order, stages, stage)
        assert len(read) == 2 * batches
        assert read == {job: version_read(lead, job) for job in read}


@pytest.mark.parametrize("cuts", [1, 2, 3, 4, 5])
def test_the_papers_degree_of_staleness(cuts: int) -> None:
    """D_i = 2(K - i + 1), stages counted from 1."""
    for i in range(1, cuts + 2):
        assert lead_of("stale", cuts + 1, i - 1) == 2 * (cuts - i + 1)


@pytest.mark.parametrize("cuts", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("order", ORDERS)
def test_never_more_batches_are_held_than_said(cuts: int, order: str) -> None:
    for stage in range(cuts + 1):
        lead, held, most = lead_of(order, cuts + 1, stage), 0, 0
        for job in jobs_of(lead, 40):
            held += 1 if job.kind == "forward" else -1
            most = max(most, held)
        assert held == 0
        assert most == held_at_most(lead) == lead + 1


def test_vector_a0() -> None:
    """K = 1, four batches on three workers."""
    shown = {(s.cycle, s.worker): (s.job.batch, s.version) for s in paper_timeline(1, 4)}
    assert [shown.get((cycle, 0)) for cycle in range(6)] == [
        *((0, 0), (1, 0), (2, 0), (3, 1)),
        *(None, None),
    ]
    assert [shown.get((cycle, 1)) for cycle in range(6)] == [
        *(None, (0, 0), (1, 1), (2, 2), (3, 3), None),
    ]
    assert [shown.get((cycle, 2)) for cycle in range(6)] == [
        *(None, None, (0, 0), (1, 1), (2, 2), (3, 3)),
    ]


def test_forward_versions_of_two_and_three_cuts() -> None:
    def forwards(cuts: int, stage: int, batches: int) -> list[int]:
        lead = lead_of("stale", cuts + 1, stage)
        return [version_read(lead, Job(m, "forward")) for m in range(batches)]

    assert forwards(2, 0, 7) == [0, 0, 0, 0, 0, 1, 2]
    assert forwards(2, 1, 7) == [0, 0, 0, 1, 2, 3, 4]
    assert forwards(2, 2, 7) == [0, 1, 2, 3, 4, 5, 6]
    assert forwards(3, 0, 9) == [0, 0, 0, 0, 0, 0, 0, 1, 2]


@pytest.mark.parametrize("cuts", [0, 1, 2, 5])
def test_the_papers_timeline_takes_m_plus_2k_cycles_and_no_worker_does_two_jobs(cuts: int) -> None:
    slots = paper_timeline(cuts, 9)
    assert max(slot.cycle for slot in slots) + 1 == 9 + 2 * cuts
    assert {slot.worker for slot in slots} == set(range(2 * cuts + 1))
    by_place: dict[tuple[int, int], set[int]] = {}
    for slot in slots:
        by_place.setdefault((slot.cycle, slot.worker), set()).add(slot.stage)
    assert all(len(stages) == 1 for stages in by_place.values())


def test_one_stage_is_plain_training() -> None:
    assert [(job.kind, job.batch) for job in jobs_of(0, 2)] == [
        *(("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)),
    ]


@pytest.mark.parametrize(("cuts", "expected"), [(1, 1.8), (2, 2.142857), (4, 2.454545)])
def test_the_speed_up_of_hybrid_training(cuts: int, expected: float) -> None:
    assert hybrid_speedup(20_000, 30_000, 2 * cuts + 1) == pytest.approx(expected, abs=1e-6)
    assert hybrid_speedup(20_000, 30_000, 1e12) == pytest.approx(3.0)
    assert hybrid_speedup(0, 30_000, 3) == 1.0
