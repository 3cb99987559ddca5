"""Stages that are killed, stopped or asked to go: the others go back to the segment's start."""

import os
import signal
from typing import Any

from convoy.outer.ledger import find_faults
from convoy.storage.checkpoint import load_newest
from tests.faults.team import EPOCHS, SAMPLES, Team, free_port
from tests.faults.test_lead_faults import TOKEN, joined

EVERY = 10  # steps between two checkpoints
PIPELINE: dict[str, Any] = {
    "strategy": "pipeline",
    "cuts": 1,
    "checkpoint_steps": EVERY,
    "allocation": "speed",
}


def test_a_killed_stage_is_noticed_and_comes_back_and_the_interval_is_all_that_is_lost() -> None:
    epochs = 20
    with Team(epochs=epochs, pace_s=0.1, **PIPELINE) as team:
        for victim in (0, 1):  # the first stage, and the last one, which reports
            team.wait_for_group(0, 1)
            team.wait_for_steps(2)
            team.wait_for(lambda: team.events("checkpoint"), "a checkpoint")
            before = max(r["step"] for r in team.events("checkpoint"))
            groups = len(team.events("group"))
            when = team.kill(victim)
            team.wait_for(lambda g=groups: len(team.events("group")) > g, "a group")  # type: ignore[misc]
            found = team.events("group")[groups]
            print(f"pause {found['pause_s']} s, {found['time'] - when:.2f} s after the kill")
            assert found["time"] - when <= 5.0
            assert found["step"] >= before
            team.wait_for_group(0, 1)
            back = team.events("group")[-1]
            print(f"all stages again {back['time'] - when:.2f} s after the kill")
            assert len(team.faults_of(victim)) == 1
        team.hurry()
        team.assert_no_orphans()
        assert find_faults(team.ledger(), SAMPLES, epochs) == []
        assert load_newest(team.out / "checkpoints").checkpoint.progress["epoch"] == epochs


def test_a_killed_stage_that_computes_tasks_comes_back_as_one() -> None:
    options = {**PIPELINE, "cuts": 7, "model": "tests.pipeline.nets:deep", "executor": "tasks"}
    with Team(epochs=3, **options) as team:
        team.wait_for_group(0, 1)
        team.wait_for(lambda: team.events("checkpoint"), "a checkpoint")
        before = max(r["step"] for r in team.events("checkpoint"))
        team.kill(1)
        team.wait_for(lambda: len(team.events("group")) > 1, "a group")
        assert team.events("group")[1]["step"] >= before
        team.wait_for_group(0, 1)
        team.finish()
    assert len(team.faults_of(1)) == 1
    assert team.events("start")[0]["executor"] == "tasks"
    assert not any("tasks" in warning["reason"] for warning in team.events("warning"))
    assert find_faults(team.ledger(), SAMPLES, 3) == []
    assert load_newest(team.out / "checkpoints").checkpoint.progress["epoch"] == 3


def test_a_plain_run_in_stages_is_exact_whoever_is_killed() -> None:
    with Team(epochs=EPOCHS, pace_s=0.3, pipelined="0", **PIPELINE) as team:
        for victim in (1, 0):
            team.wait_for_group(0, 1)
            team.wait_for_steps(2)
            team.kill(victim)
            team.wait_for(lambda v=victim: team.faults_of(v), "the loss")  # type: ignore[misc]
        team.hurry()
        team.assert_exact(EPOCHS)


def test_a_stage_that_stands_still_is_left_behind() -> None:
    with Team(epochs=2, pace_s=0.05, node_timeout_s=2, **PIPELINE) as team:
        team.wait_for_group(0, 1)
        team.wait_for_steps(3)
        os.kill(team.pid(0), signal.SIGSTOP)
        team.wait_for_group(1)
        os.kill(team.pid(0), signal.SIGCONT)
        team.hurry()
        assert find_faults(team.ledger(), SAMPLES, 2) == []


def test_an_interrupted_pipeline_saves_and_goes_on() -> None:
    with Team(epochs=2, pace_s=0.1, **PIPELINE) as team:
        team.wait_for_steps(3)
        team.lead.send_signal(signal.SIGINT)
        team.finish(code=130)
        team.assert_no_orphans()
    saved = load_newest(team.out / "checkpoints").checkpoint
    assert 0 < saved.step < 80
    with Team(resume=True, pace_s=0.0) as team:
        team.finish()
    assert find_faults(team.ledger(), SAMPLES, 2) == []


def test_a_node_from_elsewhere_becomes_a_stage_and_leaves_again() -> None:
    port = free_port()
    options = {**PIPELINE, "cuts": "", "checkpoint_steps": 0, "nodes": 1, "epochs": 20}
    with Team("lead", f"--token-file={TOKEN}", f"--port={port}", pace_s=0.1, **options) as team:
        team.wait_for_group(0)
        with joined(port, pace_s=0.1) as far:
            team.wait_for_group(0, 1)
            team.wait_for_steps(4)
            far.send_signal(signal.SIGTERM)
            team.wait_for_group(0)
        team.hurry()
        assert find_faults(team.ledger(), SAMPLES, 20) == []
        assert team.events("leave")[-1]["fault"] is False
