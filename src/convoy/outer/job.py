"""A training job: everything a strategy works with, and how its state is saved and restored."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from convoy.config import Config
from convoy.data.augment import Augmentation
from convoy.data.batches import Batches
from convoy.data.images import TrainTest
from convoy.errors import CheckpointError, StorageError
from convoy.inner.executor import Executor
from convoy.inner.optimizer import momentum_tensors, restore_momentum
from convoy.inner.schedule import Schedule
from convoy.monitor.events import CheckpointEvent, EventStream, WarningEvent
from convoy.outer.progress import Progress
from convoy.outer.stop import Stop
from convoy.outer.timelines import Timelines
from convoy.storage.checkpoint import Checkpoint, save_checkpoint


@dataclass(eq=False)
class Job:
    """A network, its data and its state, ready to train.

    Attributes:
        identity: what the weights belong to; a checkpoint of another identity is refused.
        checkpoints: the folder that checkpoints go to.
        last_saved: the newest complete checkpoint.
        saved_moment: the updates and epochs it holds.
        save_error: why the newest state could not be saved, if it could not.
        deposit: takes checkpoints where someone else, the lead, writes them.
        describe_nodes: says what the summary tells of the nodes, where there are several.
        timelines: tells now and then what ran when inside a step.
    """

    config: Config
    data: TrainTest
    executor: Executor
    train: Batches
    test: Batches
    augmentation: Augmentation
    schedule: Schedule
    events: EventStream
    stop: Stop
    checkpoints: Path
    identity: dict[str, Any]
    progress: Progress = field(default_factory=Progress)
    last_saved: Path | None = None
    saved_moment: tuple[int, int] | None = None
    save_error: str | None = None
    deposit: Callable[[Checkpoint, str], None] | None = None
    describe_nodes: Callable[[], dict[str, Any]] | None = None
    timelines: Timelines = field(default_factory=Timelines)

    @property
    def model(self) -> nn.Module:
        """Return the network that is being trained."""
        return self.executor.model

    def snapshot(self, score: float | None = None) -> Checkpoint:
        """Return where training stands, as plain tensors and plain values."""
        return Checkpoint(
            step=self.progress.updates,
            model=dict(self.model.state_dict()),
            momentum=momentum_tensors(self.executor.optimizer, self.model),
            progress=self.progress.as_dict(),
            identity=self.identity,
            score=score,
        )

    def save(self, reason: str, score: float | None = None) -> None:
        """Write a checkpoint of this moment, unless there is one."""
        if self.saved_moment != (self.progress.updates, self.progress.epoch):
            self.keep(self.snapshot(score), reason)

    def keep(self, checkpoint: Checkpoint, reason: str) -> None:
        """Write a checkpoint; a disk that refuses it raises an alarm, not an end."""
        if self.deposit is not None:
            self.deposit(checkpoint, reason)
            return
        try:
            self.last_saved = save_checkpoint(self.checkpoints, checkpoint)
        except OSError as error:
            self.save_error = f"the checkpoint at step {checkpoint.step} was not saved: {error}"
            self.events.emit(WarningEvent(reason=self.save_error))
            return
        self.save_error = None
        self.saved_moment = (checkpoint.step, checkpoint.progress["epoch"])
        self.events.emit(
            CheckpointEvent(path=str(self.last_saved), step=checkpoint.step, reason=reason)
        )

    def require_saved(self) -> None:
        """Fail unless the newest state is safely on disk."""
        if self.save_error is not None:
            raise StorageError(f"{self.save_error} ({self.checkpoints})")

    def restore(self, checkpoint: Checkpoint, path: Path) -> None:
        """Go on from a checkpoint on disk."""
        self.take_over(checkpoint, str(path))
        self.last_saved = path
        self.saved_moment = (self.progress.updates, self.progress.epoch)

    def take_over(self, checkpoint: Checkpoint, origin: str) -> None:
        """Take over weights, momentum and progress from a state that belongs here."""
        check_identity(checkpoint, self.identity, origin)
        check_tensors(checkpoint, self.model, origin)
        self.model.load_state_dict(checkpoint.model)
        restore_momentum(self.executor.optimizer, self.model, checkpoint.momentum)
        self.progress = Progress.from_dict(checkpoint.progress)


def check_identity(checkpoint: Checkpoint, expected: dict[str, Any], origin: str) -> None:
    """Refuse a checkpoint of another model, data set or seed, naming what differs."""
    for name, value in expected.items():
        if checkpoint.identity.get(name) != value:
            raise CheckpointError(
                f"{origin} belongs to another run: its '{name}' differs",
                got=checkpoint.identity.get(name),
                allowed=repr(value),
            )


def check_tensors(checkpoint: Checkpoint, model: nn.Module, origin: str) -> None:
    """Refuse a checkpoint whose tensors are not those of the network, naming the first."""
    expected = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    given = {name: tuple(t.shape) for name, t in checkpoint.model.items()}
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            raise CheckpointError(
                f"{origin} does not fit the model at '{name}'",
                got=given.get(name, "missing"),
                allowed=str(expected.get(name, "not part of the model")),
            )
