"""Members of a hybrid group that are killed, stopped or asked to go: each holds a part."""

import os
import signal
from typing import Any

from convoy.outer.ledger import find_faults
from convoy.storage.checkpoint import load_newest
from tests.faults.team import SAMPLES, Team, free_port
from tests.faults.test_lead_faults import TOKEN, joined

EVERY = 10  # steps between two checkpoints
EPOCHS = 12
HYBRID: dict[str, Any] = {"strategy": "hybrid", "epochs": EPOCHS, "checkpoint_steps": EVERY}


def test_a_killed_member_is_noticed_and_all_go_back_to_the_checkpoint_and_on() -> None:
    with Team(nodes=3, restarts=1, pace_s=0.05, **HYBRID) as team:
        for victim, others in ((0, (1, 2)), (2, (0, 1))):  # the one that reports, and another
            team.wait_for_group(0, 1, 2)
            team.wait_for_steps(EVERY)
            saved = max(r["step"] for r in team.events("checkpoint"))
            groups = len(team.events("group"))
            when = team.kill(victim)
            team.wait_for(lambda g=groups: len(team.events("group")) > g, "a group")  # type: ignore[misc]
            found = team.events("group")[groups]
            print(f"pause {found['pause_s']} s, {found['time'] - when:.2f} s after the kill")
            assert found["time"] - when <= 3.0
            assert found["nodes"] == list(others)
            assert found["step"] >= saved
            assert found["step"] % EVERY == 0
            assert len(team.faults_of(victim)) == 1
        team.wait_for_group(0, 1, 2)
        team.hurry()
        team.assert_no_orphans()
        team.assert_exact(EPOCHS)


def test_a_member_that_stands_still_is_left_behind() -> None:
    with Team(nodes=2, pace_s=0.02, node_timeout_s=1, **HYBRID) as team:
        team.wait_for_group(0, 1)
        team.wait_for_steps(3)
        os.kill(team.pid(0), signal.SIGSTOP)
        team.wait_for_group(1, limit_s=10)
        os.kill(team.pid(0), signal.SIGCONT)
        team.hurry()
        team.assert_exact(EPOCHS)


def test_an_interrupted_run_saves_where_it_was_and_goes_on_with_fewer() -> None:
    with Team(nodes=3, pace_s=0.05, **{**HYBRID, "checkpoint_steps": 0}) as team:
        team.wait_for_steps(3)
        team.lead.send_signal(signal.SIGINT)
        team.finish(code=130)
        team.assert_no_orphans()
    saved = load_newest(team.out / "checkpoints").checkpoint
    assert 0 < saved.step < 40 * EPOCHS
    assert saved.step % 40  # in mid-epoch: no checkpoint was due
    with Team(resume=True, nodes=2, pace_s=0.0) as team:
        team.finish()
        team.assert_exact(EPOCHS)


def test_who_joins_or_leaves_by_agreement_costs_nothing() -> None:
    port = free_port()
    options = {**HYBRID, "checkpoint_steps": 0, "nodes": 2}
    with Team("lead", f"--token-file={TOKEN}", f"--port={port}", pace_s=0.03, **options) as team:
        team.wait_for_group(0, 1)
        with joined(port, pace_s=0.03) as far:
            team.wait_for_group(0, 1, 2)
            team.wait_for_steps(4)
            far.send_signal(signal.SIGTERM)
            team.wait_for_group(0, 1)
        team.hurry()
        steps = [r["step"] for r in team.events("group")]
        assert steps == sorted(steps)
        assert all(step % 40 for step in steps[1:3])  # not from a checkpoint, which epochs make
        assert team.events("leave")[-1]["fault"] is False
        assert find_faults(team.ledger(), SAMPLES, EPOCHS) == []
        team.assert_exact(EPOCHS)
