"""The parameter service is killed: it goes on from what it had said was safe, and nothing twice."""

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from convoy.launch.parameters.process import ServiceLostError
from convoy.launch.parameters.record import Record, read_record
from convoy.outer.server import BehindError, Report
from convoy.outer.service_plan import make_server
from tests.faults.history import History, find_faults, marks_in
from tests.faults.light import (
    SIZE,
    SPEED,
    Child,
    Client,
    find_all_faults,
    make_config,
    running,
    wait_until,
)

KILLS = 20


def draw_seed() -> int:
    seed = random.SystemRandom().randrange(10_000)
    print(f"seed {seed}")
    return seed


def kill_again_and_again(
    child: Child, history: History, draw: random.Random, kills: int = KILLS
) -> None:
    """Kill the service at random moments while clients hand in."""
    for _ in range(kills):
        told = len(history.acknowledged)
        wait_until(lambda: len(history.acknowledged) > told, "somebody is served", 10)  # noqa: B023
        until = time.monotonic() + draw.uniform(0.0, 0.25)
        while time.monotonic() < until:
            assert not child.standing()["over"]
        child.kill()


def tell(child: Child) -> None:
    longest, typical = max(child.resumed_s), statistics.median(child.resumed_s)
    print(f"{child.kills} kills; served again after {typical:.2f} s, at most {longest:.2f} s")
    print(f"acknowledged and not in the weights, by kill: {child.lost}")


@pytest.mark.parametrize(
    ("options", "lost_at_most"),
    [
        ({"durability": "journal"}, 0),
        ({"durability": "checkpoint", "durable_updates": 20}, 20),
        ({"durability": "checkpoint", "durable_updates": 1}, 1),
    ],
    ids=["journal", "every 20", "every version"],
)
def test_twenty_kills(options: dict[str, Any], lost_at_most: int) -> None:
    draw = random.Random(draw_seed())
    history = History(SIZE)
    pace: Callable[[], float] = lambda: draw.uniform(0.0, 0.02) if child.kills < KILLS else 0.0  # noqa: E731
    with Child(1500, history, **options) as child:
        clients = [Client(child, history, node, pause_s=pace) for node in range(4)]
        with running(clients):
            kill_again_and_again(child, history, draw)
            for client in clients:
                client.join(60)
        tell(child)
        assert child.died == {"killed by signal 9": KILLS}
        assert child.faults == []
        assert max(child.resumed_s) <= 10
        assert max(child.lost) <= lost_at_most
        lost = sum(child.lost)
        assert find_all_faults(child, history, child.samples, lost_at_most=lost) == []
        story = child.story()
        assert story.restarts == KILLS
        assert story.find_faults(child.samples, 1) == []


def test_who_heard_that_all_is_trained_need_not_come_back() -> None:
    history = History(SIZE)
    with Child(60, history, durable_updates=1000) as child:
        clients = [Client(child, history, node) for node in range(2)]
        with running(clients):
            for client in clients:
                client.join(30)
        child.kill()
        assert child.died == {"killed by signal 9": 1}
        assert child.lost == [0]
        assert child.standing()["over"]
        assert find_all_faults(child, history, child.samples) == []


@pytest.mark.parametrize(
    "options",
    [{"rule": "mean"}, {"rule": "beat"}, {"staleness_bound": 3}],
    ids=["mean", "beat", "bound"],
)
def test_who_waited_for_others_when_the_service_died_is_not_told_that_it_is_merged(
    options: dict[str, Any],
) -> None:
    draw, kills = random.Random(draw_seed()), 8
    history = History(SIZE)

    def pace(slowness: int) -> Callable[[], float]:
        return lambda: draw.uniform(0.0, 0.02) * slowness if child.kills < kills else 0.0

    with Child(600, history, durability="journal", **options) as child:
        clients = [Client(child, history, n, pause_s=pace(1 + 3 * (n == 3))) for n in range(4)]
        with running(clients):
            kill_again_and_again(child, history, draw, kills)
            for client in clients:
                client.join(60)
        tell(child)
        assert child.died == {"killed by signal 9": kills}
        assert child.faults == []
        _, weights = child.weights()
        applied = dict.fromkeys(marks_in(weights), 1.0)  # of means, only a part arrives
        assert find_faults(history, applied) == []
        assert child.story().find_faults(child.samples, 1) == []


@pytest.mark.parametrize("rule", ["mean", "beat"])
def test_a_submission_that_waits_is_not_known_to_a_service_that_was_lost(rule: str) -> None:
    config = make_config(nodes=2, rule=rule)
    server, again = (make_server(config, torch.zeros(4), 4, 100, 2) for _ in range(2))
    for node in range(2):
        server.admit(node, "x", SPEED, 0.0)
        server.pull(node, "x", 0, 0.0)
    handed_in = (0, "x", 1, 1, torch.ones(4), Report(5))
    server.submit(*handed_in, 1.0)
    assert server.version == 1  # it waits for the other
    again.restore(*server.state())
    again.admit(0, "x", SPEED, 2.0)
    with pytest.raises(BehindError):
        again.submit(*handed_in, 2.0)


def test_what_was_handed_in_is_known_after_two_deaths_in_a_row() -> None:
    config = make_config(nodes=2)
    server, again, third = (make_server(config, torch.zeros(4), 4, 100, 2) for _ in range(3))
    for node in range(2):
        server.admit(node, "x", SPEED, 0.0)
        server.pull(node, "x", 0, 0.0)
    handed_in = (1, "x", 1, 1, torch.ones(4), Report(5))
    server.submit(*handed_in, 1.0)
    again.restore(*server.state())
    again.admit(0, "x", SPEED, 2.0)  # it dies before it has heard of the other
    third.restore(*again.state())
    for node in range(2):
        third.admit(node, "x", SPEED, 3.0)
    third.submit(*handed_in, 3.0)
    assert third.answer_to(1, "x", 1) is not None
    assert third.version == 2


def test_a_service_that_is_killed_while_it_starts_is_started_again() -> None:
    history = History(SIZE)
    with Child(150, history, durability="journal") as child:
        clients = [Client(child, history, node, pause_s=0.01) for node in range(4)]
        with running(clients):
            for _ in range(3):
                told = len(history.acknowledged)
                wait_until(lambda: len(history.acknowledged) > told + 10, "a dozen more")  # noqa: B023
                child.kill_twice()
            for client in clients:
                client.join(30)
        assert child.kills == 6
        assert child.killed_early >= 1
        print(f"{child.killed_early} of 3 before it had started")
        assert child.died == {"killed by signal 9": 6}
        assert find_all_faults(child, history, child.samples) == []


def test_a_lead_that_asks_while_the_service_is_started_again_hears_that_it_is_lost() -> None:
    with Child(10, History(10)) as child:
        child._process._channel.close()  # as `revive` does, in another thread
        for ask in (child._process.standing, lambda: child._process.weights(0)):
            with pytest.raises(ServiceLostError):
                ask()


@pytest.mark.parametrize("torn", ['{"event": "tick", "n', "{", ""])
def test_a_record_whose_last_line_was_torn_goes_on(torn: str) -> None:
    path = Path("record.jsonl")
    with Record(path) as record:
        record.write("tick", now=1.0)
    with path.open("a") as file:
        file.write(torn)
    with Record(path) as record:
        record.write("tick", now=2.0)
    assert [line["now"] for line in read_record(path)] == [1.0, 2.0]
