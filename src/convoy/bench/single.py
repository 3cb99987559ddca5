"""Does Convoy cost anything on one node? Our loop against a bare PyTorch loop.

Both train the same network with the same optimizer, batch, threads and memory layout. The bare
loop has its images in memory as normalised floats, ready to be indexed; ours does what a real
run does: gathers bytes, normalises them, keeps count, and writes events. A third contender
varies the images too (crop and mirror), which the bare loop does not.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.nn import functional

from convoy.assembly import Given, make_job
from convoy.bench.report import Bar, Contenders, Report, Row, interleave, median_ratio
from convoy.config import Config
from convoy.data.images import ImageSet, make_image_set
from convoy.data.load import wrap_data
from convoy.inner.optimizer import make_optimizer
from convoy.models.zoo import build_model
from convoy.monitor.events import EventStream
from convoy.monitor.journal import Journal
from convoy.outer.job import Job
from convoy.outer.single import train_epoch
from convoy.outer.stop import StopRequest
from convoy.storage.runfolder import RunFolder
from convoy.tracking import untracked

AT_LEAST = 0.97


@dataclass(frozen=True, slots=True)
class Task:
    """A network with images of its size; a slice of work is half a second on two cores."""

    model: str
    shape: tuple[int, int, int]
    batch: int
    samples: int
    slices: int


TASKS = (
    Task("lenet5", (1, 28, 28), batch=64, samples=3_200, slices=20),
    Task("resnet20", (3, 32, 32), batch=128, samples=256, slices=8),
)


def bench_single(*, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure our loop and the bare one, interleaved."""
    repeats = 3 if quick else 5
    rows, bars = [], []
    for task in TASKS:
        slices = max(1, task.slices * 2 // 5) if quick else task.slices
        tell(f"{task.model}, batch {task.batch}, samples per second:")
        make = partial(_contenders, task)
        values = interleave(make, repeats=repeats, slices=slices, tell=tell)
        rows += [Row(task.model, name, "samples/s", found) for name, found in values.items()]
        ratio = median_ratio(values["convoy"], values["bare PyTorch"])
        bars.append(Bar(f"{task.model}: convoy / bare PyTorch", ratio, at_least=AT_LEAST))
    return Report("single", repeats, tuple(rows), tuple(bars))


def _contenders(task: Task, stack: ExitStack) -> Contenders:
    folder = Path(stack.enter_context(TemporaryDirectory()))
    count = task.samples
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, *task.shape), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (count,), generator=generator)
    part = make_image_set(images, labels, [str(i) for i in range(10)], "random images")
    plain = _make_job(task, part, folder / "plain", "none", stack)
    varied = _make_job(task, part, folder / "varied", "crop+flip", stack)
    return {
        "bare PyTorch": _bare_loop(plain, images, labels),
        "convoy": _our_loop(plain),
        "convoy, varying images": _our_loop(varied),
    }


def _make_job(task: Task, part: ImageSet, out: Path, augment: str, stack: ExitStack) -> Job:
    """Make a job as a real run does; the stack closes what it opens."""
    config = Config(
        model=task.model,
        batch=task.batch,
        augment=augment,  # type: ignore[arg-type]
        lr=0.001,
        precision="fp32",
        memory_format="channels_last",
        device="cpu",
    )
    folder = stack.enter_context(RunFolder(out))
    folder.create()
    events = EventStream([Journal(folder.events)])
    stack.callback(events.close)
    given = Given(data=wrap_data(part, part))
    return make_job(config, given, folder.checkpoints, events, StopRequest(), untracked)


def _our_loop(job: Job) -> Callable[[], float]:
    """Return a function that trains one epoch with our loop and gives its samples per second."""

    def run() -> float:
        job.progress.step = job.progress.count = job.progress.correct = 0
        job.progress.loss = 0.0
        started = time.perf_counter()
        train_epoch(job)
        return len(job.train) / (time.perf_counter() - started)

    return run


def _bare_loop(job: Job, images: Tensor, labels: Tensor) -> Callable[[], float]:
    """Return a function that trains one epoch with a bare loop, all data ready as floats."""
    config, layout = job.config, job.executor.arithmetic.memory_format
    floats = (images.float() - 127.5) / 74.0
    floats = floats.contiguous(memory_format=layout)
    model: nn.Module = build_model(config.model, job.data.train.shape_CHW, 10, seed=0)
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    optimizer = make_optimizer(model, config)

    def run() -> float:
        started = time.perf_counter()
        model.train()
        order = torch.randperm(len(labels))
        for start in range(0, len(labels), config.batch):
            picked = order[start : start + config.batch]
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(floats[picked]), labels[picked])
            loss.backward()
            optimizer.step()
        return len(labels) / (time.perf_counter() - started)

    return run
