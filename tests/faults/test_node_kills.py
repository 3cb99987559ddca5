"""Nodes that are killed, stopped or asked to go: the others go on, and nothing is lost."""

import functools
import os
import random
import signal
import time

from convoy.outer.ledger import find_faults
from tests.faults.team import EPOCHS, SAMPLES, Team


def test_one_after_the_other_is_killed_and_the_rest_go_on_within_a_second() -> None:
    with Team(nodes=4, restarts=0, epochs=EPOCHS, pace_s=0.1) as team:
        team.wait_for_group(0, 1, 2, 3)
        left = [0, 1, 2, 3]
        for victim in (2, 0, 1):  # the first of those left is the one that reports
            team.wait_for_steps(2)
            when = team.kill(victim)
            left.remove(victim)
            team.wait_for_group(*left)
            group = team.events("group")[-1]
            (fault,) = team.faults_of(victim)
            print(f"pause {group['pause_s']} s, {group['time'] - when:.2f} s after the kill")
            assert group["pause_s"] <= 1.0
            assert group["time"] - when <= 2.0, group
            assert fault["time"] - when <= 1.0
            assert f"node {victim + 1}" in fault["reason"]
        team.hurry()
        team.assert_no_orphans()
        team.assert_exact(EPOCHS)


def test_three_of_four_are_killed_at_once() -> None:
    left = 3
    with Team(nodes=4, restarts=0, epochs=EPOCHS, pace_s=0.1) as team:
        team.wait_for_group(0, 1, 2, 3)
        team.wait_for_steps(3)
        others = [node for node in range(4) if node != left]
        team.kill(*others)
        team.wait_for_group(left)
        team.hurry()
        assert all(len(team.faults_of(node)) == 1 for node in others)
        assert team.faults_of(left) == []
        team.assert_no_orphans()
        team.assert_exact(EPOCHS)


def test_all_are_killed_and_start_again_from_the_last_checkpoint_as_often_as_they_may() -> None:
    with Team(nodes=2, restarts=1, epochs=50) as team:
        team.wait_for(lambda: team.events("checkpoint"), "a checkpoint")
        team.wait_for_steps(2)
        saved, groups = team.events("checkpoint")[-1]["step"], len(team.events("group"))
        team.kill(0, 1)
        team.wait_for(lambda: len(team.events("group")) > groups, "a new group")
        assert team.events("group")[groups]["step"] == saved
        team.wait_for_group(0, 1)
        team.wait_for_steps(2)
        team.kill(0, 1)
        errors = team.finish(code=4)
        assert "no node is left" in errors
        assert "--resume run" in errors
        assert all(len(team.faults_of(node)) == 2 for node in range(2))
        assert find_faults(team.ledger(), SAMPLES) == []
        team.assert_no_orphans()


def living(team: Team) -> list[int]:
    known = {r["node"]: r["pid"] for r in team.events("join")}
    return [node for node, pid in sorted(known.items()) if os.path.exists(f"/proc/{pid}/fd/0")]


def test_twenty_random_kills() -> None:
    seed = random.SystemRandom().randrange(10_000)
    print(f"seed {seed}")
    draw = random.Random(seed)
    epochs = 20
    with Team(nodes=4, restarts=20, epochs=epochs, pace_s=0.06) as team:
        team.wait_for_group(0, 1, 2, 3)
        team.wait_for_steps(2)
        descriptors = team.descriptors()
        for _ in range(20):
            team.wait_for(lambda: len(living(team)) > 1, "two nodes live")
            victim = draw.choice(living(team))
            faults = len(team.faults_of(victim))
            team.kill(victim)
            missed = functools.partial(lambda v, f: len(team.faults_of(v)) > f, victim, faults)
            team.wait_for(missed, f"node {victim} is missed", 5)
            time.sleep(draw.uniform(0.0, 0.7))
        team.wait_for_group(0, 1, 2, 3)
        team.wait_for_steps(2)
        assert team.descriptors() <= descriptors + 2
        team.hurry()
        assert sum(len(team.faults_of(node)) for node in range(4)) == 20
        team.assert_no_orphans()
        team.assert_exact(epochs)


def test_a_stopped_node_is_left_behind_and_comes_back() -> None:
    with Team(nodes=3, restarts=0, epochs=EPOCHS, node_timeout_s=2.0, pace_s=0.25) as team:
        team.wait_for_group(0, 1, 2)
        team.wait_for_steps(3)
        pid = team.pid(1)
        os.kill(pid, signal.SIGSTOP)
        when = time.time()
        try:
            took = team.wait_for_group(0, 2, limit_s=3.5)
            (fault,) = team.faults_of(1)
            assert "no sign of life" in fault["reason"]
            assert fault["time"] - when <= 3.0
            team.wait_for_steps(3)  # the others go on
            time.sleep(max(0.0, 6 - took))
        finally:
            os.kill(pid, signal.SIGCONT)
        team.wait_for_group(0, 1, 2, limit_s=5)
        team.wait_for_steps(3)
        assert team.pid(1) == pid
        team.hurry()
        team.assert_no_orphans()
        team.assert_exact(EPOCHS)


def test_a_node_that_is_asked_to_leave_finishes_its_step_and_leaves() -> None:
    node = 0  # the one that reports
    with Team(nodes=2, restarts=3, epochs=EPOCHS, pace_s=0.1) as team:
        team.wait_for_group(0, 1)
        team.wait_for_steps(3)
        pid = team.pid(node)
        os.kill(pid, signal.SIGTERM)
        team.wait_for_group(1 - node, limit_s=5)
        team.wait_for(lambda: not os.path.exists(f"/proc/{pid}/fd"), "its process ends", 5)
        team.hurry()
        (leave,) = [r for r in team.events("leave") if r["node"] == node]
        assert not leave["fault"]
        assert "asked to leave" in leave["reason"]
        assert len(team.events("join")) == 2  # it was not started again
        team.assert_no_orphans()
        team.assert_exact(EPOCHS)
