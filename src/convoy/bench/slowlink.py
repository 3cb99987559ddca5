"""Who is good first where the network is slow? Fashion-MNIST to 85 % over links of 100 Mbit/s.

Two unequal nodes, each in a network namespace of its own. Ours is the parameter service with its
defaults; Lockstep and DDP exchange gradients at every step, and get the batch that each of them
is fastest with. For DDP only its steps count; ours and Lockstep count all: steps, tests and
checkpoints. Tests come at the end of an epoch, so an epoch is the first 20,000 images: with all
60,000 of them the time to the target would be one or two epochs, whatever the system.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from convoy.bench.peers.ddp import train_ddp
from convoy.bench.report import Bar, Report, Row, median_ratio
from convoy.bench.tta import recipe, time_to
from convoy.config import Config
from convoy.data.load import load_data
from convoy.errors import EnvironmentProblem
from convoy.launch.lab import Lab
from convoy.launch.links import Links
from convoy.outer.allocation.shares import apportion
from convoy.tracking import untracked
from convoy.trainer import run_training

SPEEDS = (0.7, 0.6)
IMAGES = 20_000
RATE_MBIT = 100.0
TARGET = 0.85
BATCHES = (128, 256)  # what the peers may choose from


def bench_slowlink(
    *, quick: bool, tell: Callable[[str], None], data_dir: Path | None = None
) -> Report:
    """Train all to the target over slow links, seed by seed."""
    missing = Links.available()
    if missing is not None:
        raise EnvironmentProblem("links cannot be emulated here", hint=missing)
    seeds, target = ((0,), 0.80) if quick else ((0, 1, 2), TARGET)
    found: dict[str, tuple[float, ...]] = {}
    with TemporaryDirectory() as folder:
        data = _cut_data(data_dir, Path(folder))
        load_data(_recipe(0, target, data, 128), untracked)  # the cache is warm from here
        for seed in seeds:
            for name, seconds in _round(seed, target, data, quick=quick).items():
                found[name] = (*found.get(name, ()), seconds)
                tell(f"seed {seed}: {name} {seconds:.1f} s to {target:.0%}")
    task = f"lenet5 on Fashion-MNIST to {target:.0%}, {RATE_MBIT:g} Mbit/s"
    rows = tuple(Row(task, name, "seconds", values) for name, values in found.items())
    bars = tuple(
        Bar(f"time of the service / time of {name}", median_ratio(found["server"], best), at_most=1)
        for name, best in (
            ("Lockstep at its best batch", _best(found, "lockstep")),
            ("DDP at its best batch", _best(found, "DDP")),
        )
    )
    return Report("slowlink", len(seeds), rows, bars)


def _cut_data(data_dir: Path | None, folder: Path) -> Path:
    """Write the first part of the training images, and all test images, to a file."""
    config = Config(data="fashion-mnist", data_dir=str(data_dir) if data_dir is not None else None)
    data = load_data(config, untracked)
    train, test = data.train, data.test
    target = folder / "fashion.npz"
    np.savez(
        target,
        x_train=train.images_NCHW[:IMAGES, 0].numpy(),
        y_train=train.labels[:IMAGES].numpy(),
        x_test=test.images_NCHW[:, 0].numpy(),
        y_test=test.labels.numpy(),
    )
    return target


def _round(seed: int, target: float, data: Path, *, quick: bool) -> dict[str, float]:
    times = {"server": _ours(_recipe(seed, target, data, 128), "server")}
    for batch in BATCHES[-1:] if quick else BATCHES:
        config = _recipe(seed, target, data, batch)
        times[f"lockstep, batch {batch}"] = _ours(config, "lockstep")
        with Lab(SPEEDS) as lab, Links([RATE_MBIT] * len(SPEEDS)) as links:
            curve = train_ddp(config, apportion([1.0] * len(SPEEDS), batch), lab, links)
        times[f"DDP, batch {batch}"] = time_to(target, curve, "DDP")
    return times


def _best(found: dict[str, tuple[float, ...]], system: str) -> tuple[float, ...]:
    """Return a peer's shorter time, seed by seed."""
    mine = [values for name, values in found.items() if name.startswith(system)]
    return tuple(min(values) for values in zip(*mine, strict=True))


def _recipe(seed: int, target: float, data: Path, batch: int) -> Config:
    own = {"data": str(data), "cache_dir": str(data.parent / "cache"), "batch": batch, "lr": 0.05}
    return recipe(seed, target, None).replaced(own)


def _ours(config: Config, strategy: str) -> float:
    with TemporaryDirectory() as folder:
        run = run_training(
            {
                **config.as_dict(),
                "strategy": strategy,
                "speeds": SPEEDS,
                "links": (RATE_MBIT,) * len(SPEEDS),
                "out": str(Path(folder) / "run"),
            }
        )
    curve = [(record.seconds, record.test_accuracy) for record in run.history]
    return time_to(config.target_accuracy, curve, strategy)
