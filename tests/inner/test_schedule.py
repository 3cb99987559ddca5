"""The learning rate rises straight, then falls as its kind says, and never leaves its bounds."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.config import Config
from convoy.inner.schedule import Schedule, make_schedule


def _schedule(steps_per_epoch: int = 10, **options: Any) -> Schedule:
    return make_schedule(Config(**{"epochs": 8, "lr": 0.4, **options}), steps_per_epoch)


@pytest.mark.parametrize("kind", ["cosine", "step", "constant"])
@pytest.mark.parametrize(("warmup", "steps"), [(1.0, 10), (2.5, 25), (0.25, 3)])
def test_the_warm_up_rises_straight_from_its_first_step_to_the_peak(
    kind: str, warmup: float, steps: int
) -> None:
    schedule = _schedule(schedule=kind, warmup_epochs=warmup)
    rates = [schedule.rate(step) for step in range(steps)]
    assert rates == pytest.approx([0.4 * (step + 1) / steps for step in range(steps)])
    assert schedule.rate(steps - 1) == pytest.approx(0.4)


@pytest.mark.parametrize("kind", ["cosine", "step", "constant"])
def test_without_a_warm_up_the_first_step_has_the_peak(kind: str) -> None:
    assert _schedule(schedule=kind, warmup_epochs=0.0).rate(0) == pytest.approx(0.4)


@pytest.mark.parametrize("warmup", [0.0, 1.0, 3.0])
def test_the_cosine_falls_from_the_peak_over_half_of_it_to_zero(warmup: float) -> None:
    schedule = _schedule(schedule="cosine", warmup_epochs=warmup)
    start, end = int(10 * warmup), 80
    assert schedule.rate(start) == pytest.approx(0.4)
    assert schedule.rate((start + end) // 2) == pytest.approx(0.2, abs=0.005)
    assert schedule.rate(end) == pytest.approx(0.0, abs=1e-12)
    rates = [schedule.rate(step) for step in range(start, end + 1)]
    assert all(later < earlier for earlier, later in pairwise(rates))


def test_the_cosine_is_a_cosine() -> None:
    schedule = _schedule(schedule="cosine", warmup_epochs=0.0)
    for step in range(0, 80, 7):
        assert schedule.rate(step) == pytest.approx(0.2 * (1 + math.cos(math.pi * step / 80)))


def test_the_cosine_stays_at_zero_after_its_end() -> None:
    assert _schedule(schedule="cosine").rate(200) == pytest.approx(0.0, abs=1e-12)


def test_a_warm_up_as_long_as_the_run_ends_at_the_peak_then_zero() -> None:
    schedule = _schedule(schedule="cosine", warmup_epochs=8.0)
    assert schedule.rate(79) == pytest.approx(0.4)
    assert schedule.rate(80) == pytest.approx(0.0)


def _falls(schedule: Schedule, total: int) -> dict[int, float]:
    """Return the steps at which the rate changes, with the new rate."""
    rates = [schedule.rate(step) for step in range(total)]
    return {step: rates[step] for step in range(1, total) if rates[step] != rates[step - 1]}


def test_steps_fall_by_default_at_half_and_three_quarters_of_the_run() -> None:
    falls = _falls(_schedule(schedule="step", warmup_epochs=0.0), 80)
    assert falls == {40: pytest.approx(0.04), 60: pytest.approx(0.004)}


def test_steps_fall_at_the_given_epochs_by_the_given_factor() -> None:
    schedule = _schedule(schedule="step", warmup_epochs=0.0, milestones=(2.0, 3.5, 7.0), gamma=0.5)
    expected = {20: pytest.approx(0.2), 35: pytest.approx(0.1), 70: pytest.approx(0.05)}
    assert _falls(schedule, 80) == expected


def test_the_constant_rate_stays_at_the_peak() -> None:
    schedule = _schedule(schedule="constant", warmup_epochs=1.0)
    assert {schedule.rate(step) for step in range(10, 200)} == {0.4}


@given(
    kind=st.sampled_from(["cosine", "step", "constant"]),
    peak=st.floats(0, 10),
    steps_per_epoch=st.integers(1, 500),
    epochs=st.integers(1, 50),
    warmup_tenths=st.integers(0, 500),
    gamma=st.floats(0.001, 1),
    place=st.floats(0, 1.2),
)
def test_the_rate_is_always_between_zero_and_the_peak(
    kind: str,
    peak: float,
    steps_per_epoch: int,
    epochs: int,
    warmup_tenths: int,
    gamma: float,
    place: float,
) -> None:
    schedule = _schedule(
        steps_per_epoch,
        schedule=kind,
        lr=peak,
        epochs=epochs,
        warmup_epochs=min(warmup_tenths / 10, float(epochs)),
        gamma=gamma,
    )
    step = place * epochs * steps_per_epoch
    for rate in (schedule.rate(int(step)), schedule.rate(step)):
        assert 0 <= rate <= peak * (1 + 1e-12)


@pytest.mark.parametrize("kind", ["cosine", "constant"])
@pytest.mark.parametrize("warmup", [0.0, 1.0, 2.5, 8.0])
def test_between_two_steps_the_rate_is_between_theirs(kind: str, warmup: float) -> None:
    schedule = _schedule(schedule=kind, warmup_epochs=warmup)
    for step in range(79):
        here, there = schedule.rate(step), schedule.rate(step + 1)
        for part in (0.01, 0.5, 0.99):
            between = schedule.rate(step + part)
            assert min(here, there) - 1e-12 <= between <= max(here, there) + 1e-12


def test_steps_fall_at_their_very_place_between_two_steps() -> None:
    schedule = _schedule(schedule="step", warmup_epochs=0.0, milestones=(2.05,), gamma=0.5)
    assert [schedule.rate(step) for step in (20, 20.4, 20.6, 21)] == [0.4, 0.4, 0.2, 0.2]
