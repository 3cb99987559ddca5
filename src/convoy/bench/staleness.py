"""What does a pipeline's staleness cost in accuracy? Virtual pipelines on one device.

Every network is trained for the same epochs: plain; pipelined with stale weights as published, at
several depths; as the published hybrid, whose second half is plain; and by our recipe. Each run is
a process of its own, several at once on a GPU.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from convoy.bench.report import Bar, Report, Row
from convoy.errors import ConfigError, ConvoyError
from convoy.pipeline.recipe import DEFAULT

PLAIN, PUBLISHED, HYBRID, OURS = "plain", "stale, as published", "hybrid, as published", "convoy"
_WAYS: Mapping[str, Mapping[str, str]] = {
    PUBLISHED: {"recipe": "published"},
    HYBRID: {"recipe": "published", "pipelined": "0.5"},
    OURS: {"recipe": DEFAULT},
}
_AT_ONCE = 10  # runs that share a GPU
_EPOCHS = 20
_SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Net:
    """A network, how it is trained, and where it is cut for more and more stages.

    Attributes:
        options: of a run.
        cuts: one list for each depth; the paper counts 2(K+1) stages for K cuts.
        bars: how many points ours may be behind plain training, for some depths.
    """

    model: str
    data: str
    lr: float
    cuts: tuple[tuple[int, ...], ...]
    bars: Mapping[int, float]


NETS = (
    Net(
        "resnet20",
        "cifar10",
        0.1,
        ((7,), (7, 13), (7, 13, 19), (5, 9, 13, 19), (3, 5, 7, 9, 11, 13, 15, 17, 19)),
        {1: 0.5, 3: 1.0, 9: 1.5},
    ),
    Net("vgg16-bn", "cifar10", 0.05, ((2,), (2, 4), (2, 4, 7), (2, 4, 7, 10)), {1: 0.5, 3: 1.0}),
    Net("alexnet", "cifar10", 0.02, ((1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)), {}),
    Net("lenet5", "fashion", 0.05, ((1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)), {}),
    Net("resnet56", "cifar10", 0.1, ((19,),), {}),
    Net("resnet110", "cifar10", 0.1, ((37,),), {}),
)


@dataclass(frozen=True)
class Cell:
    """One run: a network, cut somewhere (or nowhere), trained in one way, from one seed."""

    model: str
    data: str
    lr: float
    way: str
    cuts: tuple[int, ...] = ()
    seed: int = 0
    more: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """Return what the report calls the pipeline."""
        return f"{self.model}, {2 * (len(self.cuts) + 1)} stages" if self.cuts else self.model

    def options(self) -> dict[str, str]:
        """Return what a run is given besides data and length."""
        common = {"model": self.model, "lr": str(self.lr), "seed": str(self.seed)}
        if self.cuts:
            cuts = ",".join(map(str, self.cuts))
            common |= {"strategy": "pipeline", "cuts": cuts, **_WAYS.get(self.way, {})}
        return common | dict(self.more)


def all_cells(nets: Iterable[Net] = NETS) -> list[Cell]:
    """Return what is run: three seeds where a bar compares, one elsewhere; long runs first."""
    cells = []
    for net in nets:
        plain = _SEEDS if net.bars else _SEEDS[:1]
        cells += [Cell(net.model, net.data, net.lr, PLAIN, seed=seed) for seed in plain]
        for cuts in net.cuts:
            for way in _WAYS:
                seeds = _SEEDS if way == OURS and len(cuts) in net.bars else _SEEDS[:1]
                cells += [Cell(net.model, net.data, net.lr, way, cuts, seed) for seed in seeds]
    order = {net.model: number for number, net in enumerate(reversed(NETS))}
    return sorted(cells, key=lambda cell: order[cell.model])


def bench_staleness(
    *, quick: bool, tell: Callable[[str], None], data_dir: Path | None = None
) -> Report:
    """Train every cell and compare."""
    if quick:
        net = Net("lenet5", "fashion-mini", 0.05, ((1, 2),), {})  # too short to judge by
        plain = Cell(net.model, net.data, net.lr, PLAIN)
        others = [Cell(net.model, net.data, net.lr, way, net.cuts[0]) for way in _WAYS]
        return report_of(run_cells([plain, *others], {}, 3, tell), [net])
    if not torch.cuda.is_available():
        raise ConfigError("this needs a GPU", hint="Give --quick for a rough answer without.")
    return report_of(run_cells(all_cells(), data_folders(data_dir), _EPOCHS, tell), NETS)


def data_folders(data_dir: Path | None) -> dict[str, tuple[str, str | None]]:
    """Return where each data set lies: what a run calls it, and its folder."""
    if data_dir is None:
        hint = "Give --data-dir with cifar10-jpeg.tar.gz and a folder fashion-mnist in it."
        raise ConfigError("this needs CIFAR-10 and Fashion-MNIST", hint=hint)
    return {
        "cifar10": (str(data_dir / "cifar10-jpeg.tar.gz"), None),
        "fashion": ("fashion-mnist", str(data_dir / "fashion-mnist")),
    }


# ---------------------------------------------------------------- running them


def run_cells(
    cells: Sequence[Cell],
    folders: Mapping[str, tuple[str, str | None]],
    epochs: int,
    tell: Callable[[str], None],
) -> dict[Cell, float]:
    """Return each cell's test accuracy at the end, in percent."""
    found = {}
    with (
        TemporaryDirectory() as scratch,
        ThreadPoolExecutor(_AT_ONCE if torch.cuda.is_available() else 1) as pool,
    ):
        begun = {
            pool.submit(_run, cell, folders, epochs, Path(scratch) / str(number)): cell
            for number, cell in enumerate(cells)
        }
        for future in as_completed(begun):
            cell = begun[future]
            found[cell] = future.result()
            told = f"{cell.label}, {cell.way}, seed {cell.seed}: {found[cell]:.2f} %"
            tell(f"{len(found)} of {len(cells)}: {told}")
    return {cell: found[cell] for cell in cells}


def _run(
    cell: Cell, folders: Mapping[str, tuple[str, str | None]], epochs: int, out: Path
) -> float:
    data, folder = folders.get(cell.data, (cell.data, None))
    options = {
        **cell.options(),
        "data": data,
        "epochs": str(epochs),
        "batch": "128",
        # A backward pass must be able to read weights as they are: nothing may be rounded.
        "precision": "fp32",
        "executor": "graph" if torch.cuda.is_available() else "eager",
        "memory-format": "channels_last",
        "out": str(out),
        **({"data-dir": folder} if folder else {}),
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    flags += ["--virtual"] if cell.cuts else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "convoy", "train", *flags, "--json", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)  # noqa: S603
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it says nothing"]
        raise ConvoyError(f"{cell.label}, {cell.way}: {lines[-1]}")
    return 100 * float(json.loads(done.stdout.splitlines()[-1])["test_accuracy"])


# ---------------------------------------------------------------- what they gave


def report_of(found: Mapping[Cell, float], nets: Iterable[Net]) -> Report:
    """Return the table, and how far our recipe is behind plain training."""
    grouped: dict[tuple[str, str], list[float]] = {}
    for cell, accuracy in found.items():
        grouped.setdefault((cell.label, cell.way), []).append(accuracy)
    rows = tuple(
        Row(label, way, "% right", tuple(values)) for (label, way), values in grouped.items()
    )
    mean = {key: statistics.mean(values) for key, values in grouped.items()}
    bars = tuple(
        Bar(
            f"points behind plain training, {net.model}, {2 * (cuts + 1)} stages",
            mean[net.model, PLAIN] - mean[f"{net.model}, {2 * (cuts + 1)} stages", OURS],
            at_most=at_most,
        )
        for net in nets
        for cuts, at_most in net.bars.items()
    )
    return Report("staleness", max(map(len, grouped.values())), rows, bars)
