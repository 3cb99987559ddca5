"""How long until the network is good? Full Fashion-MNIST to 88 % on four unequal nodes.

The same recipe, seeds and nodes for both. For DDP only its steps count: reading data and
testing happen outside its clock. Ours counts all: steps, tests and checkpoints.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from convoy.bench.peers.ddp import train_ddp
from convoy.bench.report import Bar, Report, Row, median_ratio
from convoy.bench.unequal import SPEEDS
from convoy.config import Config
from convoy.data.load import load_data
from convoy.errors import ConvoyError
from convoy.launch.lab import Lab
from convoy.outer.allocation.shares import apportion
from convoy.tracking import untracked
from convoy.trainer import run_training

TARGET = 0.88


def bench_tta(*, quick: bool, tell: Callable[[str], None], data_dir: Path | None = None) -> Report:
    """Train both to the target, seed by seed."""
    seeds, target = ((0,), 0.82) if quick else ((0, 1, 2), TARGET)
    ours: tuple[float, ...] = ()
    theirs: tuple[float, ...] = ()
    for seed in seeds:
        config = recipe(seed, target, data_dir)
        load_data(config, untracked)  # so that the cache is warm, and a missing file is told now
        with Lab(SPEEDS) as lab:
            curve = train_ddp(config, apportion([1.0] * len(SPEEDS), config.batch), lab)
        theirs += (time_to(target, curve, "DDP"),)
        ours += (time_to(target, _our_curve(config), "lockstep"),)
        tell(f"seed {seed}: lockstep {ours[-1]:.1f} s, DDP {theirs[-1]:.1f} s to {target:.0%}")
    task = f"{config.model} on Fashion-MNIST to {target:.0%}"
    rows = (
        Row(task, "convoy lockstep", "seconds", ours),
        Row(task, "DDP, equal shares", "seconds", theirs),
    )
    bars = (Bar("time of lockstep / time of DDP", median_ratio(ours, theirs), at_most=0.5),)
    return Report("tta", len(seeds), rows, bars)


def recipe(seed: int, target: float, data_dir: Path | None) -> Config:
    """Return the run that both systems do."""
    return Config(
        data="fashion-mnist",
        data_dir=str(data_dir) if data_dir is not None else None,
        model="lenet5",
        batch=512,
        lr=0.1,
        epochs=20,
        warmup_epochs=0.5,
        precision="fp32",
        memory_format="channels_last",
        device="cpu",
        threads=1,
        target_accuracy=target,
        seed=seed,
    )


def _our_curve(config: Config) -> list[tuple[float, float]]:
    with TemporaryDirectory() as folder:
        options = {"speeds": SPEEDS, "strategy": "lockstep", "out": str(Path(folder) / "run")}
        run = run_training({**config.as_dict(), **options})
    return [(record.seconds, record.test_accuracy) for record in run.history]


def time_to(target: float, curve: list[tuple[float, float]], system: str) -> float:
    """Return the seconds after which a curve reaches a target."""
    for seconds, accuracy in curve:
        if accuracy >= target:
            return seconds
    best = max(accuracy for _, accuracy in curve)
    raise ConvoyError(f"{system} did not reach {target:.0%}; its best was {best:.2%}")
