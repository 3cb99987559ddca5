"""Ours as a contender: a real run, through the same door as every user's, and its events."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from convoy.assembly import Given
from convoy.bench.peers import Task
from convoy.data.images import make_image_set
from convoy.data.load import wrap_data
from convoy.monitor.events import Event, NodesEvent, StepEvent
from convoy.trainer import run_training


@dataclass
class Recording:
    """What a run told: each event with the moment it came."""

    events: list[tuple[float, Event]] = field(default_factory=list)

    def receive(self, event: Event, when: float) -> None:
        """Take an event."""
        self.events.append((when, event))

    def close(self) -> None:
        """Finish."""

    def steps(self) -> list[tuple[float, int, int]]:
        """Return (time, updates, samples) at each report of progress."""
        return [
            (when, (event.epoch - 1) * event.steps + event.step, event.samples)
            for when, event in self.events
            if isinstance(event, StepEvent)
        ]

    def of(self, kind: type[Event]) -> list[tuple[float, Any]]:
        """Return the events of one kind."""
        return [(when, event) for when, event in self.events if isinstance(event, kind)]


def record_lockstep(
    task: Task, speeds: Sequence[float], steps: int, **options: object
) -> Recording:
    """Train in lockstep on emulated nodes; see `record_run`."""
    return record_run(task, steps, strategy="lockstep", speeds=tuple(speeds), **options)


def record_pipeline(
    task: Task, stages: int, speeds: Sequence[float], steps: int, **options: object
) -> Recording:
    """Train in stages, on emulated nodes where speeds are given; every step is told."""
    more = {"stages": stages, "speeds": tuple(speeds), "log_interval_s": 0.1, **options}
    return record_run(task, steps, strategy="pipeline", **more)


class Enough(Exception):  # noqa: N818 - it is a wish, not a fault
    """Raised by a recording that has what it wants: the run ends there, and saves nothing."""


def record_run(task: Task, steps: int, **options: object) -> Recording:
    """Train random images for so many steps, and return what the run told."""
    recording = Recording()
    record_into(recording, task, steps, **options)
    return recording


def record_into(recording: Recording, task: Task, steps: int, **options: object) -> None:
    """Train random images for so many steps, or until the recording has enough."""
    generator = torch.Generator().manual_seed(task.seed)
    count = task.batch * steps
    shape = (count, *task.in_shape)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, task.classes, (count,), generator=generator)
    part = make_image_set(images, labels, [str(i) for i in range(task.classes)], "random images")
    tiny = make_image_set(images[:64], labels[:64], part.classes, "random images")
    with TemporaryDirectory() as folder, suppress(Enough):
        run_training(
            {
                "data": "random images",
                "model": task.model,
                "batch": task.batch,
                "lr": task.lr,
                "warmup_epochs": 0.0,
                "schedule": "constant",
                "epochs": 1,
                "augment": "none",
                "precision": task.precision,
                "memory_format": task.memory_format,
                "device": "cpu",
                "threads": 1,
                "log_interval_s": 1.0,
                "out": str(Path(folder) / "run"),
                **options,
            },
            given=Given(data=wrap_data(part, tiny)),
            sinks=[recording],
        )


def busy_between(recording: Recording, first: int, last: int) -> list[tuple[float, float]]:
    """Return for how many seconds of a step each node worked and waited, between two steps."""
    found = [event for _, event in recording.of(NodesEvent) if first < event.step <= last]
    busy = zip(*(event.busy_s for event in found), strict=True)
    waiting = zip(*(event.waiting_s for event in found), strict=True)
    steps = last - first
    return [
        (sum(worked) / steps, sum(waited) / steps)
        for worked, waited in zip(busy, waiting, strict=True)
    ]


def speed_between(recording: Recording, first: int, last: int) -> float:
    """Return samples per second between two steps of a run."""
    points = recording.steps()
    start = next(point for point in points if point[1] >= first)
    stop = next((point for point in points if point[1] >= last), points[-1])
    return (stop[2] - start[2]) / (stop[0] - start[0])
