"""A training step for one batch size: a program, the engine that runs it, and its tensors."""

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from convoy.inner.tasks.instructions import Instruction, Program, Sgd
from convoy.inner.tasks.plan import Plan
from convoy.inner.tasks.priorities import Kind, order_of, reversed_edges
from convoy.inner.tasks.program import write_program
from convoy.inner.tasks.tasks import FORWARD, SECTIONS, Task, form_tasks
from convoy.inner.tasks.timeline import Help, Span, Timeline

SMALLEST_GROUP = 2  # samples; with one, kernels take other, slower ways
_SAMPLES_PER_GROUP = 8  # where nobody has measured: a group's numbers fit a core's cache
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

    def run(self, threads: int, section: int = FORWARD) -> None:
        """Do a section of the step; the first one begins it, and the others follow in order."""
        ...

    def costs(self) -> list[float]:
        """Do the step on one thread; return the seconds of each instruction."""
        ...

    def times(self) -> list[list[float]]:
        """Return thread, ready, start, end and time waited of each task in the last step."""
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

    def fitted(self, samples: int) -> "Grain":
        """Return the same for so many samples.

        >>> Grain(0, 4).fitted(128).groups, Grain(16, 4, batch=128).fitted(64).groups
        (16, 8)
        """
        if self.groups:
            return replace(self, groups=self.of_share(samples))
        return replace(self, groups=max(self.threads, -(-samples // _SAMPLES_PER_GROUP)))

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
        self._make_engine = make_engine
        self._program = write_program(plan, group_sizes(samples, grain.groups), sgd)
        self._engine = make_engine(self._program)
        self._tasks: list[Task] = []
        self._priorities: list[float] = []
        self._form([0.0] * len(self._program.instructions))

    def twin(self) -> "Step":
        """Return another step that is cut in the same way, for another batch at the same time."""
        found = copy.copy(self)
        found._engine = self._make_engine(self._program)
        found._engine.form(found._tasks, found._priorities)
        return found

    def bind(self, tensors: Mapping[str, Tensor]) -> None:
        """Put a batch, weights, gradients, momentum and buffers into their places."""
        inputs = self._program.inputs
        for name, tensor in tensors.items():
            if name in inputs:
                self._engine.set(inputs[name], tensor)

    def run(self, tensors: Mapping[str, Tensor], section: int = FORWARD) -> None:
        """Do the step, or a section of it, with these tensors and those bound before."""
        self.bind(tensors)
        self._engine.run(self._grain.threads, section)

    @property
    def logits(self) -> Tensor:
        """Return what the network said in the last step."""
        return self._engine.get(self._program.logits)

    @property
    def error(self) -> Tensor | None:
        """Return what flows back from a part of a network, if somebody waits for it."""
        place = self._program.error
        return self._engine.get(place) if place >= 0 else None

    def forget_batch(self) -> None:
        """Let go of what went in and came out."""
        program, nothing = self._program, torch.empty(0)
        given = [program.inputs.get(name, -1) for name in ("images", "labels", "keys", "flow")]
        for place in (*given, program.logits, program.error):
            if place >= 0:
                self._engine.set(place, nothing)

    def measure(self, tensors: Mapping[str, Tensor]) -> None:
        """Do a step and cut it anew by what everything costs: urgent work goes first.

        What is alike in all groups counts as equal, so that no group is favoured for a noise.
        """
        self.bind(tensors)
        for section in SECTIONS if self._program.in_sections else (FORWARD,):
            self._engine.run(self._grain.threads, section)
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
            Span(
                number,
                task.name,
                task.kind,
                int(thread),
                ready,
                start,
                end,
                tuple(task.before),
                waited,
            )
            for number, (task, (thread, ready, start, end, waited)) in enumerate(rows)
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
        self._priorities = order_of(self._grain.priority, weights, after)
        self._engine.form(self._tasks, self._priorities)


def named_tensors(part: nn.Module, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a network, or of a part, by the names of their places in a program."""
    found = {f"p:{name}": p.detach() for name, p in part.named_parameters()}
    found |= {f"b:{name}": b for name, b in part.named_buffers()}
    return found | {f"g:{name}": g for name, g in gradients.items()}


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
