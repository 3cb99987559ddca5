"""Runs made by hand: folders with events, as a run of several nodes leaves them."""

import json
from collections.abc import Sequence
from pathlib import Path

from convoy.config import Config
from convoy.monitor.events import (
    EndEvent,
    EvaluationEvent,
    Event,
    JoinEvent,
    LeaveEvent,
    NodesEvent,
    StalenessEvent,
    StartEvent,
    StepEvent,
    as_record,
)
from convoy.storage.runfolder import RunFolder

START = 1_800_000_000.0
ACCURACIES = (0.5, 0.7, 0.8)


def start(strategy: str = "lockstep", **more: object) -> StartEvent:
    """Return how a run begins."""
    values: dict[str, object] = {
        "model": "lenet5",
        "parameters": 61706,
        "data": "fashion-mini",
        "train_samples": 1000,
        "test_samples": 200,
        "epochs": 3,
        "batch": 100,
        "strategy": strategy,
        "executor": "eager",
        "device": "cpu",
        "precision": "fp32",
        "memory_format": "contiguous",
        "threads": 1,
        "from_step": 0,
        "reason": "a new run",
        **more,
    }
    return StartEvent(**values)  # type: ignore[arg-type]


def events(
    names: Sequence[str] = ("node 1", "node 2", "node 3"),
    accuracies: Sequence[float] = ACCURACIES,
    *,
    epoch_s: float = 10.0,
    strategy: str = "lockstep",
    ended: bool = True,
) -> list[tuple[Event, float]]:
    """Return what happens in a run: each event, and when, in seconds since the start."""
    found: list[tuple[Event, float]] = [(start(strategy), 0.0)]
    for node, name in enumerate(names):
        joined = JoinEvent(node=node, name=name, pid=100 + node, device="cpu", reason="a probe")
        found.append((joined, 0.5))
    for epoch, accuracy in enumerate(accuracies, 1):
        for part in range(1, 6):
            when = epoch_s * (epoch - 1 + 0.18 * part)
            samples = 1000 * (epoch - 1) + 200 * part
            found += [(_step(epoch, part, samples, accuracy), when)]
            found += [(_nodes(len(names), epoch, part), when)] if names else []
        found.append((_evaluation(epoch, accuracy, epoch_s), epoch_s * epoch))
    if strategy == "server":
        nodes = list(range(len(names)))
        staleness = StalenessEvent(step=9, counts=[5, 9, 4, 2], nodes=nodes, latest=nodes)
        found.append((staleness, epoch_s * len(accuracies)))
    if names:
        lost = LeaveEvent(node=len(names) - 1, fault=True, reason=f"{names[-1]} died")
        found.append((lost, epoch_s * len(accuracies)))
    if ended:
        done = EndEvent(state="finished", reason="all epochs are done")
        found.append((done, epoch_s * len(accuracies) + 1))
    return found


def _step(epoch: int, part: int, samples: int, accuracy: float) -> StepEvent:
    return StepEvent(
        epoch=epoch,
        step=2 * part,
        steps=10,
        samples=samples,
        loss=2.3 * (1 - accuracy) - 0.01 * part,
        accuracy=accuracy - 0.02 * (5 - part),
        samples_per_s=900.0 + 10 * part,
        learning_rate=0.1 / epoch,
    )


def _evaluation(epoch: int, accuracy: float, epoch_s: float) -> EvaluationEvent:
    return EvaluationEvent(
        epoch=epoch,
        samples=1000 * epoch,
        seconds=epoch_s * epoch,
        train_loss=2.3 * (1 - accuracy),
        train_accuracy=accuracy,
        test_loss=2.4 * (1 - accuracy),
        test_accuracy=accuracy,
        samples_per_s=950.0,
    )


def _nodes(count: int, epoch: int, part: int) -> NodesEvent:
    nodes = list(range(count))
    wobble = [1 + 0.1 * ((7 * node + 3 * part + epoch) % 5 - 2) / 2 for node in nodes]
    speeds = [round(600 / (node + 1) * wobble[node], 2) for node in nodes]
    shares = [round(100 / (node + 1)) for node in nodes]
    busy = [round(share / speed, 4) for share, speed in zip(shares, speeds, strict=True)]
    return NodesEvent(
        step=10 * (epoch - 1) + 2 * part,
        nodes=nodes,
        speeds=speeds,
        shares=shares,
        samples=[2 * share for share in shares],
        busy_s=busy,
        waiting_s=[round(max(busy) - each + 0.01, 4) for each in busy],
        exchange_s=0.001,
    )


def records(happened: Sequence[tuple[Event, float]]) -> list[dict[str, object]]:
    """Return events as the lines of a file hold them."""
    return [as_record(event, START + when) for event, when in happened]


def make_run(
    path: Path, happened: Sequence[tuple[Event, float]], summary: object = None, **options: object
) -> Path:
    """Make a run's folder."""
    path.mkdir(parents=True)
    folder = RunFolder(path)
    folder.write_config(Config().replaced(options))
    lines = [json.dumps(record) + "\n" for record in records(happened)]
    folder.events.write_text("".join(lines))
    if summary is not None:
        folder.summary.write_text(json.dumps(summary))
    return path
