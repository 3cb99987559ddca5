"""Runs with several processes, for tests that kill, stop and disturb them."""

import contextlib
import functools
import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import torch
from torch import Tensor

from convoy.outer.ledger import Update, find_faults
from convoy.storage.checkpoint import load_newest
from convoy.trainer import run_training
from tests.conftest import start_convoy

ROOT = Path(__file__).resolve().parents[2]
SAMPLES, BATCH = 10_000, 250  # of the data set that comes with Convoy: 40 steps an epoch
OPTIONS: dict[str, Any] = {
    "model": "tests.faults.paced:build",
    "batch": BATCH,
    "precision": "fp64",
    "memory_format": "contiguous",
    "device": "cpu",
    "threads": 1,
    "allocation": "uniform",
    "schedule": "constant",
    "log_interval_s": 0.1,
}
EPOCHS = 4  # of runs whose weights are compared: what is undisturbed is trained once for all
PATIENCE_S = 60.0

Record = dict[str, Any]


def free_port() -> int:
    """Return a port that nobody listens on, nor soon will by chance.

    Those that the system gives away itself begin at 32768, those of Slurm's jobs end at 30000.
    """
    while True:
        port = random.SystemRandom().randrange(30_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def start_program(
    *arguments: object, pace_s: float = 0.0, **environment: str
) -> subprocess.Popen[str]:
    """Start the Convoy beside these tests where it finds their own networks."""
    path = f"{ROOT / 'src'}:{ROOT}"
    return start_convoy(*arguments, PYTHONPATH=path, PACE_S=str(pace_s), **environment)


def wait_until(
    holds: Callable[[], object], process: subprocess.Popen[str], what: str, limit_s: float
) -> float:
    """Wait until something holds, as long as the process lives; return how long it took."""
    started = time.monotonic()
    while not holds():
        assert process.poll() is None, (what, process.returncode, process.communicate())
        assert time.monotonic() - started < limit_s, f"not within {limit_s:g} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - started


class Team:
    """A lead and its nodes, as a user starts them; none outlives the test.

    Args:
        command: "train" or "lead".
        pace_s: how long a training step takes at least.
        options: of the run; those of `OPTIONS` unless given.
    """

    def __init__(
        self,
        command: str = "train",
        *arguments: object,
        pace_s: float = 0.02,
        out: str = "run",
        resume: bool = False,
        **options: Any,
    ) -> None:
        self.out = Path(out)
        chosen = options if resume else {**OPTIONS, **options, "out": out}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]
        flags += ["--resume", out] if resume else []
        self._since = len(self.events()) if resume else 0
        self.lead = start_program(command, *arguments, *flags, "--quiet", pace_s=pace_s)
        self._family: set[psutil.Process] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            for record in self.events(since=0):
                if record["event"] not in ("step", "nodes", "shares"):
                    print(json.dumps(record)[:300])
        self.family()
        if self.lead.poll() is None:
            self.lead.kill()
        if error is not None and not (self.lead.stdout and self.lead.stdout.closed):
            print(self.lead.communicate(timeout=10))
        for member in self._family:
            if member.is_running():
                member.kill()
        for stream in (self.lead.stdout, self.lead.stderr):
            if stream is not None:
                stream.close()
        self.lead.wait(10)

    # ------------------------------------------------------------ what it does

    def events(self, kind: str | None = None, since: int | None = None) -> list[Record]:
        """Return what the run has told so far; of a resumed run, since then."""
        try:
            text = (self.out / "events.jsonl").read_text()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind("\n") + 1].splitlines()
        records = [json.loads(line) for line in whole]
        first = since if since is not None else getattr(self, "_since", 0)
        return [r for r in records[first:] if kind is None or r["event"] == kind]

    def wait_for(
        self, holds: Callable[[], object], what: str, limit_s: float = PATIENCE_S
    ) -> float:
        """Wait until something holds, as long as the lead lives."""
        return wait_until(holds, self.lead, what, limit_s)

    def wait_for_steps(self, count: int = 1) -> None:
        """Wait until so many more steps were told of."""
        before = len(self.events("step"))
        self.wait_for(lambda: len(self.events("step")) >= before + count, f"{count} more steps")

    def group(self) -> list[int]:
        """Return who trains."""
        groups = self.events("group")
        return groups[-1]["nodes"] if groups else []

    def wait_for_group(self, *nodes: int, limit_s: float = PATIENCE_S) -> float:
        """Wait until exactly these nodes train."""
        return self.wait_for(lambda: self.group() == list(nodes), f"group {nodes}", limit_s)

    def pid(self, node: int) -> int:
        """Return a node's process number."""
        pids = [r["pid"] for r in self.events("join") if r["node"] == node]
        return int(pids[-1])

    def family(self) -> set[psutil.Process]:
        """Return all processes that the lead ever had under it, as far as they were seen."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._family |= set(psutil.Process(self.lead.pid).children(recursive=True))
        return self._family

    def descriptors(self) -> int:
        """Return how many files and sockets the lead holds."""
        return len(os.listdir(f"/proc/{self.lead.pid}/fd"))

    # ------------------------------------------------------------ what is done to it

    def kill(self, *nodes: int) -> float:
        """Kill nodes without warning; return when."""
        self.family()
        pids = [self.pid(node) for node in nodes]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return time.time()

    def wait_for_step_of(self, node: int) -> None:
        """Wait until a node has just begun a training step."""
        mark = Path(f"step-of-{self.pid(node)}")
        mark.unlink(missing_ok=True)
        self.wait_for(mark.exists, f"node {node} begins a step")

    def hurry(self) -> str:
        """Let the rest of the run take no longer than it must, and wait for its end.

        So a run can be far longer than the scene that a test is about, also on a busy machine.
        """
        Path("hurry").touch()
        return self.finish()

    def finish(self, code: int = 0, limit_s: float = PATIENCE_S) -> str:
        """Wait for the end; return what was said on standard error."""
        deadline = time.monotonic() + limit_s
        while self.lead.poll() is None:
            self.family()
            assert time.monotonic() < deadline, f"the run did not end within {limit_s:g} s"
            time.sleep(0.05)
        _, errors = self.lead.communicate(timeout=10)
        assert self.lead.returncode == code, errors
        assert "Traceback" not in errors
        return errors

    # ------------------------------------------------------------ what is checked

    def faults_of(self, node: int) -> list[Record]:
        """Return how a node was lost, each time."""
        return [r for r in self.events("leave") if r["node"] == node and r["fault"]]

    def assert_no_orphans(self, within_s: float = 3.0) -> None:
        """Check that no process of the run is left."""
        deadline = time.monotonic() + within_s
        while left := [p for p in self._family if _lives(p)]:
            assert time.monotonic() < deadline, f"still there after {within_s:g} s: {left}"
            time.sleep(0.02)

    def ledger(self) -> list[Update]:
        """Return the committed updates, as they were written."""
        text = (self.out / "ledger.jsonl").read_text()
        return [Update.from_line(json.loads(line)) for line in text.splitlines()]

    def assert_exact(self, epochs: int) -> None:
        """Check that every sample was trained once, and to what: the same as without faults."""
        assert find_faults(self.ledger(), SAMPLES, epochs) == []
        found = load_newest(self.out / "checkpoints").checkpoint
        assert found.progress["epoch"] == epochs
        expected, accuracy = undisturbed(epochs)
        for name, tensor in expected.items():
            assert (found.model[name] - tensor).abs().max().item() < 1e-9, name
        assert abs(found.progress["history"][-1]["test_accuracy"] - accuracy) <= 0.002


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@functools.cache
def undisturbed(epochs: int) -> tuple[dict[str, Tensor], float]:
    """Train the same on one node without a fault; return the weights and the accuracy."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        options = {**OPTIONS, "epochs": epochs, "out": str(Path(folder, "run"))}
        del options["allocation"]
        run = run_training({**options, "strategy": "single"})
        torch.set_num_threads(threads)
        weights = load_newest(Path(folder, "run", "checkpoints")).checkpoint.model
        return weights, run.accuracy
