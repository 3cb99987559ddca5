"""What is a second worth under each rule? CIFAR-10 and ResNet-20 on unequal nodes, equal time.

Every rule of the package, exact synchronous training (one machine with the speed of all) and DDP
get the same virtual time: as much as all nodes together need for eight passes over the data.
Rules other than ours were tried with several batches and intervals; what stands here was best.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.multiprocessing as processes

from convoy.bench.report import Bar, Report, Row
from convoy.bench.virtual import Images, Outcome, Trial, Workbench, simulate
from convoy.config import Config
from convoy.data.images import ImageSet
from convoy.data.load import load_data
from convoy.errors import ConfigError, ConvoyError
from convoy.models.zoo import build_model
from convoy.outer.allocation.shares import apportion
from convoy.outer.rules.agwu import Agwu
from convoy.outer.rules.beat import Beat
from convoy.outer.rules.dcasgd import DcAsgd
from convoy.outer.rules.delta import Delta, FedBuff
from convoy.outer.rules.fedasync import FedAsync
from convoy.outer.rules.nesterov import DelayedNesterov, Nesterov
from convoy.outer.rules.rule import Rule
from convoy.outer.rules.sgwu import fedavg, plain_mean, sgwu
from convoy.tracking import untracked

FOUR = (1.0, 0.75, 0.5, 0.25)
EIGHT = (1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125)
LOCAL_PASS = 0  # as an interval: once for each pass over what a node holds


@dataclass(frozen=True)
class Contender:
    """A rule and how nodes work under it.

    Attributes:
        make: the rule for so many nodes.
        split: who trains how much: one machine with all the speed; equal shares of a batch;
            shares by speed; or a whole batch on each node.
        batch: samples of all nodes together, or of each where all have the same.
        every: local steps between two exchanges.
    """

    name: str
    make: Callable[[int], Rule]
    split: Literal["alone", "equal", "speed", "same"]
    batch: int = 128
    every: int = 1
    ahead: int = 0
    bound: int | None = None


EXACT = Contender("exact, one machine of all the speed", lambda m: fedavg(), "alone")
DDP = Contender("DDP, equal shares", lambda m: plain_mean(), "equal")
OURS = Contender("beat, our default", lambda m: Beat(), "speed")
CONTENDERS = (
    EXACT,
    DDP,
    OURS,
    Contender("beat, every 4 steps", lambda m: Beat(), "speed", every=4),
    Contender("beat, every 4 steps, one ahead", lambda m: Beat(), "speed", every=4, ahead=1),
    Contender("beat, every 16 steps", lambda m: Beat(), "speed", every=16),
    Contender("agwu as published, every pass", lambda m: Agwu(), "same", every=LOCAL_PASS),
    Contender("agwu, every 4 steps", lambda m: Agwu(), "same", batch=32, every=4),
    Contender("agwu mended, every 4 steps", lambda m: Agwu("nodes", "relative"), "same", 32, 4),
    Contender("sgwu as published, every pass", lambda m: sgwu(), "same", every=LOCAL_PASS),
    Contender("sgwu, every 4 steps", lambda m: sgwu(), "speed", every=4),
    Contender("mean, every 4 steps", lambda m: plain_mean(), "speed", every=4),
    Contender("fedavg, every 4 steps", lambda m: fedavg(), "speed", every=4),
    Contender("delta-poly", lambda m: Delta(), "same", batch=32, every=4),
    Contender("delta-poly, bound 8", lambda m: Delta(), "same", batch=32, every=4, bound=8),
    Contender("fedasync", lambda m: FedAsync(0.6), "same", batch=32, every=4),
    Contender("fedbuff", lambda m: FedBuff(m), "same", batch=32, every=4),
    Contender("dc-asgd", lambda m: DcAsgd(), "same", batch=32, every=1),
    Contender("diloco", lambda m: Nesterov(fedavg()), "speed", every=16),
    Contender("delayed nesterov", lambda m: DelayedNesterov(Delta(), m), "same", 32, 16),
)


@dataclass(frozen=True)
class Task:
    """One run of one contender; `unsteady` nodes stumble."""

    contender: str
    speeds: tuple[float, ...]
    seed: int
    epochs: float
    unsteady: bool = False
    lr: float = 0.1

    @property
    def label(self) -> str:
        """Return what the report calls the circumstances."""
        return f"{len(self.speeds)} nodes" + (", unsteady" if self.unsteady else "")


def bench_rules(
    *, quick: bool, tell: Callable[[str], None], data_dir: Path | None = None
) -> Report:
    """Let every rule train for the same virtual time."""
    if quick:
        tasks = [Task(c.name, FOUR, 0, 4.0, lr=0.05) for c in (EXACT, DDP, OURS)]
        found = _run_all(tasks, _quick_images(), "lenet5", tell)
    else:
        if not torch.cuda.is_available():
            raise ConfigError("this needs a GPU", hint="Give --quick for a rough answer without.")
        found = _run_all(all_tasks(), cifar_images(data_dir), "resnet20", tell)
    return report_of(found)


def all_tasks() -> list[Task]:
    """Return what is run: three seeds of those that the bars compare, one of the others."""
    by_rule = [
        Task(contender.name, speeds, seed, 8.0)
        for speeds in (EIGHT, FOUR)
        for contender in CONTENDERS
        for seed in range(3 if contender in (EXACT, DDP, OURS) else 1)
    ]
    names = (DDP.name, OURS.name, "beat, every 4 steps", "fedavg, every 4 steps", "delta-poly")
    unsteady = [Task(name, FOUR, 0, 8.0, unsteady=True) for name in names]
    return [*by_rule, *unsteady]


def trial_of(contender: Contender, task: Task, count: int) -> Trial:
    """Return what a contender does on some nodes with so many samples."""
    speeds = task.speeds if contender.split != "alone" else (sum(task.speeds),)
    batch = {
        "alone": (contender.batch,),
        "equal": apportion([1.0] * len(speeds), contender.batch),
        "speed": apportion(speeds, contender.batch, min_share=4),
        "same": (contender.batch,) * len(speeds),
    }[contender.split]
    # Who trains equal parts of a batch is dealt equal parts of the data, as DDP's sampler does.
    held = apportion([1.0] * len(speeds) if contender.split == "equal" else speeds, count)
    passes = tuple(max(1, n // b) for n, b in zip(held, batch, strict=True))
    every = passes if contender.every == LOCAL_PASS else (contender.every,) * len(speeds)
    return Trial(
        speeds,
        batch,
        every,
        task.epochs,
        lr=task.lr,
        seed=task.seed,
        bound=contender.bound,
        ahead=contender.ahead,
        jitter=0.2 if task.unsteady else 0.0,
        stumbles=0.05 if task.unsteady else 0.0,
        held=held,
    )


# ---------------------------------------------------------------- running them


def _run_all(
    tasks: Sequence[Task], images: tuple[Images, Images], model: str, tell: Callable[[str], None]
) -> dict[Task, Outcome]:
    """Run every task, several at once where there is a GPU to share."""
    found = {}
    for task, outcome in outcomes(tasks, images, model):
        found[task] = outcome
        tell(
            f"{len(found)} of {len(tasks)}: {task.label}, {task.contender}, seed {task.seed}: "
            f"{outcome.accuracy:.2%}"
        )
    return found


def outcomes(
    tasks: Sequence[Task], images: tuple[Images, Images], model: str
) -> Iterator[tuple[Task, Outcome]]:
    """Yield what each task gave, as soon as it is done."""
    for part in images:
        part.pixels.share_memory_()
        part.labels.share_memory_()
    if not torch.cuda.is_available():
        yield from ((task, run_task(task, images, model)) for task in tasks)
        return
    context = processes.get_context("spawn")
    left, done = context.Queue(), context.Queue()
    for task in tasks:
        left.put(task)
    workers = [
        context.Process(target=_work, args=(left, done, images, model), daemon=True)
        for _ in range(_WORKERS)
    ]
    for worker in workers:
        worker.start()
    for _ in tasks:
        task, outcome = done.get(timeout=_TASK_AT_MOST_S)
        if isinstance(outcome, str):
            raise ConvoyError(f"{task.contender}, {task.label}: {outcome}")
        yield task, outcome
    for worker in workers:
        worker.kill()


_WORKERS = 12
_TASK_AT_MOST_S = 600.0


def _work(
    left: "processes.Queue[Task]",
    done: "processes.Queue[tuple[Task, Outcome | str]]",
    images: tuple[Images, Images],
    model: str,
) -> None:
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    train, test = (Images(part.pixels.cuda(), part.labels.cuda()) for part in images)
    while True:
        task = left.get()
        try:
            done.put((task, run_task(task, (train, test), model)))
        except Exception as error:
            done.put((task, f"{type(error).__name__}: {error}"))


def run_task(task: Task, images: tuple[Images, Images], model: str) -> Outcome:
    """Run one contender once."""
    train, test = images
    contender = next(c for c in CONTENDERS if c.name == task.contender)
    shape = tuple(train.pixels.shape[1:])
    classes = int(train.labels.max()) + 1
    network = build_model(model, (shape[0], shape[1], shape[2]), classes, task.seed)
    network = network.to(train.pixels.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    bench = Workbench(network, train, test, padding=shape[1] // 16)
    trial = trial_of(contender, task, len(train.labels))
    return simulate(bench, contender.make(len(trial.speeds)), trial)


def cifar_images(data_dir: Path | None) -> tuple[Images, Images]:
    """Read CIFAR-10."""
    if data_dir is None:
        raise ConfigError(
            "this needs CIFAR-10", hint="Give --data-dir with cifar10-jpeg.tar.gz in it."
        )
    data = load_data(Config(data=str(data_dir / "cifar10-jpeg.tar.gz")), untracked)
    return _as_images(data.train), _as_images(data.test)


def _quick_images() -> tuple[Images, Images]:
    data = load_data(Config(data="fashion-mini"), untracked)
    return _as_images(data.train), _as_images(data.test)


def _as_images(part: ImageSet) -> Images:
    return Images(part.images_NCHW.clone(), part.labels.clone())


# ---------------------------------------------------------------- what they gave


def report_of(found: dict[Task, Outcome]) -> Report:
    """Return the table, and the bars that the benchmark exists for."""
    grouped: dict[tuple[str, str], list[float]] = {}
    for task, outcome in found.items():
        grouped.setdefault((task.label, task.contender), []).append(100 * outcome.accuracy)
    rows = tuple(
        Row(label, name, "% right", tuple(values)) for (label, name), values in grouped.items()
    )
    mean = {key: statistics.mean(values) for key, values in grouped.items()}
    return Report("rules", max(len(v) for v in grouped.values()), rows, _bars(mean))


def _bars(mean: dict[tuple[str, str], float]) -> tuple[Bar, ...]:
    four, eight = "4 nodes", "8 nodes"
    gap = mean[four, EXACT.name] - mean[four, OURS.name]
    bars = [Bar("points behind exact, 4 nodes", gap, at_most=0.5)]
    if (eight, OURS.name) in mean:
        bars = [
            Bar("accuracy of our default, 4 nodes", mean[four, OURS.name], at_least=80.5),
            Bar(
                "points ahead of DDP, 8 nodes",
                mean[eight, OURS.name] - mean[eight, DDP.name],
                at_least=8.0,
            ),
            *bars,
        ]
    return tuple(bars)
