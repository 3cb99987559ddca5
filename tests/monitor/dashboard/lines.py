"""Lines of `events.jsonl`, as short as a test needs them."""

import json
from pathlib import Path
from typing import Any

from convoy.monitor.events import EndEvent, Event, StartEvent, StepEvent, as_record

T0 = 1_800_000_000.0


def start(**other: Any) -> StartEvent:
    values: dict[str, Any] = {
        "model": "lenet5",
        "parameters": 10,
        "data": "fashion-mini",
        "train_samples": 1_000_000,
        "test_samples": 100,
        "epochs": 4,
        "batch": 100,
        "strategy": "lockstep",
        "executor": "eager",
        "device": "cpu",
        "precision": "fp32",
        "memory_format": "contiguous",
        "threads": 1,
        "from_step": 0,
        "reason": "a new run",
    }
    return StartEvent(**(values | other))


def step(samples: int, loss: float = 0.5) -> StepEvent:
    return StepEvent(
        epoch=1,
        step=samples,
        steps=10**7,
        samples=samples,
        loss=loss,
        accuracy=0.25,
        samples_per_s=100.0,
        learning_rate=0.1,
    )


def end() -> EndEvent:
    return EndEvent(state="finished", reason="all 4 epochs are done")


def line(event: Event, when: float = T0) -> str:
    return json.dumps(as_record(event, when)) + "\n"


def append(path: Path, *events: Event) -> None:
    """Write events to the end of a file, as a run does."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(line(event) for event in events)


def make_finished_run(path: Path) -> Path:
    """Make a run's folder with a few events."""
    path.mkdir(parents=True)
    append(path / "events.jsonl", start(), step(100), step(200), end())
    return path
