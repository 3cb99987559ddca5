"""The strategies by name: how nodes work together on one job."""

from typing import Protocol

from convoy.outer.job import Job
from convoy.registry import Entry, Registry


class Strategy(Protocol):
    """Trains a job to its end."""

    def __call__(self, job: Job) -> str:
        """Train, and return in words why it ended."""
        ...


STRATEGIES: Registry[Strategy] = Registry(
    "strategy",
    {"single": Entry("convoy.outer.single:train_single", "one node trains the whole batch")},
)
