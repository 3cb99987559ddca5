"""What is a GPU's step worth as one launch? `graph` and `fused` against eager and torch.compile.

A whole training step (forward, loss, backward, SGD with momentum, a rate that changes) on random
images that lie on the GPU already. Every contender has cuDNN choose its algorithms and is given
the precision and layout that a short trial found best for it.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from convoy.bench.compiled import UPDATES, compiled_step
from convoy.bench.only import pick
from convoy.bench.report import Bar, Contenders, Report, Row, interleave, median_ratio
from convoy.config import Config
from convoy.data.batches import Batch
from convoy.errors import ConfigError
from convoy.inner.arithmetic import Arithmetic, prepare_device
from convoy.inner.executor import EXECUTORS
from convoy.inner.optimizer import make_optimizer
from convoy.models.zoo import build_model
from convoy.randomness import sample_keys

Step = Callable[[Batch, float], object]


class Run(Protocol):
    """Does so many steps, or a slice of them, and returns its samples per second."""

    def __call__(self, steps: int = ...) -> float:
        """Run."""
        ...


EAGER, COMPILED, OURS = "PyTorch, eager", "torch.compile, reduce-overhead", "convoy"
_CLASSES = 10
_POOL = 8  # batches that are trained on in turn
_WARM_UP = 6  # steps: torch.compile captures at the third
_COMPILE_S = 60.0  # after so long no further variant of torch.compile is tried


@dataclass(frozen=True, slots=True)
class Task:
    """A network with images of its size.

    Attributes:
        steps: of a slice of work.
        over_eager: so much faster than eager we are to be.
    """

    model: str
    shape: tuple[int, int, int]
    batch: int
    steps: int
    over_eager: float

    @property
    def label(self) -> str:
        """Return what the report calls it."""
        return f"{self.model}, batch {self.batch}"


TASKS = (
    Task("lenet5", (1, 28, 28), batch=128, steps=200, over_eager=7.0),
    Task("resnet20", (3, 32, 32), batch=128, steps=60, over_eager=3.5),
    Task("resnet56", (3, 32, 32), batch=1024, steps=15, over_eager=1.2),
)


def bench_gpu(*, quick: bool, tell: Callable[[str], None], only: Sequence[str] = ()) -> Report:
    """Measure a step of each, interleaved."""
    if not torch.cuda.is_available():
        raise ConfigError("this needs a GPU", hint="There is no quick answer without one, either.")
    device = torch.device("cuda", torch.cuda.current_device())
    prepare_device(device, threads=0, deterministic=False)
    tasks: tuple[Task, ...] = TASKS
    if quick:  # compiling alone takes longer than there is time for, for all three
        tasks = tuple(replace(task, steps=task.steps // 2) for task in TASKS[:2])
    tasks = pick(tasks, only, lambda task: task.label)
    return measure_all(tasks, device, repeats=3, slices=1 if quick else 2, quick=quick, tell=tell)


def measure_all(
    tasks: tuple[Task, ...],
    device: torch.device,
    *,
    repeats: int,
    slices: int,
    quick: bool,
    tell: Callable[[str], None],
) -> Report:
    """Measure some tasks; return every speed, and the ratios that count."""
    rows: list[Row] = []
    bars: list[Bar] = []
    for task in tasks:
        tell(f"{task.label}, samples per second:")
        contenders, failure = _Trials(task, device, quick=quick, tell=tell).choose()
        values = interleave(lambda _, c=contenders: c, repeats=repeats, slices=slices, tell=tell)  # type: ignore[misc]
        names = {name.partition(":")[0]: name for name in values}
        rows += [Row(task.label, name, "samples/s", found) for name, found in values.items()]
        if failure is not None:
            rows.append(Row(task.label, f"{COMPILED}: {failure}", "samples/s", (0.0,) * repeats))
        for name, bound in ((EAGER, task.over_eager), (COMPILED, 1.0)):
            if name in names:
                ratio = median_ratio(values[names[OURS]], values[names[name]])
                bars.append(Bar(f"{task.label}: {OURS} / {name}", ratio, at_least=bound))
    return Report("gpu", repeats, tuple(rows), tuple(bars))


@dataclass(frozen=True, slots=True)
class _Found:
    """A contender with the speed of a short trial."""

    name: str
    speed: float
    run: Run


class _Trials:
    """Finds out for each contender what it is fastest with, and gives the contenders back."""

    def __init__(
        self, task: Task, device: torch.device, *, quick: bool, tell: Callable[[str], None]
    ) -> None:
        self._task, self._device, self._quick, self._tell = task, device, quick, tell
        self._pools: dict[Arithmetic, list[Batch]] = {}

    def choose(self) -> tuple[Contenders, str | None]:
        """Return the contenders, and why torch.compile is not among them if it is not."""
        ways = [
            Arithmetic(self._device, precision, layout)
            for precision, layout in itertools.product(
                ("fp32", "bf16"), ("contiguous", "channels_last")
            )
        ]
        graph, speeds = self._best(OURS, "graph", ways)
        eager, _ = self._best(EAGER, "eager", ways)
        fast = sorted(ways, key=lambda way: -speeds[way])
        fused, _ = self._best(OURS, "fused", fast[:1])  # as `auto` does for a long run
        compiled, failure = self._compiled(fast)
        ours = max(graph, fused, key=lambda found: found.speed)
        return {eager.name: eager.run, **compiled, ours.name: ours.run}, failure

    def _compiled(self, ways: list[Arithmetic]) -> tuple[Contenders, str | None]:
        """Return torch.compile at its best of what there is time to compile, or why it fails."""
        first = ways[0]
        other = next(way for way in ways if way.precision != first.precision)
        # One layout for each: the compiler lays images out anew where that is faster.
        wanted = [(first, UPDATES[0]), (other, UPDATES[0]), (first, UPDATES[1])]
        found: list[tuple[float, str, Run]] = []
        started, failure = time.perf_counter(), None
        for way, update in wanted[:1] if self._quick else wanted:
            if found and time.perf_counter() - started > _COMPILE_S:
                break
            try:
                step = compiled_step(self._model(way), way, Config(), update)
                run = self._runner(step, way)
                found.append((self._try(run), f"{COMPILED}: {_words_for(way)}, {update}", run))
            except Exception as error:  # a compiler may fail in any way
                first_line = next(iter(str(error).splitlines()), "")
                failure = f"failed: {type(error).__name__}: {first_line[:120]}"
                self._tell(f"  {COMPILED}: {_words_for(way)}, {update} {failure}")
        for speed, name, _ in found:
            self._tell(f"  trial: {name} {speed:,.0f}")
        if not found:
            return {}, failure
        _, name, run = max(found, key=lambda item: item[0])
        return {name: run}, None

    def _best(
        self, system: str, executor: str, ways: list[Arithmetic]
    ) -> tuple["_Found", dict[Arithmetic, float]]:
        """Return the fastest of some ways to compute with an executor, and the speed of each."""
        found: dict[Arithmetic, _Found] = {}
        for way in ways:
            run = self._runner(self._executor(executor, way), way)
            name = f"{system}: {executor}, {_words_for(way)}"
            found[way] = _Found(name, self._try(run), run)
        shown = ", ".join(f"{_words_for(way)} {one.speed:,.0f}" for way, one in found.items())
        self._tell(f"  trial: {system}, {executor}: {shown}")
        best = max(found.values(), key=lambda one: one.speed)
        return best, {way: one.speed for way, one in found.items()}

    def _executor(self, name: str, way: Arithmetic) -> Step:
        model = self._model(way)
        make = EXECUTORS.get(name)
        optimizer = make_optimizer(model, Config())
        executor = make(model, optimizer, way, label_smoothing=0.0, tell=self._tell)
        return lambda batch, rate: executor.step(batch, len(batch), rate)

    def _model(self, way: Arithmetic) -> nn.Module:
        return way.place(build_model(self._task.model, self._task.shape, _CLASSES, seed=0))

    def _try(self, run: Run) -> float:
        """Return a speed, roughly; what is compiled or recorded at first is no part of it."""
        run(_WARM_UP)
        return run(max(1, self._task.steps // 3))

    def _runner(self, step: Step, way: Arithmetic) -> Run:
        """Return a function that does a slice of steps and gives its samples per second."""
        task = self._task
        if way not in self._pools:
            self._pools[way] = list(_random_batches(task, way))
        pool = self._pools[way]

        def run(steps: int = task.steps) -> float:
            _wait_for(way.device)
            started = time.perf_counter()
            for number in range(steps):
                step(pool[number % len(pool)], 0.01 / (number + 1))
            _wait_for(way.device)
            return steps * task.batch / (time.perf_counter() - started)

        return run


def _random_batches(task: Task, way: Arithmetic) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    for number in range(_POOL):
        images: Tensor = torch.randn(task.batch, *task.shape, generator=generator)
        labels = torch.randint(0, _CLASSES, (task.batch,), generator=generator)
        keys = sample_keys(0, number, torch.arange(task.batch))
        images = images.to(way.device, way.dtype).contiguous(memory_format=way.memory_format)
        yield Batch(images, labels.to(way.device), keys.to(way.device))


def _words_for(way: Arithmetic) -> str:
    return f"{way.precision} {way.layout}"


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
