"""Pipelines in time: laws of every order, and the known figures of equal stages."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.pipeline.schedule import Job, held_at_most, lead_of, paper_timeline, version_read
from convoy.pipeline.timeline import (
    SYNCHRONOUS,
    Pace,
    Timeline,
    seconds_of,
    simulate,
    simulate_steady,
)

SECONDS = st.sampled_from([0.5, 1.0, 1.5, 2.0, 7.0])  # halves add up without rounding


@st.composite
def paces(draw: st.DrawFn) -> Pace:
    stages = draw(st.integers(1, 5))
    times = [
        tuple(draw(st.lists(SECONDS, min_size=count, max_size=count)))
        for count in (stages, stages, stages - 1)
    ]
    return Pace(times[0], times[1], times[2] if draw(st.booleans()) else ())


ORDERS = st.one_of(
    st.tuples(st.sampled_from(["stale", "1f1b", "plain"]), st.just(1)),
    st.tuples(st.sampled_from(["gpipe", "1f1b-sync"]), st.sampled_from([1, 2, 4, 8])),
)


@st.composite
def timelines(draw: st.DrawFn) -> tuple[Pace, Timeline]:
    pace, (order, parts) = draw(paces()), draw(ORDERS)
    return pace, simulate(pace, order, draw(st.integers(1, 9)), parts)


@given(timelines())
def test_every_job_is_done_once_and_no_stage_does_two_at_once(made: tuple[Pace, Timeline]) -> None:
    pace, timeline = made
    for stage, spans in enumerate(timeline.by_stage()):
        done = {(span.kind, span.batch, span.part) for span in spans}
        assert len(spans) == len(done) == 2 * timeline.batches * timeline.parts
        assert all(a.end_s <= b.start_s for a, b in pairwise(spans))
        for span in spans:
            seconds = pace.of(stage, span.kind) / timeline.parts
            assert span.end_s - span.start_s == pytest.approx(seconds)


@given(timelines())
def test_no_job_starts_before_its_input_has_arrived(made: tuple[Pace, Timeline]) -> None:
    pace, timeline = made
    places = {(s.stage, s.kind, s.batch, s.part): s for s in timeline.spans}
    for span in timeline.spans:
        earlier = span.stage + (-1 if span.kind == "forward" else 1)
        before = places.get((earlier, span.kind, span.batch, span.part))
        if before is not None:
            cut = min(span.stage, earlier)
            transfer = pace.transfer_s[cut] / timeline.parts if pace.transfer_s else 0.0
            assert span.start_s >= before.end_s + transfer - 1e-9
        if span.kind == "backward":
            assert span.start_s >= places[span.stage, "forward", span.batch, span.part].end_s


@given(timelines())
def test_a_stage_never_waits_without_a_reason(made: tuple[Pace, Timeline]) -> None:
    """Where transfers cost nothing, a job starts the moment that its stage or its input is free."""
    pace, timeline = made
    if any(pace.transfer_s):
        return
    ends = {span.end_s for span in timeline.spans}
    assert all(span.start_s == 0.0 or span.start_s in ends for span in timeline.spans)


@given(timelines())
def test_the_versions_read_are_those_of_the_schedule(made: tuple[Pace, Timeline]) -> None:
    _, timeline = made
    for span in timeline.spans:
        if timeline.order in SYNCHRONOUS:
            assert span.version == span.batch
        else:
            lead = lead_of(timeline.order, timeline.stages, span.stage)
            assert span.version == version_read(lead, Job(span.batch, span.kind))


@given(timelines())
def test_never_more_is_held_than_said(made: tuple[Pace, Timeline]) -> None:
    _, timeline = made
    for stage, held in enumerate(timeline.held):
        after = timeline.stages - 1 - stage
        most = {
            "gpipe": 1.0,
            "plain": 1.0,
            "1f1b-sync": min(1.0, (after + 1) / timeline.parts),
        }
        if timeline.order in most:
            assert held == most[timeline.order]
        else:
            assert held <= held_at_most(lead_of(timeline.order, timeline.stages, stage))


@given(timelines())
def test_utilisation_is_a_part(made: tuple[Pace, Timeline]) -> None:
    _, timeline = made
    assert all(0 < part <= 1 + 1e-9 for part in timeline.utilisation)
    assert 0 <= timeline.bubble + 1e-9 < 1


@given(st.sampled_from(["stale", "1f1b"]), st.integers(1, 6), SECONDS, SECONDS, st.integers(0, 10))
def test_equal_stages_never_wait_in_the_steady_state(
    order: str, stages: int, forward: float, backward: float, more: int
) -> None:
    pace = Pace((forward,) * stages, (backward,) * stages)
    lead = lead_of(order, stages, 0)
    timeline = simulate(pace, order, lead + 2 + more)
    assert timeline.utilisation == pytest.approx((1.0,) * stages)
    assert timeline.bubble == pytest.approx(0.0)
    assert timeline.period_s == pytest.approx(forward + backward)


@given(
    st.sampled_from(["gpipe", "1f1b-sync"]), st.integers(1, 6), st.integers(1, 8), SECONDS, SECONDS
)
def test_the_bubble_of_gpipe(
    order: str, stages: int, parts: int, forward: float, backward: float
) -> None:
    pace = Pace((forward,) * stages, (backward,) * stages)
    timeline = simulate(pace, order, 2, parts)
    assert timeline.bubble == pytest.approx((stages - 1) / (parts + stages - 1))


@given(paces())
def test_plain_stages_take_turns(pace: Pace) -> None:
    alone_s = sum(pace.forward_s) + sum(pace.backward_s) + 2 * sum(pace.transfer_s)
    timeline = simulate(pace, "plain", 3)
    assert timeline.makespan_s == pytest.approx(3 * alone_s)
    assert timeline.period_s == pytest.approx(alone_s)
    assert simulate(pace, "gpipe", 3).spans == timeline.spans


@given(paces(), st.sampled_from(["stale", "1f1b"]))
def test_no_pipeline_is_faster_than_its_slowest_stage_or_link(pace: Pace, order: str) -> None:
    slowest = max(f + b for f, b in zip(pace.forward_s, pace.backward_s, strict=True))
    slowest = max([slowest, *pace.transfer_s])
    timeline = simulate(pace, order, 60)
    assert timeline.makespan_s >= 60 * slowest
    if not any(pace.transfer_s):
        assert simulate_steady(pace, order).period_s == pytest.approx(slowest)


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_a_longer_lead_hides_transfers(stages: int) -> None:
    """1F1B leaves no room for transfers: each batch waits for them on its way there and back."""
    pace = Pace((1.0,) * stages, (2.0,) * stages, (1.0,) * (stages - 1))
    slowed = 3.0 + 2 * 1.0 * (stages - 1) / stages
    assert simulate_steady(pace, "1f1b").period_s == pytest.approx(slowed)
    assert simulate_steady(pace, "stale").period_s == pytest.approx(3.0)


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize(("transfer", "period"), [(0.4, 3.0), (0.5, 3.0), (0.8, 3.3)])
def test_gradients_that_are_sent_first_hide_transfers(
    stages: int, transfer: float, period: float
) -> None:
    """Transfers are hidden that take up to half of what is postponed, here a second in all."""
    pace = Pace((1.0,) * stages, (2.0,) * stages, (transfer,) * (stages - 1), postponed=0.5)
    found = simulate_steady(pace, "1f1b").period_s
    slowed = 2 * (transfer - 0.5) * (stages - 1) / stages  # what is not hidden
    assert found == pytest.approx(3.0 + max(0.0, slowed))
    assert stages != 2 or found == pytest.approx(period)


def test_stages_in_turn_overlap_what_is_postponed() -> None:
    """Stage 0 computes backward while stage 1 still computes what its weights get."""
    pace = Pace((1.0, 1.0), (2.0, 2.0), postponed=0.5)
    assert simulate_steady(pace, "plain").period_s == pytest.approx(5.0)
    assert simulate_steady(pace, "gpipe").period_s == pytest.approx(6.0)  # PyTorch's does not


@settings(max_examples=30)
@given(paces(), st.sampled_from(["stale", "1f1b"]))
def test_the_steady_state_is_that_of_the_long_run(pace: Pace, order: str) -> None:
    long_s, longer_s = (simulate(pace, order, batches).makespan_s for batches in (400, 640))
    expected = (longer_s - long_s) / 240  # 240 is a multiple of most patterns
    assert simulate_steady(pace, order).period_s == pytest.approx(expected, rel=0.02)


def test_a_link_carries_one_message_at_a_time() -> None:
    timeline = simulate(Pace((1.0, 1.0), (1.0, 1.0), (5.0,)), "stale", 3)
    starts = [s.start_s for s in timeline.spans if (s.stage, s.kind) == (1, "forward")]
    assert starts == [6.0, 11.0, 16.0]


def test_two_equal_stages_one_forward_one_backward() -> None:
    timeline = simulate(Pace((1.0, 1.0), (1.0, 1.0)), "1f1b", 4)
    drawn = [
        {span.start_s: f"{span.kind[0].upper()}{span.batch}" for span in spans}
        for spans in timeline.by_stage()
    ]
    rows = [" ".join(row.get(float(time), "..") for time in range(10)) for row in drawn]
    assert rows == ["F0 F1 .. B0 F2 B1 F3 B2 .. B3", ".. F0 B0 F1 B1 F2 B2 F3 B3 .."]


@pytest.mark.parametrize(("order", "parts"), [("stale", 1), ("1f1b", 1), ("gpipe", 4)])
@pytest.mark.parametrize("batches", [1, 3, 150])
def test_the_seconds_of_an_epoch_need_no_simulation_of_it(
    order: str, parts: int, batches: int
) -> None:
    pace = Pace((1.0, 2.0, 0.5), (2.0, 3.0, 1.5), (0.5, 1.0))
    expected = simulate(pace, order, batches, parts).makespan_s
    assert seconds_of(pace, order, batches, parts) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("cuts", [1, 2, 3])
def test_the_papers_own_picture_reads_the_same_versions(cuts: int) -> None:
    """2K+1 workers or K+1: the numbers are the same."""
    timeline = simulate(Pace((1.0,) * (cuts + 1), (1.0,) * (cuts + 1)), "stale", 9)
    ours = [(s.stage, s.kind, s.batch, s.version) for s in timeline.spans]
    paper = [(s.stage, s.job.kind, s.job.batch, s.version) for s in paper_timeline(cuts, 9)]
    assert sorted(ours) == sorted(paper)
