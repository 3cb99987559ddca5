"""The strategies by name: how nodes work together on one job."""

from typing import Protocol

from convoy.outer.crew import Crew
from convoy.outer.job import Job
from convoy.registry import Entry, Registry

AUTO = "auto"  # lockstep where there are several nodes, single where there is one


class Strategy(Protocol):
    """Trains a job to its end."""

    def __call__(self, job: Job, crew: Crew) -> str:
        """Train, and return in words why it ended."""
        ...


STRATEGIES: Registry[Strategy] = Registry(
    "strategy",
    {
        "single": Entry("convoy.outer.single:train_single", "one node trains the whole batch"),
        "lockstep": Entry(
            "convoy.launch.lockstep_lead:lead_lockstep",
            "each node trains a share of every batch, in proportion to its speed",
        ),
        "server": Entry(
            "convoy.launch.server_lead:lead_server",
            "nodes train on their own and hand in what has changed; for slow or unsteady links",
        ),
        "agwu": Entry(
            "convoy.launch.server_lead:lead_server",
            "BPT-CNN as published: IDPA, and every node's increment merged as it comes",
        ),
        "sgwu": Entry(
            "convoy.launch.server_lead:lead_server",
            "BPT-CNN as published: IDPA, and the mean of all nodes' weights by accuracy",
        ),
        "hybrid": Entry(
            "convoy.launch.lockstep_lead:lead_lockstep",
            "convolutions by samples, fully connected layers by neurons; for large classifiers",
        ),
        "pipeline": Entry(
            "convoy.launch.pipeline:lead_pipeline",
            "each node computes some layers of every batch; batches follow each other closely",
        ),
    },
)
