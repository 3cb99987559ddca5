"""What does a pipeline of single-core stages give? Ours beside one core, PyTorch's and the limit.

A whole training step at batch 128 in fp32, each process with one thread on a core of its own, and
with the same malloc setting. One core trains plainly, in the better memory layout, and by
torch.compile where that is faster. PyTorch's GPipe and 1F1B get the better layout, the cut that
balances measured times or one beside it, the best of 2, 4, 8 and 16 micro-batches, found by short
trials, and compiled stages where these are faster. Ours is a whole run through `convoy train`'s
door, which finds its cut by itself. In each round everybody gets the same cores; where there are
more than are needed, those that are fastest just then. The limit is a process for each core, all
independent. In four stages, where nothing is asked for beside PyTorch, a recipe of ours that holds
more batches takes its place. All these compute by PyTorch's kernels. Where the executor `tasks` has
convolutions of its own, ours is measured once more with it, and so is one core: what stages gain is
one thing, what faster kernels gain another.

Stages of unequal speeds are held to them by the lab; there PyTorch's better schedule is told the
speeds, and ours is not.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from convoy.bench.cores import Pins, choose_cores, held_to
from convoy.bench.only import pick
from convoy.bench.ours import busy_between, record_pipeline, record_run, speed_between
from convoy.bench.peers import Task, measure_crew
from convoy.bench.peers.pipelining import PipelineTask, cut_for
from convoy.bench.report import Bar, Contenders, Report, Row, interleave, median_ratio
from convoy.errors import EnvironmentProblem
from convoy.inner.arithmetic import prepare_device
from convoy.inner.way import has_own_convolutions
from convoy.launch.lab import Lab
from convoy.machine import usable_cores
from convoy.pipeline.runner import settling_batches

ONE, OURS, LIMIT = "one core", "convoy", "limit"
ONE_TASKS, OURS_TASKS = f"{ONE}, tasks", f"{OURS}, tasks"
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B"}
SPEEDS = (1.0, 0.5)
_LAYOUTS = ("channels_last", "contiguous")
_ALONE = "alone"  # the system that is one core by itself
_SHAPE, _CLASSES, _BATCH = (3, 32, 32), 10, 128
_FILLED = 3  # steps of ours after its trials: the stages are full again

_ROOMY = "convoy:order=stale"  # holds twice as many batches: stages wait less for each other

Values = Mapping[str, Sequence[float]]
_T = TypeVar("_T", bound=Task)


@dataclass(frozen=True, slots=True)
class Setup:
    """A network in so many stages.

    Attributes:
        over_one: how much faster than one core ours is to be.
        over_torch: the same beside PyTorch's better schedule; None: PyTorch is not measured.
        unequal: measure it in stages of unequal speeds too.
        also: a recipe that is measured beside the default one.
    """

    model: str
    stages: int
    over_one: float
    over_torch: float | None = None
    unequal: bool = False
    also: str | None = None

    @property
    def label(self) -> str:
        """Return what the report calls it."""
        return f"{self.model}, {self.stages} stages, batch {_BATCH}"


@dataclass(frozen=True, slots=True)
class Plan:
    """How thoroughly to measure.

    Attributes:
        setups: what is measured, as far as there are cores.
        repeats: rounds in which everybody takes a turn.
        seconds: of a measurement.
        micros: the numbers of micro-batches that are tried.
        tries: how often each is tried; the best counts, for others use the machine too.
        trial_s: of a trial.
        compiled: let peers try torch.compile, and ours the executor `tasks`: both take long.
    """

    setups: tuple[Setup, ...]
    repeats: int
    seconds: float
    micros: tuple[int, ...]
    tries: int
    trial_s: float
    compiled: bool


FULL = Plan(
    setups=(
        Setup("resnet56", 2, over_one=1.85, over_torch=1.15, unequal=True),
        Setup("resnet110", 2, over_one=1.85, over_torch=1.15),
        Setup("resnet56", 4, over_one=3.4, also=_ROOMY),
        Setup("resnet110", 4, over_one=3.4, also=_ROOMY),
    ),
    repeats=5,
    seconds=8.0,
    micros=(2, 4, 8, 16),
    tries=2,
    trial_s=2.0,
    compiled=True,
)
QUICK = Plan(
    setups=(Setup("resnet20", 2, over_one=1.85, over_torch=1.15),),
    repeats=1,
    seconds=2.0,
    micros=(4, 8),
    tries=1,
    trial_s=0.5,
    compiled=False,
)


def bench_pipeline(*, quick: bool, tell: Callable[[str], None], only: Sequence[str] = ()) -> Report:
    """Measure each network in stages, all systems in turn."""
    prepare_device(torch.device("cpu"), threads=1, deterministic=False)
    plan = QUICK if quick else FULL
    asked = pick(plan.setups, only, lambda setup: setup.label)
    setups = [setup for setup in asked if setup.stages <= usable_cores()]
    if not setups:
        least = min(setup.stages for setup in asked)
        raise EnvironmentProblem(
            "stages need cores of their own", got=usable_cores(), allowed=f"at least {least}"
        )
    rows: list[Row] = []
    bars: list[Bar] = []
    for setup in setups:
        bench = _Bench(setup, plan, tell)
        found = [bench.equal(), *([bench.unequal()] if setup.unequal else [])]
        for more_rows, more_bars in found:
            rows += more_rows
            bars += more_bars
    return Report("pipeline", plan.repeats, tuple(rows), tuple(bars))


class _Bench:
    """Finds what each peer is fastest with on some cores, and measures it beside ours."""

    def __init__(self, setup: Setup, plan: Plan, tell: Callable[[str], None]) -> None:
        self._setup, self._plan, self._tell = setup, plan, tell
        tell(f"{setup.label}, samples per second:")
        self._pins = Pins(choose_cores(setup.stages))
        self._one, self._one_per_s, self._eager = self._best_alone()
        self._pipelines = {} if setup.over_torch is None else self._best_pipelines()

    def equal(self) -> tuple[list[Row], list[Bar]]:
        """Measure stages that have a whole core each."""
        setup = self._setup
        contenders: Contenders = {
            **{name: self._contender(name, task) for name, task in self._pipelines.items()},
            ONE: self._contender(_ALONE, self._one),
            OURS: lambda: self._ours(),
            LIMIT: self._contender(_ALONE, _in_parts(self._one, setup.stages)),
        }
        names = {
            **{name: _describe(name, task) for name, task in self._pipelines.items()},
            ONE: _describe(_ALONE, self._one),
            OURS: "convoy, pipeline",
            LIMIT: "one process for each core, summed: the limit",
        }
        if setup.also is not None:
            recipe = setup.also
            contenders[recipe] = lambda: self._ours(recipe=recipe)
            names[recipe] = f"convoy, pipeline, {recipe}"
        if self._plan.compiled and has_own_convolutions():
            contenders[ONE_TASKS] = lambda: _one_as_tasks(setup.model, self._steps(1.0))
            names[ONE_TASKS] = "convoy, plain training on one core, tasks"
            contenders[OURS_TASKS] = lambda: self._ours(executor="tasks")
            names[OURS_TASKS] = "convoy, pipeline, tasks"
        values = self._interleave(contenders)
        return _rows(setup.label, names, values), equal_bars(setup, values)

    def unequal(self) -> tuple[list[Row], list[Bar]]:
        """Measure stages that are held to parts of a core."""
        setup = self._setup
        best = next(iter(self._pipelines))
        alone = _in_parts(self._one, len(SPEEDS))
        equal = self._pipelines[best]
        told = cut_for(_in_parts(self._eager, 2), equal.micro, SPEEDS, budget_s=1.0)
        told = replace(told, compiled=equal.compiled)
        contenders: Contenders = {
            best: self._contender(best, told, SPEEDS),
            OURS: lambda: self._ours(SPEEDS),
            LIMIT: self._contender(_ALONE, alone, SPEEDS),
        }
        names = {
            best: f"{_describe(best, told)}, told the speeds",
            OURS: "convoy, pipeline",
            LIMIT: "nodes alone, summed",
        }
        label = f"{setup.model}, stages of {' and '.join(f'{s:g}' for s in SPEEDS)}"
        values = self._interleave(contenders)
        return _rows(label, names, values), [unequal_bar(label, values)]

    def _interleave(self, contenders: Contenders) -> dict[str, tuple[float, ...]]:
        def begin_round(stack: ExitStack) -> Contenders:
            """Have everybody measured on the same cores: those that are quiet now."""
            cores = choose_cores(self._setup.stages)
            self._pins = Pins(cores)
            stack.enter_context(held_to(cores))
            return contenders

        return interleave(
            begin_round,
            repeats=self._plan.repeats,
            slices=1,
            tell=self._tell,
            warm_up=False,  # a crew, and a run, is new each time and warms up by itself
        )

    def _contender(
        self, system: str, task: Task, speeds: Sequence[float] | None = None
    ) -> Callable[[], float]:
        seconds = self._plan.seconds

        def measure() -> float:
            with nullcontext(self._pins) if speeds is None else Lab(speeds) as slots:
                return measure_crew(system, task, slots, warm_s=seconds / 4, seconds=seconds)

        return measure

    def _ours(self, speeds: tuple[float, ...] = (), **options: object) -> float:
        held = speeds or (1.0,) * self._setup.stages  # the lab pins each to a core of its own
        return _ours(self._setup.model, held, self._steps(sum(held)), self._tell, **options)

    def _steps(self, cores: float) -> int:
        """Return about how many steps some cores do in the time of a measurement."""
        return math.ceil(self._plan.seconds * cores * self._one_per_s / _BATCH)

    # ---------------------------------------------------------------- the peers' best settings

    def _best_alone(self) -> tuple[Task, float, Task]:
        """Return what plain training on one core is fastest with, and its samples/s.

        The last is what it is fastest with by eager PyTorch, which stages begin with.
        """
        task = Task(self._setup.model, _SHAPE, _CLASSES, _BATCH, shares=(_BATCH,))
        ways = [replace(task, memory_format=layout) for layout in _LAYOUTS]
        eager = self._try((_ALONE, way) for way in ways)
        tried = dict(eager)
        if self._plan.compiled:
            tried |= self._try((_ALONE, replace(way, compiled=True)) for way in ways)
        best = max(tried, key=lambda pair: tried[pair])
        return best[1], tried[best], max(eager, key=lambda pair: eager[pair])[1]

    def _best_pipelines(self) -> dict[str, PipelineTask]:
        """Return PyTorch's schedules, the faster first, each with its best micro-batches."""
        stages = self._setup.stages
        alone = _in_parts(self._eager, stages)
        micros = [micro for micro in self._plan.micros if micro >= stages]  # 1F1B's condition
        tasks = [cut_for(alone, micro, (1.0,) * stages, budget_s=0.5) for micro in micros]
        tried = self._try((name, task) for name in SCHEDULES for task in tasks)
        # Cuts go by the times of blocks alone; what is next to them may suit whole stages better.
        tried |= self._try(_beside(best_of_each(tried).items()))
        if self._plan.compiled:  # which takes long, so only what is best without it is tried
            best = best_of_each(tried).items()
            found = self._try((name, replace(task, compiled=True)) for name, task in best)
            tried |= found | self._try(_beside([max(found, key=lambda pair: found[pair])]))
        return best_of_each(tried)

    def _try(self, candidates: Iterable[tuple[str, _T]]) -> dict[tuple[str, _T], float]:
        """Return the best speed of each (system, task) in a few short trials, in turn."""
        plan = self._plan
        best = dict.fromkeys(candidates, 0.0)
        for _ in range(plan.tries):
            for system, task in best:
                speed = measure_crew(system, task, self._pins, warm_s=0.0, seconds=plan.trial_s)
                best[system, task] = max(best[system, task], speed)
        for pair, speed in best.items():
            self._tell(f"  trial: {_describe(*pair)} {speed:,.0f}")
        return best


def best_of_each(tried: Mapping[tuple[str, PipelineTask], float]) -> dict[str, PipelineTask]:
    """Return what each schedule was fastest with, the faster schedule first."""
    best: dict[str, PipelineTask] = {}
    for name, task in sorted(tried, key=lambda pair: -tried[pair]):
        best.setdefault(name, task)
    return best


def _beside(
    tasks: Iterable[tuple[str, PipelineTask]],
) -> Iterator[tuple[str, PipelineTask]]:
    """Yield the same in two stages that are cut a block earlier, and a block later."""
    for name, task in tasks:
        for moved in (-1, 1) if task.num_nodes == 2 else ():
            first, cut, last = task.bounds
            if first < cut + moved < last:
                yield name, replace(task, bounds=(first, cut + moved, last))


def _in_parts(task: Task, count: int) -> Task:
    """Return the same for so many nodes."""
    return replace(task, shares=tuple(task.batch // count for _ in range(count)))


def _describe(system: str, task: Task) -> str:
    how = "torch.compile" if task.compiled else "eager"
    if isinstance(task, PipelineTask):
        return f"torch {SCHEDULES[system]}, {task.micro} micro-batches, {how}"
    return f"plain training on one core, {task.memory_format}, {how}"


def _rows(label: str, names: Mapping[str, str], values: Values) -> list[Row]:
    return [Row(label, names[key], "samples/s", tuple(found)) for key, found in values.items()]


def equal_bars(setup: Setup, values: Values) -> list[Bar]:
    """Return what ours is worth beside one core, and beside whichever of PyTorch's is faster."""
    bars = []
    for ours in (name for name in (OURS, OURS_TASKS) if name in values):
        for one in (name for name in (ONE, ONE_TASKS) if name in values):
            if one == ONE_TASKS and ours == OURS:
                continue  # their kernels differ
            ratio = median_ratio(values[ours], values[one])
            bars.append(Bar(f"{setup.label}: {ours} / {one}", ratio, at_least=setup.over_one))
        if setup.over_torch is not None:
            theirs = zip(*(values[name] for name in SCHEDULES), strict=True)
            ratio = median_ratio(values[ours], [max(speeds) for speeds in theirs])
            name = f"{setup.label}: {ours} / torch's better schedule"
            bars.append(Bar(name, ratio, at_least=setup.over_torch))
    return bars


def unequal_bar(label: str, values: Values) -> Bar:
    """Return what part of the nodes' sum ours reaches."""
    ratio = median_ratio(values[OURS], values[LIMIT])
    return Bar(f"{label}: convoy / the sum of the nodes", ratio, at_least=0.9)


# ---------------------------------------------------------------- ours


def _ours(
    model: str,
    held: tuple[float, ...],
    steps: int,
    tell: Callable[[str], None],
    **options: object,
) -> float:
    """Return the samples per second of a run of ours, once the stages are full.

    Args:
        model: a network by name.
        held: the cores of each stage.
        steps: that are counted.
        tell: is told where the time went: a stage may be slow, or wait for the others.
        options: of the run.
    """
    task = Task(model, _SHAPE, _CLASSES, _BATCH, shares=(_BATCH,))
    stages = len(held)
    first = settling_batches(stages) + _FILLED
    last = first + steps
    asked = {"executor": "eager", **options}
    recording = record_pipeline(task, stages, held, last + _drain(stages), **asked)
    how = ", ".join(f"{name} {value}" for name, value in asked.items())
    times = ", ".join(
        f"{busy:.3f} + {waiting:.3f}" for busy, waiting in busy_between(recording, first, last)
    )
    tell(f"  convoy, {how}: stages worked and waited, seconds a batch: {times}")
    return speed_between(recording, first, last)


def _one_as_tasks(model: str, steps: int) -> float:
    """Return the samples per second of plain training of ours, one thread that computes tasks."""
    task = Task(model, _SHAPE, _CLASSES, _BATCH, shares=(_BATCH,))
    more = {"strategy": "single", "executor": "tasks", "log_interval_s": 0.1}
    recording = record_run(task, _FILLED + steps, **more)
    return speed_between(recording, _FILLED, _FILLED + steps)


def _drain(stages: int) -> int:
    """Return the steps at a run's end that are not counted: nothing new comes after them."""
    return 2 * stages
