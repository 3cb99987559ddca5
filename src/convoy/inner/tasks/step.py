"""A training step for one batch size: a program, the engine that runs it, and its tensors."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from convoy.data.batches import Batch
from convoy.inner.tasks.instructions import Instruction, Program, Sgd
from convoy.inner.tasks.plan import Plan
from convoy.inner.tasks.priorities import Kind, order_of, reversed_edges
from convoy.inner.tasks.program import write_program
from convoy.inner.tasks.tasks import Task, form_tasks
from convoy.inner.tasks.timeline import Help, Span, Timeline

SMALLEST_GROUP = 2  # samples; with one, kernels take other, slower ways
_GRAIN_S = 1e-4  # a task of less is mostly overhead


class Engine(Protocol):
    """Runs a program."""

    def form(self, tasks: list[Task], priorities: list[float]) -> None:
        """Take over which instructions make a task, and which tasks go first."""
        ...

    def set(self, slot: int, tensor: Tensor) -> None:
        """Put a tensor into its place."""
        ...

    def get(self, slot: int) -> Tensor:
        """Return the tensor in a place."""
        ...

    def run(self, threads: int) -> None:
        """Do the step."""
        ...

    def costs(self) -> list[float]:
        """Do the step on one thread; return the seconds of each instruction."""
        ...

    def times(self) -> list[list[float]]:
        """Return thread, ready, start and end of each task in the last step."""
        ...

    def helps(self) -> list[list[float]]:
        """Return thread, task, start and end of each piece that an idle thread did of a task."""
        ...


@dataclass(frozen=True, slots=True)
class Grain:
    """How a step is cut up.

    Attributes:
        groups: of samples; 0: as many as suit the batch.
        threads: that run the tasks.
        norms: batch-norm's statistics: of the whole batch, or of each group.
        priority: which of the ready tasks goes first.
        batch: samples that are so many groups; a share of them is fewer. 0: it is as many.
    """

    groups: int
    threads: int
    norms: Literal["batch", "group"] = "batch"
    priority: Kind = "rank"
    batch: int = 0

    def of_share(self, samples: int) -> int:
        """Return the groups of a share of the batch: of as many samples each.

        >>> Grain(16, 2, batch=128).of_share(64), Grain(16, 2, batch=128).of_share(9)
        (8, 2)
        >>> Grain(16, 2, batch=128).of_share(256), Grain(16, 2).of_share(64)
        (16, 16)
        """
        if not 0 < samples < self.batch:
            return self.groups
        return max(min(self.threads, self.groups), round(self.groups * samples / self.batch))


class Step:
    """One program on one engine."""

    def __init__(
        self,
        plan: Plan,
        samples: int,
        grain: Grain,
        sgd: Sgd | None,
        make_engine: Callable[[Program], Engine],
    ) -> None:
        self._grain = grain
        self._program = write_program(plan, group_sizes(samples, grain.groups), sgd)
        self._engine = make_engine(self._program)
        self._tasks: list[Task] = []
        self._form([0.0] * len(self._program.instructions))

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Put weights, gradients, momentum and buffers into their places."""
        for name, slot in self._program.inputs.items():
            if name in tensors:
                self._engine.set(slot, tensors[name])

    def run(self, batch: Batch, keys: Tensor) -> Tensor:
        """Do the step on a batch; return the logits."""
        inputs = self._program.inputs
        self._engine.set(inputs["images"], batch.images_NCHW)
        self._engine.set(inputs["labels"], batch.labels)
        self._engine.set(inputs["keys"], keys)
        self._engine.run(self._grain.threads)
        return self._engine.get(self._program.logits)

    def measure(self, batch: Batch, keys: Tensor) -> None:
        """Do a step and cut it anew by what everything costs: urgent work goes first.

        What is alike in all groups counts as equal, so that no group is favoured for a noise.
        """
        self.run(batch, keys)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            costs = self._engine.costs()
        finally:
            torch.set_num_threads(threads)
        self._form(_levelled(self._program.instructions, costs))

    @property
    def tasks(self) -> list[Task]:
        """Return what the step is cut into."""
        return self._tasks

    def timeline(self) -> Timeline:
        """Return what happened in the last step."""
        rows = zip(self._tasks, self._engine.times(), strict=True)
        spans = tuple(
            Span(number, task.name, task.kind, int(thread), ready, start, end, tuple(task.before))
            for number, (task, (thread, ready, start, end)) in enumerate(rows)
        )
        helps = tuple(
            Help(int(task), int(thread), start, end)
            for thread, task, start, end in self._engine.helps()
        )
        return Timeline(self._grain.threads, spans, helps)

    def _form(self, costs: list[float]) -> None:
        self._tasks = form_tasks(self._program, costs, _GRAIN_S)
        after = reversed_edges([sorted(task.before) for task in self._tasks])
        weights = [task.cost or 1.0 for task in self._tasks]
        self._engine.form(self._tasks, order_of(self._grain.priority, weights, after))


def group_sizes(samples: int, groups: int) -> list[int]:
    """Split a batch into groups that differ by one sample at most.

    >>> group_sizes(10, 4)
    [3, 3, 2, 2]
    >>> group_sizes(3, 4)
    [3]
    """
    groups = max(1, min(groups, samples // SMALLEST_GROUP))
    return [samples // groups + (number < samples % groups) for number in range(groups)]


def _levelled(instructions: list[Instruction], costs: list[float]) -> list[float]:
    alike: dict[object, list[int]] = defaultdict(list)
    for index, instruction in enumerate(instructions):
        alone = instruction.part < 0 or instruction.group < 0
        alike[("alone", index) if alone else instruction.part].append(index)
    found = list(costs)
    for members in alike.values():
        mean = sum(costs[index] for index in members) / len(members)
        for index in members:
            found[index] = mean
    return found
