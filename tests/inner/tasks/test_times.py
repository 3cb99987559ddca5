"""Times as they are shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.inner.tasks.times import show_time, ticks


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (2.5, "2.50 s"),
        (123.4, "123 s"),
        (0.0999, "99.9 ms"),
        (0.09999, "100 ms"),
        (2e-6, "2.00 us"),
    ],
)
def test_three_digits_count(seconds: float, shown: str) -> None:
    assert show_time(seconds) == shown


@given(end_s=st.floats(1e-7, 1e5), at_most=st.integers(3, 20))
def test_an_axis_has_neither_too_many_ticks_nor_too_few(end_s: float, at_most: int) -> None:
    found = ticks(end_s, at_most)
    assert found[0] == 0
    assert found[-1] <= end_s * (1 + 1e-6)
    assert at_most / 3 <= len(found) <= at_most + 2


def test_no_time_has_one_tick() -> None:
    assert ticks(0.0) == [0.0]
