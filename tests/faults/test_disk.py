"""A disk that refuses: training goes on, the last good checkpoint stays, the end says so."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from convoy import files
from convoy.errors import StorageError
from convoy.monitor.events import CheckpointEvent, WarningEvent
from convoy.storage import checkpoint as checkpoint_module
from convoy.storage.checkpoint import load_newest
from convoy.trainer import run_training
from tests.conftest import Recorder, make_stripes


class FailingDisk:
    """Refuses some of the manifests that are written, counting how often it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refused: set[int]) -> None:
        self.asked = self.fired = 0
        write = files.write_manifest

        def refuse(path: Path, kind: str, content: dict[str, object]) -> None:
            self.asked += 1
            if self.asked in refused:
                self.fired += 1
                raise OSError(28, "No space left on device")
            write(path, kind, content)

        monkeypatch.setattr(checkpoint_module, "write_manifest", refuse)


EAGER = ["--precision=fp32", "--memory-format=contiguous", "--device=cpu", "--threads=1"]
OPTIONS = {
    "model": "tests.faults.paced:build",
    "epochs": 4,
    "batch": 1000,
    "precision": "fp32",
    "memory_format": "contiguous",
    "out": "run",
}


def test_a_full_disk_raises_an_alarm_and_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FailingDisk(monkeypatch, {2, 3})
    recorder = Recorder()
    run = run_training(OPTIONS, sinks=[recorder])
    assert disk.fired == 2
    kinds = [e.kind for e in recorder.events if isinstance(e, WarningEvent | CheckpointEvent)]
    assert kinds == ["checkpoint", "warning", "warning", "checkpoint"]
    assert run.state == "finished"
    assert load_newest(Path("run/checkpoints")).checkpoint.progress["epoch"] == 4
    assert not list(Path("run").rglob(".partial-*"))


def test_a_last_save_that_fails_fails_the_run_and_keeps_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = FailingDisk(monkeypatch, {4})
    with pytest.raises(StorageError, match=r"not saved.*No space left.*run/checkpoints") as caught:
        run_training(OPTIONS)
    assert disk.fired == 1
    assert caught.value.exit_code == 1
    assert load_newest(Path("run/checkpoints")).checkpoint.progress["epoch"] == 3


def test_a_real_limit_on_file_size_is_told_in_one_line() -> None:
    """The kernel refuses the write itself: safetensors' own error must become ours."""
    Path("big_model.py").write_text(
        "from torch import nn\n"
        "def build(in_shape, num_classes):\n"
        "    big = nn.Linear(784, 4000), nn.Linear(4000, num_classes)\n"
        "    return nn.Sequential(nn.Flatten(), *big)\n"
    )

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    command = [sys.executable, "-m", "convoy", "train", "--model=big_model:build", "--epochs=1"]
    done = subprocess.run(
        [*command, "--batch=1000", "--out=run", "--warmup-epochs=0", *EAGER],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "was not saved" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(Path("run/checkpoints").iterdir())


def test_the_model_is_not_needed_on_disk_to_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    FailingDisk(monkeypatch, {1})
    model = nn.Sequential(nn.Flatten(), nn.Linear(144, 2))
    from convoy.trainer import fit

    with pytest.raises(StorageError):
        fit(model, make_stripes(50), make_stripes(20), epochs=1, batch=5, quiet=True)
    assert any(p.grad is not None for p in model.parameters())
