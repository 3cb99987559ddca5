"""The tasks of a program: stretches of instructions, and who waits for whom."""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from convoy.inner.tasks.instructions import Instruction, Program
from convoy.inner.tasks.plan import Kind

# The sections of a part's two passes: forward, the error that somebody waits for, gradients.
FORWARD, ERROR, GRADIENTS = SECTIONS = range(3)


@dataclass(eq=False, slots=True)
class Task:
    """Instructions that one thread does in one go.

    Attributes:
        instructions: their numbers in the program.
        before: the tasks it waits for.
        section: of the step: nothing of it begins before it is asked for.
        group: the samples it works on; -1: all, those of several groups, or none.
        cost: the seconds it is expected to take.
        heaviest: the cost of its dearest instruction, which it is named after.
    """

    instructions: list[int] = field(default_factory=list)
    before: set[int] = field(default_factory=set)
    kind: Kind = "forward"
    layer: str = ""
    group: int = -1
    cost: float = 0.0
    heaviest: float = -1.0
    section: int = 0

    @property
    def name(self) -> str:
        """Return what it computes, for people."""
        where = f", group {self.group + 1}" if self.group >= 0 else ""
        return f"{self.layer or 'input'} {self.kind}{where}"


def form_tasks(program: Program, costs: Sequence[float], grain_s: float) -> list[Task]:
    """Cut a program into tasks.

    Args:
        program: the instructions.
        costs: seconds that each of them takes.
        grain_s: a task is cut off as soon as it costs this much.
    """
    before = dependencies(program.instructions)
    sections = sections_of(program, before)
    keys = _Keys(program.instructions, before, costs, grain_s).assign()
    numbers: dict[Hashable, int] = {}
    tasks: list[Task] = []
    task_of: list[int] = []
    for index, key in enumerate(zip(sections, keys, strict=True)):
        if key not in numbers:
            numbers[key] = len(tasks)
            tasks.append(Task(section=sections[index]))
        number = numbers[key]
        task_of.append(number)
        _join(tasks[number], program.instructions[index], index, costs[index])
    for index, others in enumerate(before):
        mine = tasks[task_of[index]]
        mine.before.update(task_of[other] for other in others)
    for number, task in enumerate(tasks):
        task.before.discard(number)
    return tasks


def sections_of(program: Program, before: Sequence[set[int]]) -> list[int]:
    """Return each instruction's section: the first in which somebody asks for what it does.

    What a forward pass changes in buffers belongs to it: the next one reads it.
    """
    instructions = program.instructions
    if not program.in_sections:
        return [FORWARD] * len(instructions)
    buffers = {slot for name, slot in program.inputs.items() if name.startswith("b:")}
    roots: dict[int, set[int]] = {FORWARD: {program.logits, *buffers}, ERROR: {program.error}}
    found = [GRADIENTS] * len(instructions)
    for section in (ERROR, FORWARD):
        asked: set[int] = set()
        for index in range(len(instructions) - 1, -1, -1):
            if index in asked or roots[section].intersection(instructions[index].writes):
                found[index] = section
                asked |= before[index]
    return found


def _join(task: Task, instruction: Instruction, index: int, cost: float) -> None:
    if cost > task.heaviest:
        task.kind, task.layer, task.heaviest = instruction.kind, instruction.layer, cost
    task.instructions.append(index)
    task.group = instruction.group
    task.cost += cost


def dependencies(instructions: Sequence[Instruction]) -> list[set[int]]:
    """Return for each instruction those that must be done before it.

    A view is the same memory as what it was taken from: whoever changes that waits for those
    that look through the view, too. Who changes other rows of it waits for nobody.
    """
    maker: dict[int, int] = {}  # of a place
    where: dict[int, tuple[int, Rows]] = {}  # of a place: the memory, and which rows of it
    writers: dict[int, list[tuple[Rows, int]]] = defaultdict(list)  # of some memory
    readers: dict[int, list[tuple[Rows, int]]] = defaultdict(list)  # since it was written
    found: list[set[int]] = []
    for number, instruction in enumerate(instructions):
        mine = {maker[slot] for slot in instruction.reads if slot in maker}
        looks = [where.setdefault(slot, (slot, _ALL)) for slot in instruction.reads]
        changes = [where[slot] for slot in instruction.writes if slot in instruction.reads]
        is_view = bool(looks) and _is_view(instruction)
        for memory, rows in looks if not is_view else ():  # taking a view reads nothing
            mine.update(_touching(writers[memory], rows))
            readers[memory].append((rows, number))
        for memory, rows in changes:
            mine.update(_touching(readers[memory], rows))
            for former in (readers, writers):
                former[memory] = [pair for pair in former[memory] if not _covers(rows, pair[0])]
            writers[memory].append((rows, number))
        for out in instruction.outs:
            if out is not None:
                maker[out] = number
                where[out] = _seen_through(instruction, looks[0]) if is_view else (out, _ALL)
        mine.discard(number)
        found.append(mine)
    return found


Rows = tuple[int, float]  # from, to
_ALL: Rows = (0, math.inf)


def _touching(accesses: Sequence[tuple[Rows, int]], rows: Rows) -> list[int]:
    return [number for other, number in accesses if other[0] < rows[1] and rows[0] < other[1]]


def _covers(rows: Rows, other: Rows) -> bool:
    return rows[0] <= other[0] and other[1] <= rows[1]


def _is_view(instruction: Instruction) -> bool:
    aliases = (result.alias_info for result in instruction.op._schema.returns)
    return any(alias is not None and not alias.is_write for alias in aliases)


def _seen_through(view: Instruction, source: tuple[int, Rows]) -> tuple[int, Rows]:
    """Return what a view shows: some rows where it says so, or else all that its source shows."""
    memory, rows = source
    if view.op is torch.ops.aten.narrow.default and rows == _ALL and view.args[1] == 0:
        start, length = view.args[2:4]
        return memory, (start, start + length)
    return memory, rows


class _Keys:
    """Finds for each instruction the task that it belongs to."""

    def __init__(
        self,
        instructions: Sequence[Instruction],
        before: Sequence[set[int]],
        costs: Sequence[float],
        grain_s: float,
    ) -> None:
        self._instructions, self._before = instructions, before
        self._costs, self._grain_s = costs, grain_s
        self._phases: list[int] = []
        self._stretch: dict[Hashable, tuple[int, float]] = {}  # cuts so far, cost of the last
        self._bucket = 0

    def assign(self) -> list[Hashable]:
        """Return a key for each instruction; equal keys make one task."""
        return [self._key(i, instruction) for i, instruction in enumerate(self._instructions)]

    def _key(self, index: int, instruction: Instruction) -> Hashable:
        phase = self._phase(index, instruction)
        cost = self._costs[index]
        if instruction.tile >= 0:
            return ("tile", instruction.tile)
        if instruction.kind == "update":
            key = ("update", self._bucket)
            self._bucket += instruction.op._schema.name == "aten::_fused_sgd_"
            return key
        if instruction.group < 0 and phase:
            return ("once", index)
        row = (phase, instruction.group, instruction.side)
        cuts, held = self._stretch.get(row, (0, 0.0))
        if held >= self._grain_s:
            cuts, held = cuts + 1, 0.0
        self._stretch[row] = (cuts, held + cost)
        return (*row, cuts)

    def _phase(self, index: int, instruction: Instruction) -> int:
        """Count how often all groups have met before an instruction."""
        once = instruction.group < 0
        found = 0
        for other in self._before[index]:
            met = once and self._instructions[other].group >= 0
            found = max(found, self._phases[other] + met)
        self._phases.append(found)
        return found
