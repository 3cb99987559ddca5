"""What happens in a run, as one typed stream that files, terminals and pages read alike."""

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened; `kind` is its name in files."""

    kind: ClassVar[str]


@dataclass(frozen=True, kw_only=True)
class StartEvent(Event):
    """Training starts or goes on."""

    kind: ClassVar[str] = "start"
    model: str
    parameters: int
    data: str
    train_samples: int
    test_samples: int
    epochs: int
    batch: int
    strategy: str
    executor: str
    device: str
    precision: str
    memory_format: str
    threads: int
    from_step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    """How training stands, once per interval; loss and accuracy are of the epoch so far."""

    kind: ClassVar[str] = "step"
    epoch: int
    step: int
    steps: int
    samples: int
    loss: float
    accuracy: float
    samples_per_s: float
    learning_rate: float


@dataclass(frozen=True, kw_only=True)
class EvaluationEvent(Event):
    """An epoch is over and the network was tested."""

    kind: ClassVar[str] = "evaluation"
    epoch: int
    samples: int
    seconds: float
    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float
    samples_per_s: float


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent(Event):
    """A checkpoint is complete on disk."""

    kind: ClassVar[str] = "checkpoint"
    path: str
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class WarningEvent(Event):
    """Something is wrong that does not stop the run."""

    kind: ClassVar[str] = "warning"
    reason: str


@dataclass(frozen=True, kw_only=True)
class EndEvent(Event):
    """The run is over, for a reason."""

    kind: ClassVar[str] = "end"
    state: str
    reason: str


class Sink(Protocol):
    """Receives every event."""

    def receive(self, event: Event, when: float) -> None:
        """Take an event that happened at a Unix time."""
        ...

    def close(self) -> None:
        """Finish; no event follows."""
        ...


class EventStream:
    """Hands each event to every sink."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    def emit(self, event: Event) -> None:
        """Hand an event on, with the time of now."""
        now = time.time()
        for sink in self._sinks:
            sink.receive(event, now)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


def as_record(event: Event, when: float) -> dict[str, Any]:
    """Return an event as the plain values that are written to files."""
    return {"event": event.kind, "time": round(when, 3), **dataclasses.asdict(event)}
