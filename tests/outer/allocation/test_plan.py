"""Plans: proportional, steady under noise, quick after a change, never worse than one node."""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.outer.allocation.plan import Plan, Rules, make_plan, step_time, worth_calling
from convoy.outer.allocation.speeds import SpeedBook

RULES = Rules(batch=256, min_share=8)
LAB = (80.0, 60.0, 40.0, 20.0)
SPEEDS = st.lists(st.floats(0, 3).map(lambda power: 10**power), min_size=1, max_size=8)
EXCHANGES = st.just(0.0) | st.floats(0, 10)

Cost = Callable[[int, int], float]


class Fleet:
    """Nodes that are timed, booked and planned for, as a group of nodes does it each step."""

    def __init__(self, speeds: Sequence[float], rules: Rules = RULES, noise: float = 0.0) -> None:
        self.speeds = list(speeds)
        self.rules = rules
        self.book = SpeedBook(speeds)
        self.plan = make_plan(speeds, rules)
        self.history = [self.plan.shares]
        self._noise = noise
        self._rng = random.Random(repr((speeds, noise)))

    def step(self, cost: Cost | None = None) -> None:
        shares = self.plan.shares
        exact = [cost(j, n) if cost else n / self.speeds[j] for j, n in enumerate(shares)]
        times = [t * (1 + self._rng.uniform(-self._noise, self._noise)) for t in exact]
        self.book.observe(shares, times)
        self.plan = make_plan(self.book.speeds, self.rules, current=self.plan)
        self.history.append(self.plan.shares)

    def throughput(self) -> float:
        """Return the samples per second that the plan really gives."""
        return self.rules.batch / step_time(self.plan.shares, self.speeds, 0.0)


def _turns(values: Sequence[int]) -> int:
    """Count how often a series that rose falls, or the other way round."""
    moves = [later - earlier for earlier, later in pairwise(values) if later != earlier]
    return sum((a > 0) != (b > 0) for a, b in pairwise(moves))


# ---------------------------------------------------------------- the prediction


def test_a_step_lasts_as_long_as_its_slowest_node_and_the_exchange() -> None:
    assert step_time([60, 40], [30.0, 10.0], 0.5) == pytest.approx(4.5)
    assert step_time([40, 60], [30.0, 10.0], 0.5) == pytest.approx(6.5)


def test_a_node_alone_exchanges_nothing() -> None:
    assert step_time([60], [30.0], 0.5) == pytest.approx(2.0)
    assert step_time([60, 0, 0], [30.0, 10.0, 1.0], 0.5) == pytest.approx(2.0)
    assert step_time([0, 0], [30.0, 10.0], 0.5) == 0.0


def test_a_node_without_a_share_may_have_no_speed() -> None:
    assert step_time([60, 0], [30.0, 0.0], 0.5) == pytest.approx(2.0)


# ---------------------------------------------------------------- shares


def test_shares_are_in_proportion_to_speed() -> None:
    plan = make_plan(LAB, RULES)
    assert plan.shares == (102, 77, 51, 26)
    assert plan.left_out == ()
    assert plan.step_s == step_time(plan.shares, LAB, 0.0) == pytest.approx(1.3)


@given(speeds=SPEEDS, exchange_s=EXCHANGES, batch=st.integers(1, 1024), least=st.integers(1, 32))
def test_a_plan_hands_out_the_batch_and_predicts_its_own_time(
    speeds: list[float], exchange_s: float, batch: int, least: int
) -> None:
    plan = make_plan(speeds, Rules(batch, least), exchange_s=exchange_s)
    assert sum(plan.shares) == batch
    assert plan.step_s == step_time(plan.shares, speeds, exchange_s)
    assert all(plan.shares[left.node] == 0 for left in plan.left_out)
    assert make_plan(tuple(speeds), Rules(batch, least), exchange_s=exchange_s) == plan


def test_nobody_gets_more_samples_than_it_has_the_memory_for() -> None:
    assert make_plan([3.0, 1.0], Rules(64, 1, most=(24, 1000))).shares == (24, 40)
    # The slow node costs more than it brings, but the fast one cannot hold the batch.
    assert make_plan([100.0, 1.0], Rules(64, 8)).shares == (64, 0)
    assert make_plan([100.0, 1.0], Rules(64, 8, most=(56, 1000))).shares == (56, 8)
    # Nobody knows how to hold this batch: it is tried as if there were room.
    assert make_plan([3.0, 1.0], Rules(64, 1, most=(24, 24))).shares == (48, 16)


@given(speeds=SPEEDS, exchange_s=EXCHANGES, batch=st.integers(1, 1024))
def test_no_plan_is_worse_than_the_fastest_node_alone(
    speeds: list[float], exchange_s: float, batch: int
) -> None:
    rules = Rules(batch)
    first = make_plan(speeds, rules, exchange_s=exchange_s)
    assert first.step_s <= 1.5 * batch / max(speeds) * (1 + 1e-9)  # speeds are guesses so far
    plan = make_plan(speeds, rules, exchange_s=exchange_s, current=first)
    assert plan.step_s <= 1.03**2 * batch / max(speeds) * (1 + 1e-9)


@given(before=SPEEDS, seed=st.integers(0, 10**6), exchange_s=EXCHANGES)
def test_a_plan_that_is_kept_is_hardly_worse_than_a_new_one(
    before: list[float], seed: int, exchange_s: float
) -> None:
    rng = random.Random(seed)
    now = [speed * rng.choice([0.25, 0.95, 1.0, 1.05, 4.0]) for speed in before]
    kept = make_plan(now, RULES, exchange_s=exchange_s, current=make_plan(before, RULES))
    nonsense = Plan((RULES.batch, *[0] * (len(now) - 1)), 1e9)
    fresh = make_plan(now, RULES, exchange_s=exchange_s, current=nonsense)
    assert kept.step_s <= 1.03**2 * fresh.step_s * (1 + 1e-9)
    assert kept.step_s == step_time(kept.shares, now, exchange_s)
    assert kept.left_out == fresh.left_out


# ---------------------------------------------------------------- noise and change


@pytest.mark.parametrize("speeds", [LAB, (50.0, 50.0), (10.0, 11.0, 12.0, 13.0, 14.0)])
def test_noise_of_one_percent_never_moves_a_share(speeds: tuple[float, ...]) -> None:
    fleet = Fleet(speeds, noise=0.01)
    for _ in range(100):
        fleet.step()
    assert fleet.book.speeds != speeds  # there was noise
    assert set(fleet.history) == {fleet.history[0]}


@pytest.mark.parametrize("node", range(4))
@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_ten_steps_after_a_node_changed_nine_tenths_of_all_speed_are_used(
    node: int, factor: float
) -> None:
    fleet = Fleet(LAB, noise=0.01)
    for _ in range(20):
        fleet.step()
    before = fleet.plan.shares
    fleet.speeds[node] *= factor
    assert fleet.throughput() < 0.9 * sum(fleet.speeds)  # the change hurts, or wastes speed
    for _ in range(10):
        fleet.step()
    assert (fleet.plan.shares[node] > before[node]) == (factor > 1)
    assert fleet.throughput() >= 0.9 * sum(fleet.speeds)


def test_one_slow_step_moves_no_share() -> None:
    fleet = Fleet(LAB)
    for _ in range(5):
        fleet.step()
    fleet.step(lambda node, share: share / LAB[node] * (10 if node == 0 else 1))
    for _ in range(5):
        fleet.step()
    assert set(fleet.history) == {(102, 77, 51, 26)}


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_shares_do_not_swing_after_a_change(noise: float, factor: float) -> None:
    fleet = Fleet(LAB, noise=noise)
    for _ in range(10):
        fleet.step()
    fleet.speeds[0] *= factor
    for _ in range(40):
        fleet.step()
    assert len(set(fleet.history)) > 1
    for node in range(4):
        series = [shares[node] for shares in fleet.history]
        for first in range(len(series) - 5):
            assert _turns(series[first : first + 6]) <= 1


@pytest.mark.parametrize("overheads_s", [(0.0,) * 4, (0.2,) * 4, (0.0, 0.1, 0.2, 0.3)])
def test_with_an_overhead_in_every_step_times_become_equal_within_five_rounds(
    overheads_s: tuple[float, ...],
) -> None:
    def cost(node: int, share: int) -> float:
        return overheads_s[node] + share / LAB[node]

    fleet = Fleet([50.0] * 4)
    for _ in range(5 * 5):  # a book is full of new times after five steps
        fleet.step(cost)
    times = [cost(node, share) for node, share in enumerate(fleet.plan.shares)]
    assert max(times) <= 1.08 * min(times)
    fleet.history.clear()
    for _ in range(20):
        fleet.step(cost)
    assert len(set(fleet.history)) <= 2  # it has settled


# ---------------------------------------------------------------- who stays out


def test_nodes_whose_smallest_share_takes_too_long_stay_out_for_a_reason() -> None:
    plan = make_plan([50.0, 1.0, 1.0, 1.0], RULES)
    assert plan.shares == (256, 0, 0, 0)
    assert plan.step_s == pytest.approx(5.12)
    assert [left.node for left in plan.left_out] == [1, 2, 3]
    for left in plan.left_out:
        assert left.reason == (
            "its smallest share of 8 samples takes 8 s: "
            "a step takes 5.12 s without it and 8 s with it"
        )


def test_only_the_nodes_that_cost_more_than_they_bring_stay_out() -> None:
    plan = make_plan([1.0, 50.0, 40.0], RULES)
    assert plan.shares == (0, 142, 114)
    assert [left.node for left in plan.left_out] == [0]


def test_a_slow_node_stays_where_its_smallest_share_is_done_in_time() -> None:
    plan = make_plan([50.0, 1.0], Rules(batch=512, min_share=8))
    assert plan.left_out == ()
    assert plan.shares == (502, 10)


def test_a_costly_exchange_leaves_nodes_out_for_the_other_reason() -> None:
    plan = make_plan([100.0, 100.0], Rules(batch=64), exchange_s=1.0)
    assert plan.shares == (64, 0)
    assert plan.step_s == pytest.approx(0.64)
    (left,) = plan.left_out
    assert left.node == 1
    assert left.reason == (
        "exchanging gradients with it costs more than it brings: "
        "a step takes 0.64 s without it and 1.32 s with it"
    )


def test_a_cheap_exchange_leaves_nobody_out() -> None:
    plan = make_plan([100.0, 100.0], Rules(batch=64), exchange_s=0.1)
    assert plan.shares == (32, 32)
    assert plan.left_out == ()
    assert plan.step_s == pytest.approx(0.42)


def test_a_gain_too_small_to_be_sure_of_sends_nobody_away() -> None:
    current = Plan((32, 32), 0.65)
    almost = make_plan([100.0, 100.0], Rules(batch=64), exchange_s=0.33, current=current)
    clearly = make_plan([100.0, 100.0], Rules(batch=64), exchange_s=0.36, current=current)
    assert (len(almost.left_out), len(clearly.left_out)) == (0, 1)


def test_a_guess_sends_nobody_away_who_might_be_worth_it() -> None:
    assert make_plan([100.0, 100.0], Rules(batch=64), exchange_s=0.36).left_out == ()
    assert len(make_plan([100.0, 1.0], Rules(batch=64)).left_out) == 1


def test_a_current_plan_keeps_nobody_who_should_leave() -> None:
    current = Plan((232, 8, 8, 8), 8.0)
    plan = make_plan([50.0, 1.0, 1.0, 1.0], RULES, current=current)
    assert [left.node for left in plan.left_out] == [1, 2, 3]


def test_a_batch_too_small_for_all_leaves_the_slowest_out_and_says_so() -> None:
    plan = make_plan([30.0, 40.0, 40.0, 40.0], Rules(batch=24, min_share=8))
    assert plan.shares == (0, 8, 8, 8)
    (left,) = plan.left_out
    assert (left.node, left.reason) == (
        0,
        "a batch of 24 is too small for shares of 8 for all",
    )


def test_a_node_alone_is_never_left_out() -> None:
    assert make_plan([0.001], RULES, exchange_s=100.0).left_out == ()


# ---------------------------------------------------------------- calling back


def test_who_stood_aside_is_called_when_the_fast_node_is_gone_and_not_before() -> None:
    assert worth_calling([1.0], [50.0], RULES, 0.0) == []
    assert worth_calling([1.0], [1.0], RULES, 0.0) == [0]
    assert worth_calling([1.0], [1.0, 1.0], RULES, 0.0) == [0]


def test_who_stood_aside_for_the_exchange_is_called_when_it_has_become_cheap() -> None:
    assert worth_calling([100.0], [100.0], Rules(batch=64), 1.0) == []
    assert worth_calling([100.0], [100.0], Rules(batch=64), 0.01) == [0]


def test_who_stood_aside_is_called_when_it_has_become_fast() -> None:
    assert worth_calling([1.0], [50.0], RULES, 0.0) == []
    assert worth_calling([25.0], [50.0], RULES, 0.0) == [0]


def test_a_gain_below_five_percent_calls_nobody() -> None:
    assert worth_calling([4.0], [100.0], Rules(batch=1000), 0.0) == []
    assert worth_calling([6.0], [100.0], Rules(batch=1000), 0.0) == [0]


def test_several_are_called_together_where_one_alone_would_not_be_worth_it() -> None:
    rules = Rules(batch=1000)
    assert worth_calling([4.0], [100.0], rules, 0.0) == []
    assert worth_calling([4.0, 4.0], [100.0], rules, 0.0) == [0, 1]


def test_only_those_are_called_who_would_be_given_a_share() -> None:
    assert worth_calling([1.0, 40.0, 2.0], [50.0], RULES, 0.0) == [1]
    assert worth_calling([10.0, 20.0], [10.0], Rules(batch=16), 0.0) == [1]


def test_nobody_is_called_where_nobody_stands_aside() -> None:
    assert worth_calling([], [50.0], RULES, 0.0) == []


def test_everybody_is_called_where_nobody_is_left() -> None:
    assert worth_calling([1.0, 50.0], [], RULES, 100.0) == [0, 1]


@pytest.mark.parametrize("policy", ["uniform", "fixed"])
def test_where_speed_does_not_count_everybody_is_called(policy: str) -> None:
    rules = Rules(256, 8, "uniform" if policy == "uniform" else "fixed", (1.0, 1.0))
    assert worth_calling([0.001, 50.0], [50.0], rules, 100.0) == [0, 1]


@given(speeds=SPEEDS, exchange_s=EXCHANGES, batch=st.integers(8, 1024))
def test_nobody_is_called_back_at_the_speeds_at_which_it_was_sent_away(
    speeds: list[float], exchange_s: float, batch: int
) -> None:
    plan = make_plan(speeds, Rules(batch), exchange_s=exchange_s)
    out = {left.node for left in plan.left_out}
    stayed = [speed for node, speed in enumerate(speeds) if node not in out]
    aside = [speeds[node] for node in sorted(out)]
    assert worth_calling(aside, stayed, Rules(batch), exchange_s) == []
    for speed in aside:
        assert worth_calling([speed], stayed, Rules(batch), exchange_s) == []


# ---------------------------------------------------------------- other policies


def test_uniform_shares_ignore_speeds() -> None:
    plan = make_plan([50.0, 1.0, 1.0, 1.0], Rules(256, 8, "uniform"))
    assert plan.shares == (64, 64, 64, 64)
    assert plan.left_out == ()
    assert plan.step_s == pytest.approx(64)


def test_uniform_shares_may_be_smaller_than_the_minimum() -> None:
    assert make_plan([1.0, 1.0, 1.0], Rules(10, 8, "uniform")).shares == (4, 3, 3)


def test_fixed_shares_keep_to_their_proportions_whatever_the_speeds() -> None:
    rules = Rules(256, 8, "fixed", (0.8, 0.6, 0.4, 0.2))
    current = Plan((64, 64, 64, 64), 1.0)
    for speeds in (LAB, LAB[::-1], (50.0, 1.0, 1.0, 1.0)):
        plan = make_plan(speeds, rules, exchange_s=100.0, current=current)
        assert plan.shares == (102, 77, 51, 26)
        assert plan.left_out == ()


def test_a_fixed_share_of_nothing_stays_nothing() -> None:
    assert make_plan([1.0, 1.0, 1.0], Rules(64, 8, "fixed", (1.0, 0.0, 3.0))).shares == (16, 0, 48)


# ---------------------------------------------------------------- the epoch's last batch


def test_a_whole_batch_is_shared_as_planned() -> None:
    plan = Plan((100, 1, 2), 1.0)  # not what proportions and the minimum would give
    assert plan.shares_of(103, 8) == (100, 1, 2)


@pytest.mark.parametrize(
    ("total", "expected"),
    [(100, (40, 30, 20, 10)), (32, (8, 8, 8, 8)), (20, (11, 9, 0, 0)), (5, (5, 0, 0, 0))],
)
def test_a_short_last_batch_is_shared_alike(total: int, expected: tuple[int, ...]) -> None:
    assert Plan((102, 77, 51, 26), 1.3).shares_of(total, 8) == expected


@given(speeds=SPEEDS, total=st.integers(1, 256))
def test_a_short_last_batch_is_handed_out_whole_and_not_to_those_left_out(
    speeds: list[float], total: int
) -> None:
    plan = make_plan(speeds, RULES)
    shares = plan.shares_of(total, RULES.min_share)
    assert sum(shares) == total
    for planned, share in zip(plan.shares, shares, strict=True):
        assert planned or not share
