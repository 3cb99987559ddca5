"""TensorBoard's own reader finds the numbers that were written."""

import builtins
import math
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from convoy.errors import ConfigError
from convoy.monitor.events import EvaluationEvent, NodesEvent
from convoy.monitor.tensorboard import make_tensorboard_sink
from tests.monitor.dashboard.lines import T0, end, start, step

EVALUATION = EvaluationEvent(
    epoch=1,
    samples=300,
    seconds=1.0,
    train_loss=0.4,
    train_accuracy=0.8,
    test_loss=0.6,
    test_accuracy=0.75,
    samples_per_s=100.0,
)
NODES = NodesEvent(
    step=2,
    nodes=[0, 2],
    speeds=[30.0, 10.0],
    shares=[75, 25],
    samples=[75, 25],
    busy_s=[1.0, 2.0],
    waiting_s=[1.0, 0.0],
    exchange_s=0.1,
)


def curves(folder: Path) -> dict[str, list[Any]]:
    """Return every curve as points of samples and value."""
    read = EventAccumulator(str(folder))
    read.Reload()
    return {
        tag: [(point.step, pytest.approx(point.value)) for point in read.Scalars(tag)]
        for tag in read.Tags()["scalars"]
    }


def test_its_files_are_read_back(tmp_path: Path) -> None:
    sink = make_tensorboard_sink(tmp_path / "tb")
    for second, event in enumerate([start(), step(100), step(200, 0.25), NODES, EVALUATION, end()]):
        sink.receive(event, T0 + second)
    sink.close()
    assert curves(tmp_path / "tb") == {
        "train/loss": [(100, 0.5), (200, 0.25)],
        "train/accuracy": [(100, 0.25), (200, 0.25)],
        "train/samples_per_s": [(100, 100.0), (200, 100.0)],
        "train/learning_rate": [(100, 0.1), (200, 0.1)],
        "speed/node_1": [(200, 30.0)],
        "speed/node_3": [(200, 10.0)],
        "share/node_1": [(200, 0.75)],
        "share/node_3": [(200, 0.25)],
        "waiting/node_1": [(200, 0.5)],
        "waiting/node_3": [(200, 0.0)],
        "test/loss": [(300, 0.6)],
        "test/accuracy": [(300, 0.75)],
    }


def test_times_are_those_of_the_events(tmp_path: Path) -> None:
    sink = make_tensorboard_sink(tmp_path)
    sink.receive(step(100), T0 + 7)
    sink.close()
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert read.Scalars("train/loss")[0].wall_time == T0 + 7


def test_what_is_no_number_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = make_tensorboard_sink(tmp_path)
    sink.receive(step(100, math.nan), T0)
    sink.receive(step(200, math.inf), T0)
    sink.receive(step(300), T0)
    sink.close()
    assert curves(tmp_path)["train/loss"] == [(300, 0.5)]
    assert caplog.text == ""


def test_nothing_is_written_before_there_is_something(tmp_path: Path) -> None:
    sink = make_tensorboard_sink(tmp_path / "tb")
    sink.receive(start(), T0)
    sink.close()
    assert not (tmp_path / "tb").exists()


def test_a_disk_that_refuses_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    sink = make_tensorboard_sink(tmp_path / "file" / "tb")
    for samples in (100, 200):
        sink.receive(step(samples), T0)
    sink.close()
    assert caplog.text.count("curves cannot be written") == 1


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *others: Any) -> Any:
        if name == "torch.utils.tensorboard":
            raise ModuleNotFoundError(name)
        return real(name, *others)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"not installed.*pip install 'convoy-train\[tensorboard"):
        make_tensorboard_sink(tmp_path)
