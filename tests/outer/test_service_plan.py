"""What a config means for the service: presets fill in what was not asked for."""

from typing import Any

import pytest
import torch

from convoy.config import Config
from convoy.errors import ConfigError
from convoy.outer.holdings import EVERY_PASS, HeldWork
from convoy.outer.server import Answer
from convoy.outer.service_plan import ServicePlan, check_service, make_server, plan_service
from convoy.outer.work import StreamWork


def plan(nodes: int = 4, **options: Any) -> ServicePlan:
    return plan_service(Config(**{"strategy": "server", **options}), nodes)


def test_the_default_is_beats_with_shares_by_speed_as_often_as_the_link_suggests() -> None:
    assert plan() == ServicePlan("beat", True, 0, 0, "none", None)


@pytest.mark.parametrize("strategy", ["agwu", "sgwu"])
def test_a_preset_is_the_papers_own(strategy: str) -> None:
    found = plan(strategy=strategy, batch=64)
    assert (found.rule, found.holdings) == (strategy, "cumulative")
    assert (found.every, found.local_batch) == (EVERY_PASS, 16)


def test_what_was_asked_for_stays_in_a_preset() -> None:
    found = plan(
        strategy="agwu",
        rule="agwu:scale=nodes",
        holdings="uniform",
        exchange_every=5,
        local_batch=7,
        staleness_bound=9,
    )
    assert found == ServicePlan("agwu:scale=nodes", False, 5, 7, "uniform", 9)


@pytest.mark.parametrize(
    ("options", "local_batch"),
    [
        ({"rule": "beat"}, 0),
        ({"rule": "delta-poly"}, 25),
        ({"rule": "beat", "holdings": "cumulative"}, 25),
        ({"rule": "delta-poly", "local_batch": 3}, 3),
        ({"rule": "delta-poly", "batch": 2}, 1),
    ],
)
def test_local_steps_are_equal_where_shares_do_not_go_by_speed(
    options: dict[str, Any], local_batch: int
) -> None:
    assert plan(**{"batch": 100, **options}).local_batch == local_batch


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rule": "nope"}, "unknown rule"),
        ({"rule": "beat:powr=1"}, "no option 'powr'"),
        ({"rule": "agwu", "staleness_bound": 2}, "at least 3 with 4 nodes"),
        ({"exchange_every": -1}, "--holdings cumulative"),
        ({"holdings": "cumulative", "idpa_batches": 5, "epochs": 4}, "at most 4"),
        ({"strategy": "agwu", "epochs": 3}, "'idpa_batches' is more"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_service(Config(**{"strategy": "server", **options}), 4)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "lockstep", "rule": "nope"},  # it is not used
        {"rule": "agwu", "staleness_bound": 3},
        {"rule": "agwu", "staleness_bound": -1},
        {"holdings": "cumulative", "idpa_batches": 4, "epochs": 4, "exchange_every": -1},
    ],
)
def test_what_can_work_is_not_refused(options: dict[str, Any]) -> None:
    check_service(Config(**{"strategy": "server", **options}), 4)


def first_answer(nodes: int = 1, done: int = 0, **options: Any) -> Answer:
    config = Config(**{"strategy": "server", "batch": 10, "epochs": 4, **options})
    server = make_server(config, torch.zeros(3), 2, samples=100, nodes=nodes, done=done)
    assert server.done == done
    kind = StreamWork if plan_service(config, nodes).holdings == "none" else HeldWork
    assert isinstance(server.work, kind)
    for node in range(nodes):
        server.admit(node, f"a{node}", 1.0, now=0.0)
    server.pull(0, "a0", 0, now=0.0)
    answer = server.answer_to(0, "a0", 0)
    assert answer is not None
    return answer


def test_a_server_begins_where_training_stood() -> None:
    order = first_answer(done=250, min_share=20).order  # a batch is the most that a share can be
    assert order is not None
    assert (order.spans, order.done) == (((2, 50, 60),), 250)


def test_a_server_with_holdings_goes_on_for_what_is_left() -> None:
    order = first_answer(done=399, holdings="uniform", idpa_batches=1).order
    assert order is not None
    assert (order.samples, order.holding, order.done) == (100, ((0, 100),), 399)
    assert first_answer(done=400, holdings="uniform", idpa_batches=1).is_over


def test_weights_are_numbered_from_where_it_was_asked_for() -> None:
    assert first_answer(first_version=0).version == 0
    assert first_answer().version == 1


def test_a_step_is_done_ahead_only_where_that_was_asked_for() -> None:
    found = [first_answer(overlap=overlap, exchange_every=4).order for overlap in (True, False)]
    assert [order.ahead for order in found if order is not None] == [10, 0]
