"""A lead that is killed or interrupted: no process is left, nothing that was saved is lost."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from convoy.storage.checkpoint import load_newest
from tests.faults.team import EPOCHS, Team, free_port, start_program

TOKEN = "token"


@contextmanager
def joined(port: int, pace_s: float = 0.02) -> Iterator[subprocess.Popen[str]]:
    """Let a node join from elsewhere."""
    node = start_program(
        "join", f"127.0.0.1:{port}", f"--token-file={TOKEN}", "--name=far", pace_s=pace_s
    )
    try:
        yield node
    finally:
        if node.poll() is None:
            node.kill()
        node.communicate(timeout=10)


def test_a_killed_lead_leaves_no_process_behind() -> None:
    with Team(nodes=2, epochs=50) as team:
        team.wait_for_group(0, 1)
        team.wait_for_steps(2)
        assert len(team.family()) >= 2
        Path("stall").touch()  # not even from the middle of a long step
        time.sleep(0.2)
        team.lead.send_signal(signal.SIGKILL)
        assert team.lead.wait(5) == -signal.SIGKILL
        team.assert_no_orphans(within_s=3)


def test_a_lead_is_killed_and_resumed_and_a_node_from_elsewhere_comes_back() -> None:
    port = free_port()
    network = (f"--token-file={TOKEN}", f"--port={port}")
    options: dict[str, Any] = {"nodes": 2, "epochs": EPOCHS, "checkpoint_steps": 5}
    with Team("lead", *network, pace_s=0.2, **options) as team:
        team.wait_for_steps(2)
        with joined(port, pace_s=0.2) as far:
            team.wait_for_group(0, 1, 2)
            team.wait_for_steps(6)
            team.family()
            team.lead.kill()
            team.assert_no_orphans(within_s=3)
            assert far.poll() is None  # it waits for the lead
            saved = load_newest(team.out / "checkpoints").checkpoint.step
            assert saved > 0
            # Slow enough for the node to come back before the end, also on a busy machine.
            with Team("lead", *network, resume=True, pace_s=0.4) as resumed:
                resumed.wait_for(lambda: len(resumed.group()) == 3, "the node comes back")
                assert resumed.events("start")[0]["from_step"] == saved
                resumed.hurry()
                resumed.assert_no_orphans()
                resumed.assert_exact(EPOCHS)
            _, told = far.communicate(timeout=10)
            assert far.returncode == 0, told
            assert "trying again" in told
            assert "Traceback" not in told


def interrupt(team: Team) -> None:
    """Press Ctrl-C: a terminal sends it to every process of the run."""
    for process in team.family():
        os.kill(process.pid, signal.SIGINT)
    team.lead.send_signal(signal.SIGINT)


def test_ctrl_c_once_saves_and_leaves_and_the_run_can_go_on() -> None:
    with Team(nodes=2, epochs=EPOCHS, pace_s=0.1) as team:
        team.wait_for_steps(3)
        started = time.monotonic()
        interrupt(team)
        errors = team.finish(code=130, limit_s=10)
        assert time.monotonic() - started < 10
        assert "all is saved" in errors
        team.assert_no_orphans()
    saved = load_newest(Path("run/checkpoints")).checkpoint.progress
    assert saved["updates"] > 0
    assert f"stopped at step {saved['updates']}" in errors
    with Team(resume=True, pace_s=0.0) as resumed:
        resumed.finish()
        assert resumed.events("start")[0]["from_step"] == saved["updates"]
        resumed.assert_exact(EPOCHS)


def test_ctrl_c_twice_ends_at_once() -> None:
    with Team(nodes=2, epochs=50) as team:
        team.wait_for_steps(2)
        Path("stall").touch()
        time.sleep(0.3)
        interrupt(team)
        time.sleep(0.5)
        assert team.lead.poll() is None  # it is in the middle of a step of 30 s
        started = time.monotonic()
        interrupt(team)
        assert team.lead.wait(5) == 130
        assert time.monotonic() - started < 1
        team.finish(code=130)
        team.assert_no_orphans()


def is_paused(team: Team) -> bool:
    return bool(team.events("paused"))


def test_too_few_nodes_wait_for_another_and_for_a_lead_that_dies_meanwhile() -> None:
    port = free_port()
    network = (f"--token-file={TOKEN}", f"--port={port}")
    options: dict[str, Any] = {"nodes": 2, "min_nodes": 2, "restarts": 0, "checkpoint_steps": 2}
    with Team("lead", *network, epochs=EPOCHS, pace_s=0.1, **options) as team:
        team.wait_for_group(0, 1)
        team.wait_for(lambda: team.events("checkpoint"), "a checkpoint")
        assert not is_paused(team)
        team.kill(0)
        team.wait_for(lambda: is_paused(team), "a pause", 5)
        steps = len(team.events("step"))
        with joined(port, pace_s=0.1) as far:
            team.wait_for_group(1, 2)
            again = team.events("group")[-1]["time"]
            assert sum(r["time"] < again for r in team.events("step")) <= steps + 1
            team.wait_for_steps(2)
            team.kill(1)
            team.wait_for(lambda: len(team.faults_of(1)) == 1, "it is missed", 5)
            team.lead.kill()  # while the other node asks who takes part
            team.lead.wait(5)
            with Team("lead", *network, resume=True, pace_s=0.3) as resumed:
                resumed.wait_for(lambda: len(resumed.group()) == 3, "the node comes back")
                resumed.hurry()
                resumed.assert_exact(EPOCHS)
            _, told = far.communicate(timeout=10)
            assert far.returncode == 0, told
            assert "trying again" in told


def test_too_few_nodes_for_too_long_end_the_run() -> None:
    timeout_s = 12.0  # long enough for nodes to start on a busy machine
    with Team(nodes=2, min_nodes=2, restarts=0, epochs=50, quorum_timeout_s=timeout_s) as team:
        team.wait_for(lambda: team.events("checkpoint"), "a checkpoint")
        when = team.kill(1)
        errors = team.finish(code=4)
        assert len(team.faults_of(1)) == 1
        assert abs(team.events("end")[-1]["time"] - when - timeout_s) <= 2.0
        assert "not enough nodes for too long" in errors
        assert "--resume run" in errors
        team.assert_no_orphans()


def test_a_node_that_trains_alone_for_a_lead_elsewhere_notices_that_it_is_gone() -> None:
    port = free_port()
    network = (f"--token-file={TOKEN}", f"--port={port}")
    with Team("lead", *network, nodes="none", epochs=EPOCHS, checkpoint_steps=10) as team:
        team.wait_for(Path(TOKEN).exists, "a token is made")
        with joined(port) as far:
            team.wait_for(lambda: team.events("checkpoint"), "a checkpoint")
            assert team.group() == [0]
            team.lead.kill()
            team.lead.wait(5)
            with Team("lead", *network, resume=True) as resumed:
                resumed.hurry()
                resumed.assert_exact(EPOCHS)
            _, told = far.communicate(timeout=10)
            assert far.returncode == 0, told
