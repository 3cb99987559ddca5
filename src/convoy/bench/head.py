"""What does a huge classifier take of each rank's memory? Data parallel beside hybrid.

A hundred thousand classes, as in face recognition: the last layer has 51 million weights, and
three times that with gradients and momentum. Data parallel training (DDP) keeps all of it on every
rank. Hybrid makes each rank's classes directly, so that the whole layer is nowhere, not even at
the start; the loss is computed from parts too, and no rank ever sees all logits of a sample.

Memory is the highest resident size of a rank's process, less what it had before the network was
built, twice: from there on, and of steady steps only (DDP's second step builds its buckets anew,
beside the old ones). What is not the head's is measured as well, with a head of 1,000 classes, and
taken off for the ratios; those compare steady steps, the kinder of the two for DDP.

Under a limit of less than weights, gradients and momentum of the whole layer take, data parallel
cannot train, whatever its settings; hybrid on two ranks can. The limit counts from where threads
and buffers are there, for the kernel counts what a thread might use as used.
"""

import math
import re
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from convoy.bench.peers import ddp
from convoy.bench.peers.crew import Crew, Link
from convoy.bench.report import Bar, Report, Row, median_ratio
from convoy.config import Config
from convoy.errors import ConvoyError
from convoy.hybrid.huge import HugeHead, MakeRows
from convoy.inner.optimizer import make_optimizer

DDP, OURS = "DDP", "convoy hybrid"
FEATURES = 512  # that the trunk gives
IMAGE = (3, 32, 32)
_BLOCK = 1000  # classes whose weights are drawn together
_LIMIT = 2.9  # copies of the whole layer that a rank may have: it needs three to train all of it
_WARM_STEPS = 2
_PATIENCE_S = 300.0
CONFIG = Config(lr=0.05, weight_decay=0.0)
_LESS_IN_ALL = 1.2  # memory of all ranks together, in heads of data parallel


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is trained, and for how long.

    Attributes:
        batch: samples of all ranks.
        steps: that are measured.
    """

    classes: int
    batch: int
    steps: int

    @property
    def head_bytes(self) -> int:
        """Return what the weights of the last layer take."""
        return self.classes * (FEATURES + 1) * 4


@dataclass(frozen=True, slots=True)
class Plan:
    """How thoroughly to measure: rank counts, rounds, and a head small enough not to count."""

    sizes: Sizes
    small: Sizes
    ranks: tuple[int, ...]
    repeats: int


_HUGE = Sizes(classes=100_000, batch=64, steps=6)
FULL = Plan(_HUGE, replace(_HUGE, classes=1000), ranks=(1, 2, 4), repeats=3)
QUICK = Plan(replace(_HUGE, steps=2), Sizes(1000, 64, 2), ranks=(2,), repeats=1)


# ---------------------------------------------------------------- the network


def make_trunk() -> nn.Sequential:
    """Return three convolutions, with the same weights in every process."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False),
            nn.GroupNorm(8, outputs),  # unlike batch-norm, the same whoever has which samples
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten())


def class_weights(first: int, stop: int) -> Tensor:
    """Return the initial weights of some classes: the same whoever makes them, and with whom."""
    rows = torch.empty(stop - first, FEATURES)
    for block in range(first // _BLOCK, math.ceil(stop / _BLOCK)):
        start, end = max(first, block * _BLOCK), min(stop, (block + 1) * _BLOCK)
        drawn = torch.rand(_BLOCK, FEATURES, generator=torch.Generator().manual_seed(block))
        drawn.mul_(2).sub_(1).div_(math.sqrt(FEATURES))
        rows[start - first : end - first] = drawn[start - block * _BLOCK : end - block * _BLOCK]
    return rows


def make_samples(sizes: Sizes, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return a rank's images and labels; every image is of another class."""
    generator = torch.Generator().manual_seed(1)
    images_NCHW = torch.randn(sizes.batch, *IMAGE, generator=generator)  # noqa: N806
    labels = torch.randperm(sizes.classes, generator=generator)[: sizes.batch]
    own = slice(sizes.batch * rank // ranks, sizes.batch * (rank + 1) // ranks)
    return images_NCHW[own], labels[own]


# ---------------------------------------------------------------- data parallel


class WholeHead:
    """The same network under DDP, all of it on every rank."""

    def __init__(self, trunk: nn.Module, classes: int, make_rows: MakeRows) -> None:
        last = nn.Linear(FEATURES, classes, device="meta")
        last.weight = nn.Parameter(make_rows(0, classes))
        last.bias = nn.Parameter(torch.zeros(classes))
        model = nn.Sequential(trunk, last)
        self._optimizer = make_optimizer(model, CONFIG)
        # Telling each other weights that are equal would take memory for nothing.
        self._model = ddp.wrap_model(model, init_sync=False)

    def step(self, images_NCHW: Tensor, labels: Tensor) -> float:  # noqa: N803 - shapes are in names
        """Train on own samples, as many as every rank has; return the sum of their losses."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(self._model(images_NCHW), labels, reduction="sum")
        (loss / len(labels)).backward()
        self._optimizer.step()
        return float(loss.detach())


def _make_parts(trunk: nn.Module, classes: int, make_rows: MakeRows) -> HugeHead:
    return HugeHead(trunk, FEATURES, classes, make_rows, CONFIG, _PATIENCE_S)


_SYSTEMS: dict[str, Callable[[nn.Module, int, MakeRows], HugeHead | WholeHead]] = {
    DDP: WholeHead,
    OURS: _make_parts,
}


# ---------------------------------------------------------------- a rank


@dataclass(frozen=True, slots=True)
class Found:
    """What a rank has measured.

    Attributes:
        losses: sums over its samples, step by step.
        peak_bytes: highest memory since the network was begun.
        steady_bytes: the same of steady steps.
    """

    losses: tuple[float, ...]
    steps_per_s: float
    peak_bytes: int
    steady_bytes: int


def run_rank(
    link: Link, system: str, sizes: Sizes, rank: int, ranks: int, address: str, limit: int | None
) -> None:
    """Be a rank: train for some steps, and tell what that took."""
    with ddp.group(address, rank, ranks):
        images_NCHW, labels = make_samples(sizes, rank, ranks)  # noqa: N806
        distributed.barrier()  # which connects everybody
        make = _SYSTEMS[system]
        if limit is not None:
            make(make_trunk(), _BLOCK, class_weights).step(images_NCHW, labels % _BLOCK)
            limit_memory(limit)
        before = read_status("VmRSS")
        reset_peak()
        net = make(make_trunk(), sizes.classes, class_weights)
        losses = [net.step(images_NCHW, labels) for _ in range(_WARM_STEPS)]
        peak = read_status("VmHWM")
        reset_peak()
        started = time.perf_counter()
        losses += [net.step(images_NCHW, labels) for _ in range(sizes.steps)]
        elapsed_s = time.perf_counter() - started
        steady = read_status("VmHWM")
    highest = max(peak, steady) - before
    link.send(Found(tuple(losses), sizes.steps / elapsed_s, highest, steady - before))


def read_status(name: str) -> int:
    """Return a size, in bytes, that the kernel tells of this process."""
    found = re.search(rf"(?m)^{name}:\s*(\d+) kB$", Path("/proc/self/status").read_text())
    assert found is not None, name
    return int(found[1]) * 1024


def reset_peak() -> None:
    """Let the kernel forget the highest memory of this process so far."""
    Path("/proc/self/clear_refs").write_text("5")


def limit_memory(more_bytes: int) -> None:
    """Allow this process so much memory of its own beyond what it has."""
    # Not the address space: threads reserve much of that which they never use.
    limit = read_status("VmData") + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


# ---------------------------------------------------------------- measuring


def measure(system: str, sizes: Sizes, ranks: int, limit: int | None = None) -> list[Found]:
    """Let so many ranks train; return what each has found."""
    with ddp.open_store() as address:
        given = [(system, sizes, rank, ranks, address, limit) for rank in range(ranks)]
        with Crew(run_rank, given) as crew:
            return crew.receive(_PATIENCE_S)


def trains_within(
    system: str, sizes: Sizes, ranks: int, limit: int, tell: Callable[[str], None]
) -> bool:
    """Tell whether ranks can train that may have so much memory each."""
    try:
        found = measure(system, sizes, ranks, limit)
    except ConvoyError as error:
        if "allocate memory" not in str(error):
            raise
        words = str(error).partition("DefaultCPUAllocator: ")[2].partition(". ")[0]
        tell(f"{ranks} ranks of {limit / 1e6:,.0f} MB: {system} is out of memory: {words}")
        return False
    most = max(one.peak_bytes for one in found)
    tell(f"{ranks} ranks of {limit / 1e6:,.0f} MB: {system} trains, within {most / 1e6:,.0f} MB")
    return True


Key = tuple[str, int]  # system, ranks
Values = Mapping[Key, Sequence[Sequence[Found]]]  # rounds of ranks


def bench_head(*, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure both systems in turn, with every number of ranks."""
    plan = QUICK if quick else FULL
    keys = [(system, ranks) for ranks in plan.ranks for system in (DDP, OURS)]
    huge: dict[Key, list[list[Found]]] = {key: [] for key in keys}
    small: dict[Key, list[list[Found]]] = {key: [] for key in keys}
    for number in range(plan.repeats):
        for system, ranks in keys:
            small[system, ranks].append(measure(system, plan.small, ranks))
            found = measure(system, plan.sizes, ranks)
            huge[system, ranks].append(found)
            most = max(one.peak_bytes for one in found) / 1e6
            speed = min(one.steps_per_s for one in found)
            tell(
                f"round {number + 1} of {plan.repeats}, {ranks} ranks, {system}: "
                f"{most:,.0f} MB a rank, {speed:.3g} steps/s"
            )
    limit = round(plan.sizes.head_bytes * _LIMIT)
    trained = {system: trains_within(system, plan.sizes, 2, limit, tell) for system in (DDP, OURS)}
    bars = [*memory_bars(huge, small), *loss_bars(huge), *limit_bars(trained, limit)]
    return Report("head", plan.repeats, tuple(make_rows(plan.sizes, huge, small)), tuple(bars))


def head_bytes(huge: Sequence[Sequence[Found]], small: Sequence[Sequence[Found]]) -> list[float]:
    """Return what the head takes of a rank, round by round: of the one it takes most of."""
    rest = statistics.median(max(one.steady_bytes for one in found) for found in small)
    return [max(one.steady_bytes for one in found) - rest for found in huge]


def make_rows(sizes: Sizes, huge: Values, small: Values) -> list[Row]:
    """Return for each system and number of ranks: memory of a rank, and speed."""
    rows = []
    label = f"{sizes.classes:,} classes"
    for (system, ranks), found in huge.items():
        name = f"{system}, {ranks} rank{'s' if ranks > 1 else ''}"
        peak = tuple(max(one.peak_bytes for one in part) / 1e6 for part in found)
        head = tuple(value / 1e6 for value in head_bytes(found, small[system, ranks]))
        speed = tuple(min(one.steps_per_s for one in part) for part in found)
        rows += [
            Row(f"{label}: highest memory of a rank", name, "MB", peak),
            Row(f"{label}: the head's, in steady steps", name, "MB", head),
            Row(f"{label}: speed", name, "steps/s", speed),
        ]
    return sorted(rows, key=lambda row: row.task)


def memory_bars(huge: Values, small: Values) -> list[Bar]:
    """Return the head's memory on a rank beside data parallel's, for each number of ranks."""
    bars = []
    for ranks in dict.fromkeys(ranks for _, ranks in huge):
        ours, theirs = (
            head_bytes(huge[system, ranks], small[system, ranks]) for system in (OURS, DDP)
        )
        name = f"{ranks} ranks: memory of a rank's head, hybrid / DDP"
        bars.append(Bar(name, median_ratio(ours, theirs), at_most=_LESS_IN_ALL / ranks))
    return bars


def loss_bars(huge: Values) -> list[Bar]:
    """Return how far the losses of all systems are apart: at the start, and at any step."""
    sums = [
        [sum(losses) for losses in zip(*(one.losses for one in part), strict=True)]
        for found in huge.values()
        for part in found
    ]
    apart = [(max(step) - min(step)) / max(step) for step in zip(*sums, strict=True)]
    name = "losses of all systems, relative difference"
    return [
        Bar(f"{name}: first step", apart[0], at_most=1e-5),
        # Later steps repeat what rounding has made of the first.
        Bar(f"{name}: any step", max(apart), at_most=5e-2),
    ]


def limit_bars(trained: Mapping[str, bool], limit: int) -> list[Bar]:
    """Return who has trained within the limit."""
    name = f"two ranks of {limit / 1e6:,.0f} MB"
    return [
        Bar(f"{name}: hybrid trains", float(trained[OURS]), at_least=1.0),
        Bar(f"{name}: DDP trains", float(trained[DDP]), at_most=0.0),
    ]
