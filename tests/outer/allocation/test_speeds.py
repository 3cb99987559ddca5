"""Speeds are read from the last steps, whatever one step says."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.outer.allocation.speeds import SpeedBook


def _observe(book: SpeedBook, speeds: list[float], shares: list[int], steps: int = 1) -> None:
    for _ in range(steps):
        book.observe(shares, [n / speed for n, speed in zip(shares, speeds, strict=True)])


def test_guesses_count_until_a_node_was_measured() -> None:
    book = SpeedBook([100.0, 50.0])
    assert book.speeds == (100.0, 50.0)
    book.observe([64, 0], [0.5, 0.0])
    assert book.speeds == pytest.approx((128.0, 50.0))
    book.observe([64, 32], [0.5, 2.0])
    assert book.speeds == pytest.approx((128.0, 16.0))


def test_the_first_step_with_a_new_share_does_not_count() -> None:
    book = SpeedBook([1.0])
    _observe(book, [80], [64], steps=3)
    _observe(book, [30], [60])  # kernels are made for the new shape
    assert book.speeds == pytest.approx((80,))
    _observe(book, [60], [60], steps=20)
    assert book.speeds == pytest.approx((60,))


def test_shares_that_come_again_count_from_the_first_step_on() -> None:
    book = SpeedBook([1.0])
    for _ in range(20):  # epochs of two steps, the second with a smaller batch
        _observe(book, [80], [64])
        _observe(book, [80], [10])
    for _ in range(20):
        _observe(book, [40], [64])
        _observe(book, [40], [10])
    assert book.speeds == pytest.approx((40,))


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("factor", [0.001, 0.5, 2.0, 1000.0])
def test_one_outlier_among_five_steps_does_not_move_the_speed(place: int, factor: float) -> None:
    book = SpeedBook([1.0, 1.0])
    for step in range(5):
        _observe(book, [80 * (factor if step == place else 1), 20], [48, 16])
    assert book.speeds == pytest.approx((80, 20))


def test_an_outlier_at_either_end_does_not_move_the_speed() -> None:
    book = SpeedBook([1.0])
    for speed in (80.0, 1.0, 80.0, 1000.0, 80.0):
        _observe(book, [speed], [64])
    assert book.speeds == pytest.approx((80,))


def test_short_steps_are_remembered_for_a_second() -> None:
    book = SpeedBook([1.0])
    _observe(book, [1000.0], [20], steps=100)  # 20 ms each
    _observe(book, [500.0], [20], steps=5)
    assert book.speeds[0] > 900
    _observe(book, [500.0], [20], steps=60)
    assert book.speeds == pytest.approx((500,))


@pytest.mark.parametrize("new", [20.0, 320.0])
def test_a_real_change_is_followed_after_two_steps(new: float) -> None:
    book = SpeedBook([80.0])
    _observe(book, [80], [64], steps=50)
    _observe(book, [new], [64])
    assert book.speeds == pytest.approx((80,))
    _observe(book, [new], [64])
    assert book.speeds == pytest.approx((new,))


def test_where_one_node_has_changed_all_are_judged_anew() -> None:
    book = SpeedBook([80.0, 40.0])
    _observe(book, [80, 40], [64, 32], steps=20)
    _observe(book, [20, 50], [64, 32], steps=2)
    assert book.speeds == pytest.approx((20, 50))


def test_what_lies_more_than_ten_steps_back_is_forgotten() -> None:
    book = SpeedBook([1.0])
    _observe(book, [60], [64], steps=1000)
    _observe(book, [70], [64], steps=8)  # no change that is followed at once
    assert book.speeds == pytest.approx((70,))


def test_a_step_without_a_share_says_nothing_of_a_node() -> None:
    book = SpeedBook([10.0, 10.0])
    _observe(book, [40, 20], [32, 32], steps=5)
    for _ in range(5):
        book.observe([64, 0], [1.6, 0.7])
    assert book.speeds == pytest.approx((40, 20))


@pytest.mark.parametrize("time_s", [0.0, -1.0])
def test_a_time_that_cannot_be_is_ignored(time_s: float) -> None:
    book = SpeedBook([10.0])
    book.observe([64], [time_s])
    assert book.speeds == (10.0,)


def test_speeds_do_not_depend_on_the_shares_they_were_measured_with() -> None:
    book = SpeedBook([1.0, 1.0])
    for share in (8, 16, 48, 56, 8):
        _observe(book, [40, 20], [share, 64 - share])
    assert book.speeds == pytest.approx((40, 20))


def test_numbers_for_another_group_are_refused() -> None:
    book = SpeedBook([1.0, 1.0])
    with pytest.raises(ValueError, match="zip"):
        book.observe([64], [1.0])


def test_the_exchange_is_the_median_of_what_the_last_to_arrive_waited() -> None:
    book = SpeedBook([1.0, 1.0, 1.0])
    assert book.exchange_s == 0.0
    book.observe_waits([0.5, 0.01, 0.3])
    assert book.exchange_s == 0.01
    for last_s in (0.02, 0.03, 9.0, 0.04):
        book.observe_waits([last_s + 1, last_s + 0.5, last_s])
    assert book.exchange_s == 0.03
    for _ in range(14):
        book.observe_waits([5.0, 6.0, 0.05])  # the first ones are forgotten now
    assert book.exchange_s == 0.05


def test_no_exchange_takes_less_than_no_time() -> None:
    book = SpeedBook([1.0, 1.0])
    book.observe_waits([-0.001, 0.2])
    assert book.exchange_s == 0.0


@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 6), steps=st.integers(0, 12))
def test_two_books_fed_the_same_numbers_agree_to_the_bit(seed: int, nodes: int, steps: int) -> None:
    rng = random.Random(seed)
    guesses = [rng.uniform(1, 100) for _ in range(nodes)]
    one, other = SpeedBook(guesses), SpeedBook(tuple(guesses))
    for _ in range(steps):
        shares = [rng.randint(0, 64) for _ in range(nodes)]
        times, waits = ([rng.uniform(0, 2) for _ in range(nodes)] for _ in range(2))
        for book in (one, other):
            book.observe(shares, times)
            book.observe_waits(waits)
        assert one.speeds == other.speeds
        assert one.exchange_s == other.exchange_s
