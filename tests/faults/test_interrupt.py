"""Ctrl-C: once saves and leaves, twice leaves at once."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from convoy.storage.checkpoint import load_newest
from tests.conftest import start_convoy

SLOW_MODEL = """
import pathlib
import time
from torch import nn

class Slow(nn.Module):
    def forward(self, x):
        if self.training:
            pathlib.Path("in-a-step").touch()
            time.sleep({pause})
        return x

def build(in_shape, num_classes):
    pixels = in_shape[0] * in_shape[1] * in_shape[2]
    return nn.Sequential(Slow(), nn.Flatten(), nn.Linear(pixels, num_classes))
"""


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until something holds, as long as the process lives."""
    deadline = time.monotonic() + 60
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it never came to that within 60 s"
        time.sleep(0.02)


def has_made_steps() -> bool:
    journal = Path("run/events.jsonl")
    return journal.exists() and '"event": "step"' in journal.read_text()


def start_slow(pause: float) -> subprocess.Popen[str]:
    Path("slow_model.py").write_text(SLOW_MODEL.format(pause=pause))
    return start_convoy(
        "train",
        "--model=slow_model:build",
        "--out=run",
        "--log-interval-s=0.1",
        "--precision=fp32",
        "--memory-format=contiguous",
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_once_saves_and_leaves_with_130(number: signal.Signals) -> None:
    process = start_slow(0.05)
    wait_until(has_made_steps, process)
    started = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - started < 10
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "all is saved" in errors
    saved = load_newest(Path("run/checkpoints")).checkpoint
    assert saved.progress["updates"] > 0
    assert json.loads(Path("run/summary.json").read_text())["state"] == "interrupted"


def test_twice_leaves_at_once() -> None:
    process = start_slow(30.0)
    # The probe of the first steps is fixed by the options, so this is a step of the training.
    wait_until(Path("in-a-step").exists, process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None  # it is in the middle of a step of 30 s
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert time.monotonic() - started < 1
    assert process.returncode == 130
