"""Curves of a run as files that TensorBoard reads."""

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.errors import ConfigError
from convoy.monitor.events import EvaluationEvent, Event, NodesEvent, Sink, StepEvent

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_log = logging.getLogger(__name__)


def make_tensorboard_sink(folder: Path) -> Sink:
    """Return a sink that writes curves to a folder, which is made with the first of them."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: F401 - is it there?
    except ImportError:
        raise ConfigError(
            "TensorBoard's files need a package that is not installed",
            got="--tensorboard",
            hint="Run: pip install 'convoy-train[tensorboard]', or in a clone: make setup-dev.",
        ) from None
    return TensorBoard(folder)


class TensorBoard:
    """Writes numbers over the samples trained; a full disk never stops training."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None
        self._samples = 0  # nodes report by steps, all else by samples
        self._failed = False

    def receive(self, event: Event, when: float) -> None:
        """Write what an event says in numbers."""
        match event:
            case StepEvent():
                self._samples = event.samples
                self._write(of_step(event), when)
            case EvaluationEvent():
                self._samples = event.samples
                self._write(of_evaluation(event), when)
            case NodesEvent():
                self._write(of_nodes(event), when)
            case _:
                pass

    def close(self) -> None:
        """Finish the file."""
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as error:
                self._complain(error)

    def _write(self, values: dict[str, float], when: float) -> None:
        if self._failed:
            return
        try:
            writer = self._open()
            for name, value in values.items():
                if math.isfinite(value):  # TensorBoard would draw a gap, and warn each time
                    writer.add_scalar(name, value, self._samples, walltime=when)
        except OSError as error:
            self._complain(error)

    def _open(self) -> "SummaryWriter":
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), flush_secs=10)
        return self._writer

    def _complain(self, error: OSError) -> None:
        if not self._failed:
            _log.warning("curves cannot be written to %s: %s", self._folder, error)
        self._failed = True


def of_step(event: StepEvent) -> dict[str, float]:
    """Return the numbers of a step, by the names of their curves."""
    return {
        "train/loss": event.loss,
        "train/accuracy": event.accuracy,
        "train/samples_per_s": event.samples_per_s,
        "train/learning_rate": event.learning_rate,
    }


def of_evaluation(event: EvaluationEvent) -> dict[str, float]:
    """Return the numbers of a test."""
    return {"test/loss": event.test_loss, "test/accuracy": event.test_accuracy}


def of_nodes(event: NodesEvent) -> dict[str, float]:
    """Return how each node did: its speed, its part of the samples, its part of time waiting."""
    trained = sum(event.samples)
    values: dict[str, float] = {}
    rows = zip(event.nodes, event.speeds, event.samples, event.busy_s, event.waiting_s, strict=True)
    for node, speed, samples, busy_s, waiting_s in rows:
        spent_s, name = busy_s + waiting_s, f"node_{node + 1}"  # people count from one
        values[f"speed/{name}"] = speed
        values[f"share/{name}"] = samples / trained if trained else 0.0
        values[f"waiting/{name}"] = waiting_s / spent_s if spent_s else 0.0
    return values
