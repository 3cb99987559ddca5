"""Both engines run what they are told, free what nobody reads, and survive an error."""

import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from convoy.inner.tasks.engine import NativeEngine, NoEngineError, encode
from convoy.inner.tasks.instructions import Instruction, Program, Slot, slots_in
from convoy.inner.tasks.portable import PortableEngine
from convoy.inner.tasks.step import Engine, Grain
from convoy.inner.tasks.tasks import Task, form_tasks
from tests.inner.tasks.nets import chain, inception, make_batch, make_twins, threads

_aten = torch.ops.aten
Make = Callable[[Program], Engine]


@pytest.fixture(params=[NativeEngine, PortableEngine], ids=["compiled", "portable"])
def make(request: pytest.FixtureRequest) -> Make:
    found: Make = request.param
    return found


def _call(
    op: Any, *args: Any, outs: Sequence[int | None] = (), group: int = 0, **kwargs: Any
) -> Instruction:
    reads = tuple(slots_in((args, tuple(kwargs.values()))))
    changed = [slot for slot in reads if op._schema.is_mutable and slot in slots_in(args[0])]
    writes = (*(out for out in outs if out is not None), *changed)
    return Instruction(
        op, args, kwargs, tuple(outs), 0, group, "forward", "a", reads=reads, writes=writes
    )


def _program(*instructions: Instruction, result: int) -> Program:
    slots = [slot for i in instructions for slot in (*i.reads, *i.writes)]
    return Program((1,), list(instructions), logits=result, num_slots=max(slots) + 1)


def _engine(make: Make, program: Program, grain_s: float = 0.0) -> Engine:
    engine = make(program)
    tasks = form_tasks(program, [1.0] * len(program.instructions), grain_s)
    engine.form(tasks, [0.0] * len(tasks))
    return engine


def _tasks_of(calls: list[Instruction]) -> list[Task]:
    """Return a task for each call."""
    program = _program(*calls, result=calls[-1].writes[0])
    tasks = form_tasks(program, [1.0] * len(calls), 0.0)
    assert len(tasks) == len(calls)
    return tasks


def _run(make: Make, instruction: Instruction, *given: Tensor, result: int = 9) -> Tensor:
    engine = _engine(make, _program(instruction, result=result))
    for slot, tensor in enumerate(given):
        engine.set(slot, tensor)
    engine.run(1)
    return engine.get(result)


# ---------------------------------------------------------------- arguments


X = torch.arange(24.0).view(2, 3, 4)


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "expected"),
    [
        (_aten.mul.Tensor, (Slot(0), 2), {}, X * 2),  # a number where a tensor is asked for
        (_aten.mul.Tensor, (Slot(0), 0.5), {}, X * 0.5),
        (_aten.add.Tensor, (Slot(0), Slot(0)), {"alpha": 3}, X * 4),
        (_aten.sum.dim_IntList, (Slot(0), [0, 2], True), {}, X.sum((0, 2), keepdim=True)),
        (_aten.sum.dim_IntList, (Slot(0), None), {"dtype": torch.float64}, X.double().sum()),
        (_aten.mean.dim, (Slot(0), [1]), {}, X.mean(1)),
        (_aten.clamp.default, (Slot(0), None, 5), {}, X.clamp(None, 5)),
        (_aten.leaky_relu.default, (Slot(0), -1e-3), {}, X * 1),
        (_aten.gelu.default, (Slot(0),), {"approximate": "tanh"}, None),
        (_aten.cat.default, ([Slot(0), Slot(0)], 1), {}, torch.cat([X, X], 1)),
        (_aten.index.Tensor, (Slot(0), [None, Slot(1)]), {}, X[:, [2, 0]]),
        (_aten.index.Tensor, (Slot(0), [None, None, Slot(1)]), {}, X[:, :, [2, 0]]),
        (_aten.full.default, ([2, 3], float("-inf")), {}, torch.full((2, 3), float("-inf"))),
        (_aten.full.default, ([2, 3], True), {"dtype": torch.bool}, torch.ones(2, 3).bool()),
        (
            _aten.zeros.default,
            ([2],),
            {
                "dtype": torch.bfloat16,
                "layout": torch.strided,
                "device": torch.device("cpu"),
                "pin_memory": False,
            },
            torch.zeros(2, dtype=torch.bfloat16),
        ),
        (_aten._to_copy.default, (Slot(1),), {"dtype": torch.float32}, torch.tensor([2.0, 0.0])),
        (_aten.clone.default, (Slot(0),), {"memory_format": torch.contiguous_format}, X),
        (_aten.permute.default, (Slot(0), (2, 0, 1)), {}, X.permute(2, 0, 1)),
        (_aten.constant_pad_nd.default, (Slot(0), [1, 0], 1.5), {}, None),
        (_aten.upsample_nearest1d.vec, (Slot(0), None, [2.0]), {}, None),
    ],
)
def test_every_kind_of_argument_arrives(
    make: Make, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: Tensor | None
) -> None:
    index = torch.tensor([2, 0])
    given = _run(make, _call(op, *args, outs=(9,), **kwargs), X, index)
    if expected is None:
        filled = [X if item == Slot(0) else item for item in args]
        expected = op(*filled, **kwargs)
    assert given.dtype == expected.dtype
    assert torch.equal(given, expected)


def test_arguments_are_written_in_the_order_of_the_schema() -> None:
    assert encode(_call(_aten.add.Tensor, Slot(3), 2.5, outs=(4,))) == "s3 f2.5 i1"
    text = encode(_call(_aten.index.Tensor, Slot(0), [None, Slot(7)], outs=(9,)))
    assert text == "s0 S2 -1 7"
    assert encode(_call(_aten.sum.dim_IntList, Slot(0), [1], outs=(9,))) == "s0 I1 1 b0 n"
    flags = [True, False, True]
    args = (Slot(0), Slot(1), Slot(2), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, flags)
    assert encode(_call(_aten.convolution_backward.default, *args)).endswith("B3 1 0 1")


@pytest.mark.parametrize("value", [torch.sparse_coo, torch.float8_e4m3fn, object()])
def test_an_argument_that_cannot_be_handed_over_is_named(value: object) -> None:
    with pytest.raises(NoEngineError, match="cannot be handed over"):
        encode(_call(_aten.zeros.default, [2], dtype=value, outs=(1,)))


def test_several_results_and_results_that_nobody_wants(make: Make) -> None:
    x = torch.tensor([[3.0, 1.0, 2.0]])
    split = _call(_aten.sort.default, Slot(0), outs=(None, 9))
    assert torch.equal(_run(make, split, x), torch.tensor([[1, 2, 0]]))
    both = _call(_aten.sort.default, Slot(0), outs=(9, 8))
    assert torch.equal(_run(make, both, x), torch.tensor([[1.0, 2.0, 3.0]]))


# ---------------------------------------------------------------- order, time, memory


def _ladder(rungs: int) -> Program:
    """Two groups that meet at the end; every rung doubles."""
    calls = [
        _call(_aten.add.Tensor, Slot(s), Slot(s), outs=(s + 2,), group=s % 2)
        for s in range(2 * rungs)
    ]
    last = 2 * rungs
    calls.append(_call(_aten.add.Tensor, Slot(last), Slot(last + 1), outs=(last + 2,), group=-1))
    return _program(*calls, result=last + 2)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_tasks_run_when_what_they_need_is_there(make: Make, num_threads: int) -> None:
    program = _ladder(20)
    engine = _engine(make, program)
    for value in (1.0, 3.0):
        engine.set(0, torch.full((4,), value))
        engine.set(1, torch.full((4,), 1.0))
        with threads(num_threads):
            engine.run(num_threads)
        assert torch.equal(engine.get(program.logits), torch.full((4,), (value + 1) * 2**20))
    tasks = form_tasks(program, [1.0] * len(program.instructions), 0.0)
    times = engine.times()
    assert len(times) == len(tasks)
    for task, (thread, ready, start, end, _) in zip(tasks, times, strict=True):
        assert 0 <= thread < num_threads
        assert 0 <= ready <= start <= end
        assert all(times[other][3] <= ready for other in task.before)


def test_costs_are_seconds_of_each_instruction(make: Make) -> None:
    small, large = torch.ones(2, 2), torch.ones(700, 700)
    program = _program(
        _call(_aten.mm.default, Slot(0), Slot(0), outs=(2,)),
        _call(_aten.mm.default, Slot(1), Slot(1), outs=(3,)),
        result=3,
    )
    engine = _engine(make, program)
    engine.set(0, small)
    engine.set(1, large)
    engine.costs()  # the first product of each size prepares itself, which takes longer than it
    first, second = engine.costs()
    assert 0 < first < second < 5


def test_memory_is_given_back_as_soon_as_nobody_reads_it(make: Make) -> None:
    rungs, size = 40, 1 << 21  # 16 MiB each, 640 MiB if all were kept
    program = _program(
        *(_call(_aten.add.Tensor, Slot(s), Slot(s), outs=(s + 1,)) for s in range(rungs)),
        result=rungs,
    )
    engine = _engine(make, program, 1e9)
    engine.set(0, torch.ones(size, dtype=torch.float64))
    engine.run(1)
    before = psutil.Process().memory_info().rss
    for _ in range(3):
        engine.run(1)
    grown = psutil.Process().memory_info().rss - before
    assert grown < 200 << 20
    assert float(engine.get(rungs)[0]) == 2.0**rungs


def test_many_steps_do_not_grow() -> None:
    twins = make_twins(inception(), Grain(3, 2), precision="fp32")
    batch = make_batch(0, 12, dtype=torch.float32)
    for _ in range(20):
        twins.tasks.step(batch, 12, 0.01)
    before = psutil.Process().memory_info().rss
    for _ in range(150):
        twins.tasks.step(batch, 12, 0.01)
    assert psutil.Process().memory_info().rss - before < 30 << 20


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_an_error_in_an_operation_reaches_the_caller(make: Make, num_threads: int) -> None:
    calls = [_call(_aten.relu.default, Slot(0), outs=(n,), group=n) for n in range(2, 8)]
    calls.append(_call(_aten.mm.default, Slot(2), Slot(1), outs=(8,), group=1))
    calls.append(_call(_aten.relu.default, Slot(8), outs=(9,), group=1))
    engine = _engine(make, _program(*calls, result=9))
    good, bad = torch.ones(3, 3), torch.ones(5, 5)
    engine.set(0, good)
    with threads(num_threads):
        for _ in range(3):
            engine.set(1, bad)
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                engine.run(num_threads)
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                engine.costs()
            engine.set(1, good)
            engine.run(num_threads)
            assert torch.equal(engine.get(9), torch.full((3, 3), 3.0))


def test_a_section_waits_for_nothing_that_was_not_done(make: Make) -> None:
    calls = [
        _call(_aten.mm.default, Slot(0), Slot(1), outs=(2,)),
        _call(_aten.relu.default, Slot(2), outs=(3,), group=1),
    ]
    engine = make(_program(*calls, result=3))
    first, second = (replace(task, section=n) for n, task in enumerate(_tasks_of(calls)))
    engine.form([first, second], [0.0, 0.0])
    engine.set(0, torch.ones(2, 2))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="comes before was not done"):
            engine.run(1, 1)
        engine.set(1, torch.ones(3, 3))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            engine.run(1, 0)
        with pytest.raises(RuntimeError, match="comes before was not done"):
            engine.run(1, 1)
        engine.set(1, torch.ones(2, 2))
        engine.run(1, 0)
        engine.run(1, 1)
        assert torch.equal(engine.get(3), torch.full((2, 2), 2.0))


def test_times_of_sections_are_those_of_one_step(make: Make) -> None:
    calls = [
        _call(_aten.relu.default, Slot(0), outs=(1,)),
        _call(_aten.relu.default, Slot(1), outs=(2,), group=1),
    ]
    engine = make(_program(*calls, result=2))
    engine.form([replace(task, section=n) for n, task in enumerate(_tasks_of(calls))], [0.0, 0.0])
    engine.set(0, torch.ones(2, 2))
    engine.run(1, 0)
    time.sleep(0.01)
    engine.run(1, 1)
    first, second = engine.times()
    for _, ready, start, end, waited in (first, second):
        assert 0 <= ready <= start <= end
        assert waited == 0
    assert second[1] >= first[3] + 0.01


def test_an_unknown_operation_is_named() -> None:
    class Nothing:
        _name = "aten::no_such_operation"
        _schema = _aten.relu.default._schema

    call = Instruction(Nothing, (Slot(0),), {}, (1,), 0, 0, "forward", "a", reads=(0,), writes=(1,))
    with pytest.raises(RuntimeError, match="no_such_operation"):
        NativeEngine(_program(call, result=1))


@torch.library.custom_op("convoy_tests::tripled", mutates_args=())
def _tripled(x: Tensor) -> Tensor:
    return x * 3


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_operations_written_in_python_do_not_wait_for_each_other(
    make: Make, num_threads: int
) -> None:
    op = torch.ops.convoy_tests.tripled.default
    calls = [_call(op, Slot(0), outs=(n,), group=n) for n in range(1, 7)]
    calls.append(_call(_aten.cat.default, [Slot(n) for n in range(1, 7)], outs=(9,), group=-1))
    engine = _engine(make, _program(*calls, result=9))
    engine.set(0, torch.ones(2))
    with threads(num_threads):
        for _ in range(20):
            engine.run(num_threads)
    assert torch.equal(engine.get(9), torch.full((12,), 3.0))


# ---------------------------------------------------------------- processes of their own

_SCRIPT = """
import sys
import torch
from tests.inner.tasks.nets import chain, make_batch, make_twins
from convoy.inner.tasks.step import Grain

pool, asked = int(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(pool)
twins = make_twins(chain(), Grain(6, asked), precision="fp32")
batch = make_batch(0, 24, dtype=torch.float32)
for _ in range(3):
    twins.plain.step(batch, 24, 0.01)
    twins.tasks.step(batch, 24, 0.01)
assert twins.told == [], twins.told
assert torch.get_num_threads() == pool
print("done")
"""


@pytest.mark.parametrize(("pool", "asked"), [(5, 5), (2, 6), (1, 4), (5, 1)])
def test_a_fresh_process_with_many_threads_finishes(pool: int, asked: int) -> None:
    """Torch once reset a thread's number of helpers in mid-step, and oneDNN waited for them."""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_SCRIPT), str(pool), str(asked)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr


def test_threads_are_as_many_as_before() -> None:
    twins = make_twins(chain(), Grain(3, 1))
    with threads(3):
        twins.tasks.step(make_batch(0), 10, 0.1)
        assert torch.get_num_threads() == 3
