"""Nodes of a run with a parameter service that are killed, stopped or asked to go.

A step sleeps for most of its time, so that a busy machine changes little of how long it takes.
The record's times and the tests' are of the same clock, that of the system.
"""

import json
import math
import os
import random
import signal
import statistics
import time
from itertools import pairwise
from typing import Any

from convoy.config import Config, read_toml
from convoy.launch.parameters.record import read_record
from convoy.launch.parameters.replay import replay
from convoy.tracking import untracked
from tests.faults.history import Story, story_of
from tests.faults.team import SAMPLES, Record, Team, free_port
from tests.faults.test_lead_faults import TOKEN, is_paused, joined

CHOSEN: dict[str, Any] = {
    "strategy": "server",
    "exchange_every": 2,
    "precision": "fp32",
    "schedule": "cosine",
    "restarts": 0,
}
PAUSED = "paused: 1 of at least 2 nodes are here"
RATE_S = 1.0  # a node's speed is measured over so long


class ServerTeam(Team):
    """A run with a parameter service, and what its record tells.

    Attributes:
        strikes: nodes that were killed, stopped or asked to leave.
    """

    def __init__(self, command: str = "train", *arguments: object, **options: Any) -> None:
        super().__init__(command, *arguments, **{**CHOSEN, **options})
        self.strikes = 0
        self._changed_at: list[float] = []  # by a signal, or by the end of its slow part

    # ------------------------------------------------------------ what it does

    def record(self, *kinds: str) -> list[Record]:
        path = self.out / "record.jsonl"
        lines = read_record(path) if path.exists() else iter(())
        return [line for line in lines if line["event"] in kinds]

    def submissions(
        self, *nodes: int, since: float = -math.inf, until: float = math.inf
    ) -> list[Record]:
        """Return what some nodes, or all, have handed in during some time."""
        handed_in = [s for s in self.record("submit") if since < s["now"] <= until]
        return [s for s in handed_in if not nodes or s["node"] in nodes]

    def samples(self, *nodes: int, since: float = -math.inf, until: float = math.inf) -> int:
        found = self.submissions(*nodes, since=since, until=until)
        return sum(s["report"]["samples"] for s in found)

    def wait_until_all_train(self, *nodes: int, limit_s: float = 60.0) -> float:
        """Wait until each of some nodes has handed something in from now on; return how long."""
        now = time.monotonic()
        return self.wait_for(
            lambda: all(self.submissions(node, since=now) for node in nodes),
            f"nodes {nodes} train",
            limit_s,
        )

    # ------------------------------------------------------------ what is done to it

    def strike(self, *nodes: int, how: signal.Signals = signal.SIGKILL) -> float:
        """Send a signal to nodes; return when."""
        self.family()
        pids = [self.pid(node) for node in nodes]
        when = time.monotonic()
        self._changed_at.append(when)
        for pid in pids:
            os.kill(pid, how)
            self.strikes += 1
        return when

    def hurry(self) -> str:
        self._changed_at.append(time.monotonic())
        return super().hurry()

    def removed_after(self, node: int, when: float, limit_s: float = 5.0) -> float:
        """Return how long after some time the service refused a node's work."""

        def removed() -> list[float]:
            lines = self.record("remove")
            return [s["now"] for s in lines if s["node"] == node and s["now"] > when]

        self.wait_for(removed, f"node {node} is missed", limit_s)
        return removed()[0] - when

    # ------------------------------------------------------------ what is checked

    def pace_kept(self, others: set[int], struck: float) -> float:
        """Check that those who are left do not wait; return how fast they are within 5 s.

        The speed is a part of that before.
        """
        before = self.samples(*others, since=struck - RATE_S, until=struck)
        end = min([struck + 5.0, *(when for when in self._changed_at if when > struck)])
        # From a beat on: a window that begins anywhere else may hold one beat less.
        beats = [s["now"] - 1e-6 for s in self.submissions(*others, since=struck, until=end)]
        starts = [struck, *(beat for beat in beats if beat + RATE_S <= end)]
        after = max(self.samples(*others, since=s, until=s + RATE_S) for s in starts)
        print(f"{sorted(others)}: {before} samples/s before, {after} after")
        for node in others:
            times = [s["now"] for s in self.submissions(node, since=struck - RATE_S)]
            pause = max(b - a for a, b in pairwise(t for t in times if t < end))
            assert pause <= 1.0, (node, pause)
        return after / before

    def assert_as_good_as_undisturbed(self, epochs: int) -> None:
        expected = undisturbed_accuracy(epochs)
        print(f"accuracy {self.accuracy:.4f}, undisturbed {expected:.4f}")
        assert self.accuracy >= expected - 0.01

    @property
    def accuracy(self) -> float:
        return float(self.summary["test_accuracy"])

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return found

    def story(self) -> Story:
        return story_of(self.out, SAMPLES)

    @property
    def config(self) -> Config:
        return Config(**read_toml(self.out / "config.toml"))

    def assert_exact(self, epochs: int) -> None:
        """Check that every sample was merged once, and that a replay gives the same bits."""
        story = self.story()
        assert story.find_faults(SAMPLES, epochs) == []
        assert story.done == SAMPLES * epochs
        assert [merge.version for merge in story.merges] == list(range(1, story.version))
        assert self.config.first_version == 1
        self.assert_the_same_bits()

    def assert_the_same_bits(self) -> None:
        again = replay(self.config, self.out / "record.jsonl", untracked)
        assert again.is_equal, again
        assert again.submissions > 5
        assert again.restarts == 0


def undisturbed_accuracy(epochs: int) -> float:
    with ServerTeam(nodes=4, epochs=epochs, out="undisturbed") as team:
        team.hurry()
        assert team.events("leave") == []
        return team.accuracy


def test_ten_nodes_are_killed_one_by_one_at_random_and_the_others_do_not_wait() -> None:
    seed = random.SystemRandom().randrange(10_000)
    print(f"seed {seed}")
    draw = random.Random(seed)
    epochs, kills, everybody = 10, [], {0, 1, 2, 3}
    with ServerTeam(nodes=4, restarts=10, epochs=epochs, pace_s=0.1) as team:
        for _ in range(5):
            team.wait_until_all_train(*everybody)
            time.sleep(draw.uniform(0.5, 1.0))
            first, second = draw.sample(sorted(everybody), 2)
            for victim, others in (
                (first, everybody - {first}),
                (second, everybody - {first, second}),  # the first is not back yet, or just so
            ):
                when = team.strike(victim)
                kills.append((others, when))
                noticed = team.removed_after(victim, when)
                print(f"node {victim}: noticed after {noticed:.3f} s")
                assert noticed <= 1.0
                time.sleep(draw.uniform(1.5, 2.0) * RATE_S)
        team.hurry()
        assert team.strikes == 10
        assert sum(len(team.faults_of(node)) for node in everybody) == 10
        kept = [team.pace_kept(others, when) for others, when in kills]
        assert min(kept) >= 0.5  # now and then, a busy machine itself is slower
        assert statistics.median(kept) >= 0.95
        team.assert_no_orphans()
        team.assert_exact(epochs)
        team.assert_as_good_as_undisturbed(epochs)


def test_a_node_is_killed_and_the_others_go_on_without_a_common_beat() -> None:
    epochs, rule, floor = 4, "delta-poly", 0.76  # 0.80 to 0.82 without a fault
    with ServerTeam(nodes=4, epochs=epochs, rule=rule, pace_s=0.1) as team:
        team.wait_until_all_train(0, 1, 2, 3)
        time.sleep(RATE_S + random.SystemRandom().uniform(0.0, 0.5))
        when = team.strike(2)
        assert team.removed_after(2, when) <= 1.0
        time.sleep(2 * RATE_S)
        team.hurry()
        assert team.strikes == len(team.faults_of(2)) == 1
        assert team.pace_kept({0, 1, 3}, when) >= 0.95
        team.assert_no_orphans()
        team.assert_exact(epochs)
        assert team.accuracy >= floor


def test_three_of_four_are_killed_at_once_and_the_last_goes_on() -> None:
    epochs = 4
    with ServerTeam(nodes=4, epochs=epochs, min_nodes=1, pace_s=0.1) as team:
        team.wait_until_all_train(0, 1, 2, 3)
        when = team.strike(0, 1, 3)
        assert max(team.removed_after(node, when) for node in (0, 1, 3)) <= 1.0
        team.wait_until_all_train(2, limit_s=5)
        team.hurry()
        assert team.strikes == 3
        assert [len(team.faults_of(node)) for node in range(4)] == [1, 1, 0, 1]
        assert not is_paused(team)
        team.assert_no_orphans()
        team.assert_exact(epochs)


def pauses(team: Team) -> int:
    return [r["reason"] for r in team.events("paused")].count(PAUSED)


def test_too_few_nodes_pause_until_another_joins_and_give_up_where_none_does() -> None:
    port, timeout_s = free_port(), 12.0  # long enough for a node to join on a busy machine
    options = {"nodes": 4, "min_nodes": 2, "epochs": 50, "quorum_timeout_s": timeout_s}
    with ServerTeam("lead", f"--token-file={TOKEN}", f"--port={port}", **options) as team:
        team.wait_until_all_train(0, 1, 2, 3)
        team.strike(0, 1, 3)
        team.wait_for(lambda: pauses(team) == 1, "a pause", 5)
        time.sleep(1.0)  # for what is under way
        before = len(team.submissions())
        with joined(port) as far:
            team.wait_for(lambda: len(team.events("join")) > 4, "a node joins", timeout_s)
            assert len(team.submissions()) == before, "they trained although they were paused"
            print(f"resumed {team.wait_until_all_train(2, 4, limit_s=5):.2f} s after the join")
            far.kill()
            team.strikes += 1
            when = time.time()
            team.wait_for(lambda: pauses(team) == 2, "another pause", 5)
            team.strike(2, how=signal.SIGTERM)
            team.wait_for(lambda: len(team.events("leave")) == 5, "who is asked to leaves", 5)
            errors = team.finish(code=4, limit_s=20)
        assert abs(team.events("end")[-1]["time"] - when - timeout_s) <= 2.0
        assert "not enough nodes for too long" in errors
        assert team.strikes == 5
        assert [len(team.faults_of(node)) for node in range(5)] == [1, 1, 0, 1, 1]
        team.assert_no_orphans()
        assert team.story().faults == []
        team.assert_the_same_bits()


def test_all_nodes_are_killed_and_new_ones_go_on_where_they_were() -> None:
    port, epochs = free_port(), 3
    network = (f"--token-file={TOKEN}", f"--port={port}")
    with ServerTeam("lead", *network, nodes=2, epochs=epochs, pace_s=0.1) as team:
        team.wait_until_all_train(0, 1)
        when = team.strike(0, 1)
        assert max(team.removed_after(node, when) for node in (0, 1)) <= 1.0
        with joined(port, pace_s=0.1) as far:
            team.wait_for(lambda: len(team.events("join")) == 3, "a node joins")
            team.wait_until_all_train(2, limit_s=10)
            team.hurry()
            _, told = far.communicate(timeout=10)
            assert far.returncode == 0, told
        assert team.strikes == sum(len(team.faults_of(node)) for node in range(3)) == 2
        team.assert_no_orphans()
        team.assert_exact(epochs)


def test_a_node_that_is_asked_to_leave_hands_in_what_it_has_trained() -> None:
    port, epochs = free_port(), 10
    network = (f"--token-file={TOKEN}", f"--port={port}")
    options = {"nodes": 1, "epochs": epochs, "overlap": False, "pace_s": 0.1}
    with ServerTeam("lead", *network, **options) as team:
        team.wait_until_all_train(0)
        with joined(port, pace_s=0.3) as far:
            team.wait_until_all_train(0, 1)
            team.wait_for_step_of(1)  # between two orders it would have nothing to hand in
            when = team.strike(1, how=signal.SIGTERM)
            _, told = far.communicate(timeout=10)
            took = time.monotonic() - when
        print(f"left after {took:.2f} s")
        assert took <= 5.0
        assert far.returncode == 0, told
        team.hurry()
        (leave,) = team.events("leave")
        assert not leave["fault"]
        assert "asked to leave" in leave["reason"]
        last = team.submissions(1, since=when)
        assert len(last) == 1  # the order that it was at
        applied = {(a.node, a.incarnation, a.number) for a in team.story().applied}
        assert (1, last[0]["incarnation"], last[0]["number"]) in applied
        assert team.strikes == 1
        team.assert_no_orphans()
        team.assert_exact(epochs)


def test_a_node_that_was_stopped_is_refused_as_who_it_was_and_joins_again() -> None:
    epochs = 6
    with ServerTeam(nodes=3, epochs=epochs, node_timeout_s=2.0, pace_s=0.1) as team:
        team.wait_until_all_train(0, 1, 2)
        pid, before = team.pid(1), team.submissions(1)[-1]["incarnation"]
        team.wait_for_step_of(1)  # so that it has something to hand in when it goes on
        when = team.strike(1, how=signal.SIGSTOP)
        try:
            assert team.removed_after(1, when) <= 3.0
            (fault,) = team.faults_of(1)
            assert "no sign of life" in fault["reason"]
            time.sleep(max(0.0, when + 6.0 - time.monotonic()))
            team.wait_until_all_train(0, 2)
        finally:
            os.kill(pid, signal.SIGCONT)
        back = time.monotonic()
        print(f"trains again after {team.wait_until_all_train(1, limit_s=5):.2f} s")
        assert team.pid(1) == pid
        team.hurry()
        late = team.submissions(1, since=back)
        assert late
        assert before not in {s["incarnation"] for s in late}
        refused = team.summary["refused"]
        assert refused == {"failed_precondition": 1}
        assert team.strikes == 1
        team.assert_no_orphans()
        team.assert_exact(epochs)
