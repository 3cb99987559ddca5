"""What are a node's cores worth as tasks? Our step against PyTorch's own threads.

A whole training step (forward, loss, backward, SGD) at batch 128 on the same cores. PyTorch gets
the best of {eager, torch.compile} x {contiguous, channels_last} x {1, 2, 4, 8, 16 threads}, found
by short trials; we take what `--executor auto` takes. Compiling is no part of any time, but takes
long: no further variant is compiled after a minute, and what was tried is told. Beside them stands
what PyTorch's kernels could give at most: a process for each core, all independent.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

import torch
from torch import nn

from convoy.bench.compiled import UPDATES, compiled_step
from convoy.bench.only import pick
from convoy.bench.peers import Task as Alone
from convoy.bench.peers import measure_crew
from convoy.bench.report import Bar, Contenders, Report, Row, interleave, median_ratio
from convoy.config import Config
from convoy.data.batches import Batch
from convoy.inner.arithmetic import Arithmetic, prepare_device
from convoy.inner.executor import make_executor
from convoy.inner.way import Way, choose_way
from convoy.machine import usable_cores
from convoy.models.dropout import torch_dropout
from convoy.models.zoo import build_model
from convoy.randomness import sample_keys

EAGER, COMPILED, OURS = "PyTorch, eager", "torch.compile", "convoy"
ALONE = "PyTorch alone on each core, summed"
_BATCH = 128
_TRIAL_S, _SLICE_S, _ALONE_S = 0.4, 0.6, 2.0
_COMPILE_S = 60.0  # after so long no further variant is compiled
_NOT_SLOWER = 0.97  # two runs of one program differ by so much
_HOPELESS = 0.6  # of eager's speed: more threads than all or half will not help compiled code
_LONG = 10**12  # samples of a run for which any probe pays
_CPU = torch.device("cpu")
# Of a max-pool the way back is a scatter, which the compiler leaves to a routine of PyTorch's.
_COMPILED_HOW = {"": None, "own scatter": {"cpp.fallback_scatter_reduce_sum": False}}

Step = Callable[[Batch, float], object]


@dataclass(frozen=True, slots=True)
class Task:
    """A network in a precision; on sixteen cores we are to be so much faster than PyTorch."""

    model: str
    precision: str
    shape: tuple[int, int, int]
    over: float

    @property
    def label(self) -> str:
        """Return what the report calls it."""
        return f"{self.model}, {self.precision}, batch {_BATCH}"


TASKS = (
    Task("resnet20", "fp32", (3, 32, 32), over=2.2),
    Task("resnet20", "bf16", (3, 32, 32), over=1.6),
    Task("lenet5", "fp32", (1, 28, 28), over=1.5),
    Task("vgg16", "fp32", (3, 32, 32), over=_NOT_SLOWER),
    Task("alexnet", "fp32", (3, 32, 32), over=_NOT_SLOWER),
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to compute, ready to be timed."""

    name: str
    threads: int
    step: Step
    batch: Batch

    def run(self, seconds: float = _SLICE_S) -> float:
        """Do steps for some time; return the samples per second."""
        torch.set_num_threads(self.threads)
        steps, started = 0, time.perf_counter()
        while steps < 2 or time.perf_counter() - started < seconds:
            self.step(self.batch, 0.001)
            steps += 1
        return steps * _BATCH / (time.perf_counter() - started)


def bench_inner(*, quick: bool, tell: Callable[[str], None], only: Sequence[str] = ()) -> Report:
    """Measure a step of each network, interleaved."""
    prepare_device(_CPU, threads=0, deterministic=False)
    tasks = pick(TASKS[:1] + TASKS[2:3] if quick else TASKS, only, lambda task: task.label)
    repeats = 3 if quick else 5
    rows: list[Row] = []
    bars: list[Bar] = []
    for task in tasks:
        tell(f"{task.label}, samples per second:")
        bench = _Bench(task, quick=quick, tell=tell)
        contenders = bench.contenders()
        values = interleave(
            lambda _, c=contenders: c,  # type: ignore[misc]
            repeats=repeats,
            slices=1,
            tell=tell,
        )
        rows += [Row(task.label, name, "samples/s", found) for name, found in values.items()]
        bars.append(_bar(task, values))
        if not quick:
            rows.append(Row(task.label, ALONE, "samples/s", (_alone(task),)))
        if task is TASKS[0] and not quick:
            rows += bench.curve(3)
    return Report("inner", repeats, tuple(rows), tuple(bars))


def _bar(task: Task, values: dict[str, tuple[float, ...]]) -> Bar:
    """Return the ratio to whichever of PyTorch's ways is faster in a round."""
    ours = next(found for name, found in values.items() if name.startswith(OURS))
    theirs = [found for name, found in values.items() if not name.startswith(OURS)]
    best = [max(speeds) for speeds in zip(*theirs, strict=True)]
    bound = task.over if usable_cores() >= 16 else _NOT_SLOWER
    return Bar(f"{task.label}: convoy / PyTorch", median_ratio(ours, best), at_least=bound)


def _alone(task: Task) -> float:
    """Return what PyTorch can do at most: one process a core, whole batches, no exchange."""
    cores = usable_cores()
    shares = tuple(_BATCH // cores + (core < _BATCH % cores) for core in range(cores))
    alone = Alone(task.model, task.shape, 10, _BATCH, shares, precision=task.precision)
    return measure_crew("alone", alone, None, warm_s=1.0, seconds=_ALONE_S)


def thread_counts(cores: int) -> list[int]:
    """Return the thread counts that are tried: the powers of two, and all cores.

    >>> thread_counts(16)
    [1, 2, 4, 8, 16]
    >>> thread_counts(6)
    [1, 2, 4, 6]
    """
    return sorted({cores, *(2**power for power in range(5) if 2**power <= cores)})


class _Bench:
    """Finds what each contender is fastest with."""

    def __init__(self, task: Task, *, quick: bool, tell: Callable[[str], None]) -> None:
        self._task, self._quick, self._tell = task, quick, tell
        self._config = Config(batch=_BATCH, precision=task.precision)  # type: ignore[arg-type]
        self._cores = usable_cores()
        self._way: Way | None = None
        self._eager_layout = "channels_last"

    def contenders(self) -> Contenders:
        """Return PyTorch's best, eager and compiled, and ours."""
        eager, speed = self._best_eager()
        compiled = None if self._quick else self._best_compiled(speed)
        ours = self._ours()
        found = [eager, *([compiled] if compiled else []), ours]
        return {candidate.name: candidate.run for candidate in found}

    def curve(self, repeats: int) -> list[Row]:
        """Return the speed of eager and of tasks with one thread, two, and so on."""
        way = self._way
        assert way is not None
        label = f"{self._task.label}, by threads"
        eager = Arithmetic(_CPU, self._task.precision, self._eager_layout)
        tasks = Arithmetic(_CPU, self._task.precision, "channels_last")
        config = self._config.replaced({"executor": "tasks", "groups": way.groups or self._cores})
        rows = []
        for threads in thread_counts(self._cores):
            pair = {
                EAGER: self._eager(EAGER, eager, threads),
                f"{OURS}, tasks": self._executor(OURS, config, tasks, threads),
            }
            speeds: dict[str, list[float]] = {name: [] for name in pair}
            for number in range(repeats + 1):
                for name, candidate in pair.items():
                    speed = candidate.run(_TRIAL_S)
                    speeds[name] += [speed] if number else []  # the first warms up
            rows += [
                Row(label, name, "samples/s", tuple(found), x=threads)
                for name, found in speeds.items()
            ]
        return rows

    # ---------------------------------------------------------------- who takes part

    def _best_eager(self) -> tuple[Candidate, float]:
        counts = thread_counts(self._cores)
        tried: dict[Candidate, float] = {}
        for layout in ("channels_last", "contiguous"):
            way = Arithmetic(_CPU, self._task.precision, layout)
            for threads in counts[-2:] if self._quick else counts:
                words = f"{EAGER}: {layout}, {threads} threads"
                candidate = self._eager(words, way, threads)
                candidate.run(0.0)
                tried[candidate] = candidate.run(_TRIAL_S)
        self._show(tried)
        best = max(tried, key=lambda candidate: tried[candidate])
        self._eager_layout = best.name.split(": ")[1].split(",")[0]
        return best, tried[best]

    def _best_compiled(self, eager: float) -> Candidate | None:
        """Return torch.compile at its best; fewer threads are tried where it comes close."""
        tried: dict[Candidate, float] = {}
        started = time.perf_counter()
        for layout in ("channels_last", "contiguous"):
            if time.perf_counter() - started < _COMPILE_S:
                self._try_compiled(layout, self._cores, tried)
        best = max(tried, key=lambda candidate: tried[candidate], default=None)
        layout = best.name.split(": ")[1].split(",")[0] if best is not None else ""
        if best is not None and self._has_pools():
            self._try_compiled(layout, self._cores, tried, "own scatter")
        if best is not None and tried[best] > eager * _HOPELESS:
            for threads in reversed(thread_counts(self._cores)[:-1]):
                if time.perf_counter() - started < _COMPILE_S:
                    self._try_compiled(layout, threads, tried)
        self._show(tried)
        return max(tried, key=lambda candidate: tried[candidate]) if tried else None

    def _try_compiled(
        self, layout: str, threads: int, tried: dict[Candidate, float], how: str = ""
    ) -> None:
        way = Arithmetic(_CPU, self._task.precision, layout)
        name = f"{COMPILED}: {layout}, {threads} threads" + (f", {how}" if how else "")
        torch.set_num_threads(threads)
        # Torch before 2.13 takes what it compiled for other numbers of threads from its cache.
        cache = Path(gettempdir()) / f"convoy-bench-compiled-{os.getuid()}" / str(threads)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
        try:
            model = torch_dropout(self._model(way))
            step = compiled_step(model, way, Config(), UPDATES[0], _COMPILED_HOW[how])
            candidate = Candidate(name, threads, step, self._batch(way))
            candidate.run(0.0)
            tried[candidate] = candidate.run(_TRIAL_S)
        except Exception as error:  # a compiler may fail in any way
            first_line = next(iter(str(error).splitlines()), "")
            self._tell(f"  {name} failed: {type(error).__name__}: {first_line[:120]}")

    def _ours(self) -> Candidate:
        """Return what --executor auto takes, probed afresh."""
        torch.set_num_threads(self._cores)
        model = build_model(self._task.model, self._task.shape, 10, seed=0)
        way = choose_way(self._config, _CPU, model, self._task.shape, _LONG, remembered=False)
        self._way = way
        config = self._config.replaced({"executor": way.executor, "groups": way.groups})
        threads = way.threads or self._cores
        cut = f", {way.groups} groups" if way.groups else ""
        name = f"{OURS}: {way.executor}, {way.arithmetic.layout}, {threads} threads{cut}"
        return self._executor(name, config, way.arithmetic, threads)

    def _eager(self, name: str, way: Arithmetic, threads: int) -> Candidate:
        """Return plain PyTorch, whose dropout knows nothing of samples' keys."""
        return self._candidate(name, self._config, torch_dropout(self._model(way)), way, threads)

    def _executor(self, name: str, config: Config, way: Arithmetic, threads: int) -> Candidate:
        return self._candidate(name, config, self._model(way), way, threads)

    def _candidate(
        self, name: str, config: Config, model: nn.Module, way: Arithmetic, threads: int
    ) -> Candidate:
        torch.set_num_threads(threads)
        executor = make_executor(config, model, way, self._tell)
        return Candidate(
            name, threads, lambda batch, rate: executor.step(batch, _BATCH, rate), self._batch(way)
        )

    def _has_pools(self) -> bool:
        model = build_model(self._task.model, self._task.shape, 10, seed=0)
        return any(isinstance(module, nn.MaxPool2d) for module in model.modules())

    def _model(self, way: Arithmetic) -> nn.Module:
        return way.place(build_model(self._task.model, self._task.shape, 10, seed=0))

    def _batch(self, way: Arithmetic) -> Batch:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(_BATCH, *self._task.shape, generator=generator)
        labels = torch.randint(0, 10, (_BATCH,), generator=generator)
        keys = sample_keys(0, 0, torch.arange(_BATCH))
        return Batch(images.to(memory_format=way.memory_format), labels, keys)

    def _show(self, tried: dict[Candidate, float]) -> None:
        for candidate, speed in tried.items():
            self._tell(f"  trial: {candidate.name} {speed:,.0f}")
