"""Where training stands: everything besides tensors that a resumed run must know."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """What one epoch gave; `seconds` counts from the start of the run, tests included."""

    epoch: int
    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float
    samples: int
    seconds: float


@dataclass(slots=True)
class Progress:
    """Counters of a run.

    Attributes:
        epoch: completed epochs.
        step: completed steps of the current epoch.
        updates: completed steps of the whole run.
        samples: samples learned from, over the whole run.
        train_seconds: time spent on steps.
        seconds: time spent on steps, tests and checkpoints.
        loss, correct, count: sums over the current epoch.
        history: the completed epochs.
    """

    epoch: int = 0
    step: int = 0
    updates: int = 0
    samples: int = 0
    train_seconds: float = 0.0
    seconds: float = 0.0
    loss: float = 0.0
    correct: int = 0
    count: int = 0
    history: list[EpochRecord] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Return a number that every update and every finished epoch raises by one."""
        return self.updates + self.epoch

    @property
    def samples_per_s(self) -> float:
        """Return the speed of the whole run's steps."""
        return self.samples / self.train_seconds if self.train_seconds else 0.0

    def finish_epoch(self, test_loss: float, test_accuracy: float) -> EpochRecord:
        """Close the current epoch and open the next."""
        record = EpochRecord(
            epoch=self.epoch + 1,
            train_loss=self.loss / self.count,
            train_accuracy=self.correct / self.count,
            test_loss=test_loss,
            test_accuracy=test_accuracy,
            samples=self.samples,
            seconds=self.seconds,
        )
        self.history.append(record)
        self.epoch += 1
        self.step = self.correct = self.count = 0
        self.loss = 0.0
        return record

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Progress":
        """Read what `as_dict` wrote."""
        history = [EpochRecord(**record) for record in values["history"]]
        return cls(**{**values, "history": history})
