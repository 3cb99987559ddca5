"""The page beside a training: it comes, it tells its link, and it goes with the training."""

import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from convoy.monitor.dashboard.beside import watching
from tests.monitor.dashboard.browser import ask
from tests.monitor.dashboard.lines import make_finished_run
from tests.monitor.dashboard.process import LINK, wait_until_gone


def child_of(pid: int) -> psutil.Process:
    (found,) = (p for p in psutil.Process(pid).children() if "watch" in p.cmdline())
    return found


def test_it_tells_its_link_and_ends_with_the_block(tmp_path: Path) -> None:
    told: queue.Queue[str] = queue.Queue()
    with watching(make_finished_run(tmp_path / "run"), 0, told.put):
        link = LINK.search(told.get(timeout=30))
        assert link is not None
        child = child_of(os.getpid())
        assert child.nice() >= 10
        assert ask(int(link[3]), link[4]).status == 303
        assert LINK.search(told.get(timeout=30))
    assert wait_until_gone(child.pid)
    assert told.empty()
    assert not any(thread.name == "page" for thread in threading.enumerate())


def test_if_it_is_killed_one_sentence_says_so(tmp_path: Path) -> None:
    told: queue.Queue[str] = queue.Queue()
    with watching(make_finished_run(tmp_path / "run"), 0, told.put):
        told.get(timeout=30)
        child_of(os.getpid()).kill()
        assert told.get(timeout=30) == "the page was killed by signal 9; training goes on"
    assert told.empty()


def test_if_it_cannot_start_the_reason_is_told(tmp_path: Path) -> None:
    told: queue.Queue[str] = queue.Queue()
    with watching(tmp_path / "nowhere", None, told.put):
        assert "there is no such run" in told.get(timeout=30)
        assert told.get(timeout=30) == "the page ended with exit code 2; training goes on"


def test_without_an_interpreter_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    told: list[str] = []
    with watching(tmp_path, None, told.append):
        pass
    assert len(told) == 1
    assert "could not be started" in told[0]


_TRAINING = """
import sys, time
from pathlib import Path
from convoy.monitor.dashboard.beside import watching
with watching(Path(sys.argv[1]), 0, lambda line: print(line, flush=True)):
    time.sleep(600)
"""


def test_it_does_not_outlive_a_training_that_is_killed(tmp_path: Path) -> None:
    run = make_finished_run(tmp_path / "run")
    with subprocess.Popen(
        [sys.executable, "-c", _TRAINING, str(run)], stdout=subprocess.PIPE, text=True
    ) as training:
        assert training.stdout is not None
        assert LINK.search(training.stdout.readline())
        child = child_of(training.pid)
        training.send_signal(signal.SIGKILL)
        assert wait_until_gone(child.pid)
