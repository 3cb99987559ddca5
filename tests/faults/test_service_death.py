"""The parameter service is killed: it goes on from what it had said was safe, and nothing twice."""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.history import History
from tests.faults.light import SIZE, Child, Client, find_all_faults, running, wait_until

KILLS = 20


def draw_seed() -> int:
    seed = random.SystemRandom().randrange(10_000)
    print(f"seed {seed}")
    return seed


def kill_again_and_again(child: Child, history: History, draw: random.Random) -> None:
    """Kill the service at random moments while clients hand in."""
    for _ in range(KILLS):
        told = len(history.acknowledged)
        wait_until(lambda: len(history.acknowledged) > told, "somebody is served", 10)  # noqa: B023
        until = time.monotonic() + draw.uniform(0.0, 0.25)
        while time.monotonic() < until:
            assert not child.standing()["over"]
        child.kill()


def tell(child: Child) -> None:
    longest, typical = max(child.resumed_s), statistics.median(child.resumed_s)
    print(f"{child.kills} kills; served again after {typical:.2f} s, at most {longest:.2f} s")
    print(f"acknowledged and lost, by kill: {child.lost}")


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
