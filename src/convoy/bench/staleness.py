"""What does a pipeline's staleness cost in accuracy? Virtual pipelines on one device.

Every network is trained for the same epochs: plain; pipelined with stale weights as published, at
several depths; as the published hybrid, whose second half is plain; and by our recipe. Each run is
a process of its own, several at once on a GPU. One that diverges is as right as by chance. With a
file to keep results in, a study that was cut off goes on where it was.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from convoy.bench.only import pick
from convoy.bench.report import Bar, Report, Row
from convoy.bench.results import Key, Results
from convoy.errors import ConfigError, ConvoyError, Diverged
from convoy.pipeline.recipe import DEFAULT, parse_recipe, spelled

_Future = Future[float]

PLAIN, PUBLISHED, HYBRID, OURS = "plain", "stale, as published", "hybrid, as published", "convoy"
_WAYS: Mapping[str, Mapping[str, str]] = {
    PUBLISHED: {"recipe": "published"},
    HYBRID: {"recipe": "published", "pipelined": "0.5"},
    OURS: {"recipe": DEFAULT},
}
_AT_ONCE = 10  # runs that share a GPU
_EPOCHS = 20
_SEEDS = (0, 1, 2)
_BY_CHANCE = 10.0  # % right, with ten classes: what a run that diverges has learned


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
    epochs: int = _EPOCHS
    more: tuple[tuple[str, str], ...] = ()

    @property
    def stages(self) -> int:
        """Return how many stages there are as the paper counts them, forward and backward."""
        return 2 * (len(self.cuts) + 1)

    @property
    def label(self) -> str:
        """Return what people are told of the pipeline."""
        return f"{self.model}, {self.stages} stages" if self.cuts else self.model

    @property
    def key(self) -> Key:
        """Return by what its result is found: also what its recipe's name stands for today."""
        trained = {"lr": self.lr, "epochs": self.epochs, "seed": self.seed}
        named = self.options().get("recipe")
        recipe = {"recipe": spelled(parse_recipe(named))} if named else {}
        return {"model": self.model, "cuts": [*self.cuts], "way": self.way, **recipe, **trained}

    def options(self) -> dict[str, str]:
        """Return what a run is given besides data."""
        common = {"model": self.model, "lr": str(self.lr), "seed": str(self.seed)}
        common["epochs"] = str(self.epochs)
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
    *,
    quick: bool,
    tell: Callable[[str], None],
    data_dir: Path | None = None,
    only: Sequence[str] = (),
    keep: Path | None = None,
) -> Report:
    """Train every cell and compare; what is in the file `keep` is not trained again."""
    if quick and keep is not None:
        raise ConfigError("what a quick study gives is not worth keeping", got=str(keep))
    results = Results(keep)
    if quick:
        net = Net("lenet5", "fashion-mini", 0.05, ((1, 2),), {})  # too short to judge by
        plain = Cell(net.model, net.data, net.lr, PLAIN, epochs=3)
        others = [replace(plain, way=way, cuts=net.cuts[0]) for way in _WAYS]
        return report_of(run_cells([plain, *others], {}, results, tell), [net])
    nets = pick(NETS, only, lambda net: net.model)
    cells = all_cells(nets)
    if all(results.find(cell.key) is not None for cell in cells):
        return report_of(run_cells(cells, {}, results, tell), nets)
    if not torch.cuda.is_available():
        raise ConfigError("this needs a GPU", hint="Give --quick for a rough answer without.")
    return report_of(run_cells(cells, data_folders(data_dir), results, tell), nets)


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
    results: Results,
    tell: Callable[[str], None],
) -> dict[Cell, float]:
    """Return each cell's test accuracy at the end, in percent."""
    known = {cell: results.find(cell.key) for cell in cells}
    found = {cell: accuracy for cell, accuracy in known.items() if accuracy is not None}
    if found:
        tell(f"{len(found)} of {len(cells)} are kept")
    with (
        TemporaryDirectory() as scratch,
        ThreadPoolExecutor(_AT_ONCE if torch.cuda.is_available() else 1) as pool,
    ):
        begun = {
            pool.submit(_run, cell, folders, Path(scratch) / str(number)): cell
            for number, cell in enumerate(cells)
            if cell not in found
        }
        for future in _as_they_end(begun, pool):
            cell = begun[future]
            found[cell] = future.result()
            results.add(cell.key, found[cell])
            told = f"{cell.label}, {cell.way}, seed {cell.seed}: {found[cell]:.2f} %"
            tell(f"{len(found)} of {len(cells)}: {told}")
    return {cell: found[cell] for cell in cells}


def _as_they_end(begun: Iterable[_Future], pool: ThreadPoolExecutor) -> Iterator[_Future]:
    """Yield runs that are done. Once one has failed no other begins, but those that run count."""
    failed: _Future | None = None
    for future in as_completed(begun):
        if future.cancelled():
            continue
        if failed is None and future.exception() is not None:
            failed = future
            pool.shutdown(wait=False, cancel_futures=True)
        elif future.exception() is None:
            yield future
    if failed is not None:
        failed.result()  # raises


def _run(cell: Cell, folders: Mapping[str, tuple[str, str | None]], out: Path) -> float:
    data, folder = folders.get(cell.data, (cell.data, None))
    options = {
        **cell.options(),
        "data": data,
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
    if done.returncode == Diverged.exit_code:
        return _BY_CHANCE
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it says nothing"]
        raise ConvoyError(f"{cell.label}, {cell.way}: {lines[-1]}")
    return 100 * float(json.loads(done.stdout.splitlines()[-1])["test_accuracy"])


# ---------------------------------------------------------------- what they gave


def report_of(found: Mapping[Cell, float], nets: Iterable[Net]) -> Report:
    """Return the table, and how far our recipe is behind plain training."""
    grouped: dict[tuple[str, str, int], list[float]] = {}
    for cell, accuracy in found.items():
        grouped.setdefault((cell.model, cell.way, cell.stages), []).append(accuracy)
    rows = tuple(
        Row(model, way, "% right", tuple(values), x=stages)
        for (model, way, stages), values in grouped.items()
    )
    mean = {key: statistics.mean(values) for key, values in grouped.items()}
    bars = tuple(
        Bar(
            f"points behind plain training, {net.model}, {2 * (cuts + 1)} stages",
            mean[net.model, PLAIN, 2] - mean[net.model, OURS, 2 * (cuts + 1)],
            at_most=at_most,
        )
        for net in nets
        for cuts, at_most in net.bars.items()
    )
    return Report("staleness", max(map(len, grouped.values())), rows, bars, "stages")
