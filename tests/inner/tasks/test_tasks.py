"""Who waits for whom, and which instructions make a task."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from convoy.inner.arithmetic import Arithmetic
from convoy.inner.tasks.capture import capture
from convoy.inner.tasks.decompose import decompose
from convoy.inner.tasks.instructions import Instruction, Program, Sgd, Slot, slots_in
from convoy.inner.tasks.priorities import reversed_edges, runnable_order
from convoy.inner.tasks.program import write_program
from convoy.inner.tasks.tasks import dependencies, form_tasks
from tests.inner.tasks.nets import SHAPE, chain, hourglass, inception

_aten = torch.ops.aten


def _call(op: Any, *args: Any, outs: tuple[int | None, ...] = (), **more: Any) -> Instruction:
    """Make an instruction; what it changes is read off the operation."""
    reads = tuple(slots_in(args))
    changed = [
        slot
        for argument, value in zip(op._schema.arguments, args, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
        for slot in slots_in(value)
    ]
    writes = (*(out for out in outs if out is not None), *changed)
    options = {"part": 0, "group": 0, "kind": "forward", "layer": "a", **more}
    return Instruction(op, args, {}, outs, reads=reads, writes=writes, **options)


def _relu(source: int, out: int, **more: Any) -> Instruction:
    return _call(_aten.relu.default, Slot(source), outs=(out,), **more)


def _view(source: int, out: int) -> Instruction:
    return _call(_aten.t.default, Slot(source), outs=(out,))


def _rows(source: int, out: int, start: int, length: int) -> Instruction:
    return _call(_aten.narrow.default, Slot(source), 0, start, length, outs=(out,))


def _add(target: int, source: int) -> Instruction:
    return _call(_aten.add_.Tensor, Slot(target), Slot(source))


# ---------------------------------------------------------------- who waits for whom


def test_a_reader_waits_for_the_maker() -> None:
    assert dependencies([_relu(0, 1), _relu(1, 2), _relu(0, 3)]) == [set(), {0}, set()]


def test_a_change_waits_for_all_who_read_before() -> None:
    found = dependencies([_relu(0, 1), _relu(0, 2), _add(0, 9), _relu(0, 3)])
    assert found[2] == {0, 1}
    assert found[3] == {2}


def test_changes_follow_each_other() -> None:
    found = dependencies([_add(0, 8), _add(0, 9), _relu(0, 1)])
    assert found[1] == {0}
    assert found[2] == {1}


def test_a_view_is_the_memory_that_it_shows() -> None:
    found = dependencies([_view(0, 1), _relu(1, 2), _add(0, 9), _relu(1, 3)])
    assert found[1] == {0}
    assert found[2] == {1}  # reads through the view
    assert found[3] == {0, 2}


def test_a_change_through_a_view_is_seen_by_other_views() -> None:
    found = dependencies([_view(0, 1), _view(1, 2), _add(2, 9), _relu(0, 3), _relu(1, 4)])
    assert 2 in found[3]
    assert 2 in found[4]


def test_taking_a_view_reads_nothing() -> None:
    assert dependencies([_add(0, 9), _view(0, 1), _add(0, 8)]) == [set(), set(), {0}]


def test_other_rows_can_be_changed_at_the_same_time() -> None:
    found = dependencies(
        [_rows(0, 1, 0, 4), _rows(0, 2, 4, 4), _relu(0, 3), _add(1, 9), _add(2, 9), _relu(0, 4)]
    )
    assert found[3] == {0, 2}
    assert found[4] == {1, 2}
    assert found[5] == {3, 4}


def test_rows_that_overlap_cannot() -> None:
    found = dependencies([_rows(0, 1, 0, 5), _rows(0, 2, 4, 4), _add(1, 9), _add(2, 9)])
    assert found[3] == {1, 2}


def test_columns_and_rows_of_rows_are_taken_for_all_that_is_there() -> None:
    columns = _call(_aten.narrow.default, Slot(0), 1, 0, 2, outs=(1,))
    found = dependencies([columns, _rows(0, 2, 4, 4), _rows(2, 3, 0, 1), _add(1, 9), _add(3, 9)])
    assert found[4] == {2, 3}


def test_the_result_of_an_operation_is_no_view() -> None:
    assert dependencies([_relu(0, 1), _add(0, 9), _add(1, 8)]) == [set(), {0}, {0}]


def test_lists_of_places_are_read_too() -> None:
    cat = _call(_aten.cat.default, [Slot(1), Slot(2)], 0, outs=(3,))
    assert dependencies([_relu(0, 1), _relu(0, 2), cat])[2] == {0, 1}


# ---------------------------------------------------------------- what makes a task


def _program(model: nn.Module, groups: int, sgd: Sgd | None = None) -> Program:
    arithmetic = Arithmetic(torch.device("cpu"), "fp64")
    recording = capture(arithmetic.place(model), arithmetic, SHAPE)
    return write_program(decompose(recording), [4] * groups, sgd)


@pytest.fixture(scope="module", params=[chain, inception, hourglass])
def program(request: pytest.FixtureRequest) -> Program:
    return _program(request.param(), 3, Sgd(0.9, True, 0.01))


@pytest.mark.parametrize("grain_s", [0.0, 0.5, 3.0, math.inf])
def test_tasks_hold_each_instruction_once_and_can_all_run(program: Program, grain_s: float) -> None:
    costs = [0.1 + number % 7 for number in range(len(program.instructions))]
    tasks = form_tasks(program, costs, grain_s)
    held = sorted(number for task in tasks for number in task.instructions)
    assert held == list(range(len(program.instructions)))
    assert sum(task.cost for task in tasks) == pytest.approx(sum(costs))
    after = reversed_edges([sorted(task.before) for task in tasks])
    assert sorted(runnable_order(after)) == list(range(len(tasks)))
    task_of = {number: n for n, task in enumerate(tasks) for number in task.instructions}
    for number, before in enumerate(dependencies(program.instructions)):
        for other in before:
            same = task_of[other] == task_of[number]
            assert same or task_of[other] in tasks[task_of[number]].before
            assert not same or other < number
    for task in tasks:
        assert task.instructions == sorted(task.instructions)
        assert task.name


def test_a_task_is_cut_off_when_it_costs_enough(program: Program) -> None:
    costs = [1.0] * len(program.instructions)
    counts = [len(form_tasks(program, costs, grain)) for grain in (0.0, 2.0, 5.0, math.inf)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]
    for task in form_tasks(program, costs, 3.0):
        kinds = {program.instructions[number].kind for number in task.instructions}
        assert task.cost <= 3.0 or kinds == {"update"}


def test_tasks_work_on_one_group_each(program: Program) -> None:
    for task in form_tasks(program, [1.0] * len(program.instructions), math.inf):
        assert {program.instructions[number].group for number in task.instructions} == {task.group}


def test_weights_move_after_everyone_has_read_them(program: Program) -> None:
    names = {slot: name for name, slot in program.inputs.items()}
    before = dependencies(program.instructions)
    moves = {
        slot: number
        for number, instruction in enumerate(program.instructions)
        if instruction.op is _aten._fused_sgd_.tensor_lr
        for slot in instruction.writes
        if names.get(slot, "").startswith("p:")
    }
    weights = [slot for slot, name in names.items() if name.startswith("p:")]
    assert set(moves) == set(weights)
    for slot, move in moves.items():
        needed: set[int] = set()
        ahead = [move]
        while ahead:
            for other in before[ahead.pop()] - needed:
                needed.add(other)
                ahead.append(other)
        readers = {n for n, i in enumerate(program.instructions) if slot in i.reads and n != move}
        assert readers
        views = {n for n in readers if _is_view(program.instructions[n])}
        assert readers - views <= needed, names[slot]


def _is_view(instruction: Instruction) -> bool:
    return any(result.alias_info is not None for result in instruction.op._schema.returns)


def test_without_an_update_only_gradients_are_made() -> None:
    program = _program(chain(), 2)
    assert not any(i.op is _aten._fused_sgd_.tensor_lr for i in program.instructions)
    assert "m:0.weight" not in program.inputs
    assert {"g:0.weight", "p:0.weight", "loss"} <= program.inputs.keys()


def test_without_momentum_none_is_asked_for() -> None:
    program = _program(chain(), 2, Sgd(0.0, False, 0.0))
    assert not any(name.startswith("m:") for name in program.inputs)
