"""Forecasts: what can be computed by hand for small pipelines."""

from dataclasses import replace

import pytest

from convoy.pipeline.forecast import Situation, compare_orders, make_forecast, make_workers
from convoy.pipeline.partition import Block
from convoy.pipeline.recipe import Recipe
from convoy.pipeline.timeline import Pace

BLOCKS = tuple(
    Block(f"block{n}", 2, out_bytes=1000, kept_bytes=100, weight_bytes=10) for n in range(6)
)


def _situation(
    speeds: tuple[float, ...] = (1.0, 1.0),
    links: tuple[float, ...] = (),
    recipe: Recipe = Recipe("1f1b", backward="stashed"),  # noqa: B008 - it is frozen
) -> Situation:
    return Situation(
        blocks=BLOCKS,
        weights=(1,) * 6,
        workers=make_workers((3.0,) * 6, speeds, links),
        recipe=recipe,
        batch=64,
        steps=100,
    )


def test_two_equal_workers() -> None:
    situation = _situation()
    bounds = situation.cut(())
    assert bounds == (0, 3, 6)
    forecast = make_forecast(situation, bounds, stale=0.5)
    assert (forecast.cuts, forecast.legal) == ((6,), (2, 4, 6, 8, 10))
    assert (forecast.alone_s, forecast.slowest_s, forecast.bound) == (18.0, 9.0, 2.0)
    assert forecast.batch_s == pytest.approx(9.0)
    assert forecast.epoch_s == pytest.approx(101 * 9.0)  # one batch is waited for
    assert forecast.speedup == pytest.approx(100 * 18 / (101 * 9))
    first, last = forecast.stages
    assert (first.first, first.last, first.layers) == ("block0", "block2", 6)
    assert (first.lead, first.held, last.lead, last.held) == (1, 2, 0, 1)
    assert (first.work, first.busy) == pytest.approx((0.5, 1.0))
    assert (first.sent_bytes, last.sent_bytes) == (1000, 0)
    assert forecast.hybrid(50, 100) == pytest.approx(100 / (50 / forecast.speedup + 50))


@pytest.mark.parametrize(
    ("recipe", "held", "copies"),
    [
        (Recipe("stale"), 3, 0),
        (Recipe("1f1b", backward="stashed"), 2, 1),
        (Recipe("1f1b", "linear", "stashed"), 2, 2),  # nothing predicted is of the moment
    ],
    ids=["published", "stashed", "predicted"],
)
def test_memory_counts_activations_and_kept_weights(recipe: Recipe, held: int, copies: int) -> None:
    first, last = make_forecast(_situation(recipe=recipe), (0, 3, 6), stale=0.5).stages
    assert first.memory_bytes == 3 * (held * 100 + (3 + copies) * 10)
    assert last.memory_bytes == 3 * (100 + 3 * 10)


def test_a_slow_worker_gets_less_and_the_fastest_is_what_counts() -> None:
    situation = _situation(speeds=(1.0, 0.5))
    bounds = situation.cut(())
    assert bounds == (0, 4, 6)
    forecast = make_forecast(situation, bounds, stale=0.0)
    assert [stage.seconds for stage in forecast.stages] == [12.0, 12.0]
    assert [stage.work for stage in forecast.stages] == pytest.approx([2 / 3, 1 / 3])
    assert (forecast.alone_s, forecast.bound) == (18.0, 1.5)


def test_cuts_by_hand_are_kept() -> None:
    assert _situation().cut((2,)) == (0, 1, 6)


def test_messages_pass_the_links_of_both_ends() -> None:
    workers = make_workers((1.0,), (1.0, 1.0, 1.0), (8.0, 80.0, 16.0))
    assert [worker.bytes_per_s for worker in workers] == [1e6, 2e6, 0.0]
    situation = _situation((1.0, 1.0, 1.0), (8.0, 80.0, 16.0))
    pace = situation.pace((0, 2, 4, 6))
    assert pace.transfer_s == pytest.approx((1e-3, 0.5e-3))


def test_a_slow_link_asks_for_the_longer_lead() -> None:
    slow = _situation(links=(0.002, 0.002))  # four seconds for a message
    forecast = make_forecast(slow, (0, 3, 6), stale=0.5)
    # Without postponing it would be 13: 9 and a message each way for every second batch.
    first_sent = 9.0 + 4.0 - 0.4 * 6 * 1.05 / 2 + 0.05 * 6 / 2
    assert forecast.batch_s == pytest.approx(first_sent)
    rounded = make_forecast(replace(slow, precision="bf16"), (0, 3, 6), stale=0.5)
    assert rounded.batch_s == pytest.approx(13.0)
    better = forecast.faster_order("1f1b")
    assert better is not None
    assert better.order == "stale"
    assert better.batch_s == pytest.approx(9.0)
    assert forecast.faster_order("stale") is None


def test_a_plan_postpones_where_a_run_would() -> None:
    quick = _situation(links=(0.02, 0.02))  # 0.4 seconds for a message: stages wait for 4 %
    assert make_forecast(quick, (0, 3, 6), stale=0.5).batch_s == pytest.approx(9.4)
    slower = _situation(links=(0.01, 0.01))  # 0.8: for 8 %
    assert make_forecast(slower, (0, 3, 6), stale=0.5).batch_s < 9.4


def test_orders_are_compared_the_fastest_first() -> None:
    orders = compare_orders(Pace((1.0,) * 4, (2.0,) * 4), alone_s=12.0, batch=8)
    found = {(made.order, made.parts): made for made in orders}
    assert [made.order for made in orders[:2]] == ["1f1b", "stale"]  # the same, with less held
    assert orders[-1].order == "plain"
    assert {parts for _, parts in found} == {1, 4, 8}  # no part is smaller than a sample
    for parts in (4, 8):
        for order in ("gpipe", "1f1b-sync"):
            assert found[order, parts].utilisation == pytest.approx(parts / (parts + 3))
    assert found["stale", 1].speedup == pytest.approx(4.0)
    assert (found["stale", 1].lead, found["stale", 1].held) == (6, 7)
    assert (found["gpipe", 8].lead, found["gpipe", 8].held) == (0, 1.0)
    assert found["1f1b-sync", 8].held == 0.5
