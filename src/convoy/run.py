"""What a run gave: numbers, history and where everything lies."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from convoy.config import Config
from convoy.machine import machine, versions
from convoy.models.blocks import count_parameters
from convoy.outer.job import Job
from convoy.outer.progress import EpochRecord
from convoy.storage.runfolder import RunFolder


@dataclass(frozen=True, eq=False)
class Run:
    """The outcome of a training run.

    Attributes:
        config: the effective configuration.
        state: "finished", or "stopped" where it was asked to end before its last epoch.
        reason: why it ended, in words.
        model: the trained network, on the device it was trained on.
        directory: the run's folder.
        checkpoint: the newest checkpoint.
        history: one record per epoch.
        shares: the part of the work that each node was given.
        summary: everything that `--json` prints.
    """

    config: Config
    state: str
    reason: str
    model: nn.Module
    directory: Path
    checkpoint: Path | None
    history: list[EpochRecord]
    shares: list[float]
    summary: dict[str, Any]

    @property
    def accuracy(self) -> float:
        """Return the test accuracy after the last epoch."""
        return self.history[-1].test_accuracy

    @property
    def best_accuracy(self) -> float:
        """Return the highest test accuracy of any epoch."""
        return max(record.test_accuracy for record in self.history)


def summarise(job: Job, folder: RunFolder, state: str, reason: str) -> dict[str, Any]:
    """Return what `summary.json` and `--json` say of a run."""
    progress, config = job.progress, job.config
    last = progress.history[-1] if progress.history else None
    return {
        "state": state,
        "reason": reason,
        "strategy": config.strategy,
        "executor": config.executor,
        "nodes": 1,
        "model": config.model,
        "parameters": count_parameters(job.model),
        "data": config.data,
        "epochs": progress.epoch,
        "samples": progress.samples,
        "seconds": round(progress.seconds, 3),
        "samples_per_s": round(progress.samples_per_s, 1),
        "train_loss": last.train_loss if last else None,
        "test_accuracy": last.test_accuracy if last else None,
        "best_accuracy": max((r.test_accuracy for r in progress.history), default=None),
        "shares": [1.0],
        "speeds": [round(progress.samples_per_s, 1)],
        "staleness_mean": 0.0,
        "idle_fraction": 0.0,
        "faults": 0,
        "checkpoint": str(job.last_saved) if job.last_saved else None,
        "run_dir": str(folder.path),
        "seed": config.seed,
        "device": config.device,
        "precision": config.precision,
        "memory_format": config.memory_format,
        "versions": versions(),
        "machine": machine(),
        "history": [asdict(record) for record in progress.history],
        **(job.describe_nodes() if job.describe_nodes is not None else {}),
    }
