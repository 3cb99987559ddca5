"""The grace window: long enough for those who are a little late, not for those who stumble."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.outer.rules.window import Window


def beats(window: Window, count: int, late: float, beat: float = 10.0, start: float = 0.0) -> float:
    """Let some beats pass in which the last one comes so late; return when the next begins."""
    window.begin(start)
    for _ in range(count):
        window.arrive(start + beat)
        window.arrive(start + beat + late)
        start += beat + late
        window.begin(start)
    return start


def grace_in_a_beat_of_ten(window: Window, now: float) -> float:
    window.arrive(now + 10.0)
    return window.grace


def test_without_experience_a_whole_beat_is_waited() -> None:
    window = Window()
    window.begin(5.0)
    window.arrive(15.0)
    assert window.grace == 10.0
    assert window.closes_at(1, 2) == 25.0


def test_who_is_always_a_little_late_is_waited_for_twice_as_long() -> None:
    window = Window()
    assert grace_in_a_beat_of_ten(window, beats(window, 3, late=2.0)) == pytest.approx(4.0)


@pytest.mark.parametrize(("late", "grace"), [(0.01, 1.0), (9.0, 10.0)])
def test_grace_stays_between_a_tenth_of_a_beat_and_a_whole_one(late: float, grace: float) -> None:
    window = Window()
    assert grace_in_a_beat_of_ten(window, beats(window, 3, late)) == pytest.approx(grace)


def test_one_who_stumbles_changes_nothing() -> None:
    window = Window()
    now = beats(window, 5, late=1.0)
    window.miss(now + 100.0)
    assert grace_in_a_beat_of_ten(window, now) == pytest.approx(2.0)


def test_lateness_of_a_miss_counts_from_the_first_of_its_beat() -> None:
    window = Window()
    window.begin(0.0)
    window.arrive(10.0)
    window.begin(11.0)
    for _ in range(3):
        window.miss(13.0)
    assert grace_in_a_beat_of_ten(window, 11.0) == pytest.approx(6.0)


def test_old_beats_are_forgotten() -> None:
    window = Window()
    now = beats(window, 40, late=4.0)
    now = beats(window, 16, late=1.0, start=now)
    assert grace_in_a_beat_of_ten(window, now) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("present", "live", "closes"),
    [(0, 0, False), (0, 1, False), (1, 1, True), (1, 2, True), (1, 3, False), (2, 3, True)],
)
def test_no_beat_ends_without_half_of_the_nodes(present: int, live: int, closes: bool) -> None:
    window = Window()
    window.begin(0.0)
    window.arrive(1.0)
    assert (window.closes_at(present, live) is not None) is closes


def test_no_beat_ends_before_somebody_is_there() -> None:
    window = Window()
    beats(window, 2, late=1.0)
    assert window.closes_at(3, 3) is None


@given(
    steps=st.lists(st.tuples(st.sampled_from("bam"), st.floats(0, 100)), max_size=60),
    least=st.floats(0, 0.5),
    most=st.floats(0.5, 2),
)
def test_whatever_happens_the_first_waits_neither_too_short_nor_too_long(
    steps: list[tuple[str, float]], least: float, most: float
) -> None:
    window = Window(least=least, most=most)
    window.begin(0.0)
    now = began = 0.0
    first: float | None = None
    for kind, passed in steps:
        now += passed
        if kind == "b":
            window.begin(now)
            began, first = now, None
        elif kind == "a":
            window.arrive(now)
            first = now if first is None else first
        else:
            window.miss(now)
        if first is not None:
            beat = first - began
            assert least * beat <= window.grace <= most * beat
            assert window.closes_at(1, 1) == first + window.grace
