"""A resumed run is the run that was never interrupted, to the last bit."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convoy.errors import CheckpointError, ConfigError, Interrupted
from convoy.monitor.events import CheckpointEvent, Event
from convoy.storage.checkpoint import Checkpoint, list_checkpoints, load_newest
from convoy.trainer import fit, run_training
from tests.conftest import make_stripes

OPTIONS: dict[str, Any] = {
    "batch": 8,
    "lr": 0.05,
    "augment": "crop+flip",
    "cutout": 3,
    "label_smoothing": 0.1,
    "precision": "fp32",
    "memory_format": "channels_last",
    "device": "cpu",
    "quiet": True,
}


class Noise(nn.Module):
    """Draws from torch's own generator, as a user's layer may."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.01 * torch.randn_like(x) if self.training else x


def network() -> nn.Module:
    """Everything that has state or draws random numbers: batch-norm, dropout, noise."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout2d(0.1),
        Noise(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(400, 2),
    )


def train(**options: object) -> None:
    model = network()
    fit(model, make_stripes(60), make_stripes(20, seed=1), **{**OPTIONS, **options})


def newest(run: str) -> Checkpoint:
    return load_newest(Path(run) / "checkpoints").checkpoint


def assert_equal_state(one: Checkpoint, two: Checkpoint) -> None:
    for mine, theirs in ((one.model, two.model), (one.momentum, two.momentum)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert metrics(one) == metrics(two)


def metrics(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the progress without its clocks."""
    values = {k: v for k, v in checkpoint.progress.items() if not k.endswith("seconds")}
    values["history"] = [
        {k: v for k, v in record.items() if k != "seconds"} for record in values["history"]
    ]
    return values


def test_five_epochs_and_five_more_equal_ten() -> None:
    train(epochs=10, out="whole")
    train(epochs=10, out="parts", stop_after=5)
    assert len(newest("parts").progress["history"]) == 5
    train(resume="parts")
    assert_equal_state(newest("whole"), newest("parts"))


def test_more_epochs_on_a_finished_run_equal_one_long_run() -> None:
    constant = {"schedule": "constant", "warmup_epochs": 0.0}
    train(epochs=4, out="whole", **constant)
    train(epochs=2, out="parts", **constant)
    train(epochs=4, resume="parts")
    assert_equal_state(newest("whole"), newest("parts"))


def test_a_resume_from_the_middle_of_an_epoch_is_exact() -> None:
    train(epochs=3, out="whole", checkpoint_steps=5)
    shutil.copytree("whole", "cut")
    for path in list_checkpoints(Path("cut/checkpoints")):
        if path.name != "step-00000020":
            shutil.rmtree(path)
    assert newest("cut").progress["step"] == 4  # of the third epoch's 8
    train(resume="cut")
    assert_equal_state(newest("whole"), newest("cut"))


class InterruptAt:
    """Presses Ctrl-C when a checkpoint of some step is written."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.fired = 0

    def receive(self, event: Event, when: float) -> None:
        del when
        if isinstance(event, CheckpointEvent) and event.step == self.step:
            self.fired += 1
            signal.raise_signal(signal.SIGINT)  # to this thread: it is heard at once

    def close(self) -> None:
        pass


def test_ctrl_c_saves_and_the_resumed_run_is_exact() -> None:
    options = {**OPTIONS, "model": "lenet5", "epochs": 2, "batch": 500, "checkpoint_steps": 7}
    del options["quiet"]
    run_training({**options, "out": "whole"})
    nemesis = InterruptAt(28)
    with pytest.raises(Interrupted, match="all is saved") as caught:
        run_training({**options, "out": "parts"}, sinks=[nemesis])
    assert caught.value.exit_code == 130
    assert nemesis.fired == 1
    assert newest("parts").progress["updates"] == 28
    run_training({}, resume=Path("parts"))
    assert_equal_state(newest("whole"), newest("parts"))


def test_a_resume_needs_the_same_model_and_data() -> None:
    train(epochs=2, out="run", stop_after=1)
    other = nn.Sequential(nn.Flatten(), nn.Linear(144, 2))
    with pytest.raises(CheckpointError, match="does not fit the model at"):
        fit(other, make_stripes(60), make_stripes(20, seed=1), resume="run", quiet=True)
    with pytest.raises(CheckpointError, match="'data' differs"):
        fit(network(), make_stripes(60, seed=9), make_stripes(20, seed=1), resume="run", quiet=True)


def test_a_run_of_objects_cannot_be_resumed_by_name() -> None:
    train(epochs=2, out="run", stop_after=1)
    with pytest.raises(ConfigError, match="handed over in Python"):
        run_training({}, resume=Path("run"))
