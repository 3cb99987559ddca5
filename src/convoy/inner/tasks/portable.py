"""The engine for machines without a compiler: the same tasks, one after the other, in Python.

It gives the same numbers as the compiled one, up to rounding: the order of all sums is the same.
It is not faster than plain PyTorch, for Python runs one task at a time; each operation may use
torch's own threads.
"""

import heapq
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from convoy.inner.tasks.instructions import Instruction, Program, Slot
from convoy.inner.tasks.norms import PORTABLE
from convoy.inner.tasks.tasks import FORWARD, SECTIONS, Task


class PortableEngine:
    """Runs a program's tasks on the calling thread, the most urgent first."""

    def __init__(self, program: Program) -> None:
        self._instructions = program.instructions
        self._values: list[Tensor | None] = [None] * program.num_slots
        self._readers = [0] * program.num_slots
        for instruction in program.instructions:
            for slot in instruction.reads:
                self._readers[slot] += 1
        self._kept = set(program.results)
        self._tasks: Sequence[Task] = ()
        self._priorities: Sequence[float] = ()
        self._times: list[list[float]] = []
        self._before: list[int] = []  # tasks that each task still waits for
        self._left: list[int] = []  # calls that will still read each place
        self._next_section = FORWARD
        self._started = 0.0  # when the step was
        self._costs = [0.0] * len(program.instructions)

    def form(self, tasks: Sequence[Task], priorities: Sequence[float]) -> None:
        """Take over which instructions make a task, and which tasks go first."""
        self._tasks, self._priorities = tasks, priorities
        self._next_section = FORWARD
        self._after: list[list[int]] = [[] for _ in tasks]
        for number, task in enumerate(tasks):
            for other in task.before:
                self._after[other].append(number)

    def set(self, slot: int, tensor: Tensor) -> None:
        """Put a tensor into its place."""
        self._values[slot] = tensor
        self._kept.add(slot)

    def get(self, slot: int) -> Tensor:
        """Return the tensor in a place."""
        found = self._values[slot]
        assert found is not None
        return found

    @torch.no_grad()
    def run(self, threads: int, section: int = FORWARD) -> None:
        """Do a section of the step; the first one begins it."""
        del threads
        if section == FORWARD:
            self._begin()
        if section != self._next_section:
            raise RuntimeError("a section of the step that comes before was not done")
        self._next_section = FORWARD  # unless this one is done to its end
        begun = time.perf_counter() - self._started
        ready = [
            (-self._priorities[number], number)
            for number, task in enumerate(self._tasks)
            if task.section == section and not self._before[number]
        ]
        heapq.heapify(ready)
        for _, number in ready:
            self._times[number][1] = begun
        while ready:
            _, number = heapq.heappop(ready)
            self._times[number][2] = time.perf_counter() - self._started
            for index in self._tasks[number].instructions:
                self._call(index)
            now = self._times[number][3] = time.perf_counter() - self._started
            for other in self._after[number]:
                self._before[other] -= 1
                if not self._before[other] and self._tasks[other].section == section:
                    self._times[other][1] = now
                    heapq.heappush(ready, (-self._priorities[other], other))
        self._next_section = section + 1

    def _begin(self) -> None:
        self._started = time.perf_counter()
        self._next_section = FORWARD
        self._left = list(self._readers)
        self._before = [len(task.before) for task in self._tasks]
        self._times = [[0.0] * 5 for _ in self._tasks]

    def costs(self) -> list[float]:
        """Do the step; return the seconds of each instruction."""
        for section in SECTIONS:
            self.run(1, section)
        return list(self._costs)

    def times(self) -> list[list[float]]:
        """Return thread, ready, start, end and time waited of each task in the last step."""
        return self._times

    def helps(self) -> list[list[float]]:
        """Return thread, task, start and end of each piece that another thread did: none."""
        return []

    def _call(self, index: int) -> None:
        instruction = self._instructions[index]
        started = time.perf_counter()
        args = [self._filled(item) for item in instruction.args]
        kwargs = {key: self._filled(item) for key, item in instruction.kwargs.items()}
        function = PORTABLE.get(instruction.op._name, instruction.op)
        self._keep(instruction, function(*args, **kwargs))
        for slot in instruction.reads:
            self._left[slot] -= 1
            if not self._left[slot] and slot not in self._kept:
                self._values[slot] = None
        self._costs[index] = time.perf_counter() - started

    def _keep(self, instruction: Instruction, given: Any) -> None:
        results = given if len(instruction.outs) > 1 else (given,)
        for slot, result in zip(instruction.outs, results, strict=False):
            if slot is not None:
                self._values[slot] = result

    def _filled(self, item: Any) -> Any:
        if isinstance(item, Slot):
            return self._values[item.number]
        if isinstance(item, (list, tuple)):
            return type(item)(self._filled(part) for part in item)
        return item
