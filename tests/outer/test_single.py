"""Plain training on one node: exactly what a hand-written loop would do."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from convoy.config import Config
from convoy.errors import Diverged
from convoy.monitor.events import EvaluationEvent, StepEvent
from convoy.randomness import epoch_order
from convoy.run import Run
from convoy.trainer import fit, run_training
from tests.conftest import Recorder, make_stripes


def small_network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), nn.MaxPool2d(5), nn.Flatten(), nn.Linear(12, 2)
    )


def train(model: nn.Module, **options: Any) -> Run:
    common: dict[str, Any] = {
        "epochs": 2,
        "batch": 8,
        "lr": 0.1,
        "precision": "fp64",
        "memory_format": "contiguous",
        "device": "cpu",
        "quiet": True,
    }
    return fit(model, make_stripes(50), make_stripes(20, seed=1), **{**common, **options})


def by_hand(model: nn.Module, epochs: int, batch: int, rates: list[float]) -> list[float]:
    """Train with nothing of Convoy's but the order of the samples; return the epochs' losses."""
    data = make_stripes(50)
    pixels = data.images_NCHW.double()
    pixels = (pixels - pixels.mean()) / pixels.std(correction=0)
    model.double()
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    losses, step = [], 0
    for epoch in range(epochs):
        total = 0.0
        for picked in epoch_order(0, epoch, len(data)).split(batch):
            loss = functional.cross_entropy(model(pixels[picked]), data.labels[picked])
            model.zero_grad()
            loss.backward()
            total += loss.item() * len(picked)
            sgd_by_hand(list(model.parameters()), velocity, rates[step])
            step += 1
        losses.append(total / len(data))
    return losses


def sgd_by_hand(weights: list[nn.Parameter], velocity: list[Tensor], rate: float) -> None:
    for w, v in zip(weights, velocity, strict=True):
        assert w.grad is not None
        gradient = w.grad + 5e-4 * w.detach()
        v.mul_(0.9).add_(gradient)
        w.data -= rate * (gradient + 0.9 * v)


def test_weights_and_losses_equal_a_loop_written_by_hand() -> None:
    ours, reference = small_network(), small_network()
    run = train(ours, schedule="cosine", warmup_epochs=1.0)
    warmup = [0.1 * (step + 1) / 7 for step in range(7)]
    cosine = [0.05 * (1 + math.cos(math.pi * step / 7)) for step in range(7)]
    losses = by_hand(reference, 2, 8, warmup + cosine)
    for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    assert [r.train_loss for r in run.history] == pytest.approx(losses, abs=1e-6)


def test_two_runs_with_one_seed_are_equal_to_the_bit_and_another_seed_is_not() -> None:
    same = [train(small_network(), augment="crop+flip", cutout=4) for _ in range(2)]
    other = train(small_network(), augment="crop+flip", cutout=4, seed=1)
    first, second, third = (list(run.model.parameters()) for run in (*same, other))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, third, strict=True))


def test_a_short_last_batch_counts_every_sample_once() -> None:
    run = train(small_network())
    assert run.summary["samples"] == 100
    assert run.summary["epochs"] == 2


def test_it_learns() -> None:
    assert train(small_network(), epochs=6).accuracy == 1.0


def test_the_target_accuracy_ends_training_early() -> None:
    run = train(small_network(), epochs=50, target_accuracy=0.9)
    assert run.history[-1].test_accuracy >= 0.9
    assert all(record.test_accuracy < 0.9 for record in run.history[:-1])
    assert run.state == "stopped"
    assert "0.9" in run.reason


def test_stop_after_leaves_and_says_how_to_go_on() -> None:
    run = train(small_network(), epochs=5, stop_after=2)
    assert (run.state, len(run.history)) == ("stopped", 2)
    assert "--resume" in run.reason


def test_a_diverging_run_fails_with_advice_and_keeps_its_record() -> None:
    with pytest.raises(Diverged, match=r"diverged.*smaller --lr") as caught:
        train(small_network(), lr=1e200, out="diverged", warmup_epochs=0.0)
    assert caught.value.exit_code == 5
    assert '"state": "failed"' in Path("diverged/summary.json").read_text()


def test_events_tell_steps_and_epochs(tmp_path: Path) -> None:
    recorder = Recorder()
    options = {"epochs": 1, "model": "lenet5", "log_interval_s": 0.1, "batch": 500}
    run = run_training({**options, "out": str(tmp_path / "run")}, sinks=[recorder])
    steps = [event for event in recorder.events if isinstance(event, StepEvent)]
    (evaluation,) = [event for event in recorder.events if isinstance(event, EvaluationEvent)]
    assert steps[-1].step == steps[-1].steps == 20
    assert all(event.samples_per_s > 0 for event in steps)
    assert evaluation.test_accuracy == run.accuracy
    assert steps[-1].loss == pytest.approx(evaluation.train_loss)


def test_a_model_with_batch_norm_and_dropout_trains_in_every_arithmetic() -> None:
    for precision in ("fp32", "bf16", "fp64"):
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(),
            nn.Linear(400, 2),
        )  # fmt: skip
        run = train(model, epochs=3, precision=precision, memory_format="channels_last")
        assert run.accuracy > 0.9, precision


def test_config_objects_run_too() -> None:
    from convoy.trainer import train as train_config

    config = Config(epochs=1, batch=1000, warmup_epochs=0.0, out="by-config")
    run = train_config(config)
    assert run.directory == Path("by-config")
    assert run.checkpoint is not None
    assert run.checkpoint.is_dir()
