"""The learning rate at every step: a pure function of the step's number."""

import math
from dataclasses import dataclass

from convoy.config import Config


@dataclass(frozen=True, slots=True)
class Schedule:
    """A warm-up from zero, then a fall.

    Attributes:
        kind: "cosine", "step" or "constant".
        peak: the highest rate.
        steps_per_epoch: turns the epochs below into steps.
        epochs: the length of the whole run.
        warmup_epochs: the length of the straight rise.
        milestones: the epochs at which "step" multiplies by gamma.
        gamma: see milestones.
    """

    kind: str
    peak: float
    steps_per_epoch: int
    epochs: int
    warmup_epochs: float
    milestones: tuple[float, ...]
    gamma: float

    def rate(self, step: float) -> float:
        """Return the learning rate of a step, counted from 0 over the whole run.

        Between two steps, where nodes do not step together, it is that of the place between.

        >>> make_schedule(Config(epochs=2, lr=0.4, warmup_epochs=1.0), 2).rate(0)
        0.2
        """
        epoch = step / self.steps_per_epoch
        if epoch < self.warmup_epochs:
            steps = math.ceil(self.warmup_epochs * self.steps_per_epoch)
            return min(self.peak, self.peak * (step + 1) / steps)
        if self.kind == "step":
            return self.peak * self.gamma ** sum(epoch >= mark for mark in self.milestones)
        if self.kind == "cosine":
            length = self.epochs - self.warmup_epochs
            part = min((epoch - self.warmup_epochs) / length, 1.0) if length else 1.0
            return self.peak * 0.5 * (1 + math.cos(math.pi * part))
        return self.peak


def make_schedule(config: Config, steps_per_epoch: int) -> Schedule:
    """Return the schedule that a config describes."""
    return Schedule(
        kind=config.schedule,
        peak=config.lr,
        steps_per_epoch=steps_per_epoch,
        epochs=config.epochs,
        warmup_epochs=config.warmup_epochs,
        milestones=config.milestones or (config.epochs / 2, config.epochs * 3 / 4),
        gamma=config.gamma,
    )
