"""What is butterfly mixing worth? One exchange per step against the sum of all gradients.

Both are hybrid runs on four nodes. Accuracy: LeNet-5 on Fashion-MNIST, several seeds. Speed:
AlexNet on images of CIFAR's shape, over loopback and behind links of 200 Mbit/s, where, by
the formulas, mixing sends two thirds of what the sum of all gradients does.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from convoy.bench.hybrid import Case, measure_ours
from convoy.bench.report import Bar, Report, Row, median_ratio
from convoy.bench.tta import recipe
from convoy.config import Config
from convoy.data.load import load_data
from convoy.errors import EnvironmentProblem
from convoy.launch.links import Links
from convoy.tracking import untracked
from convoy.trainer import run_training

EXACT, MIXED = "sum of all gradients", "butterfly mixing"
WAYS = {EXACT: False, MIXED: True}
NODES = 4
EPOCHS = 5


def bench_mixing(
    *, quick: bool, tell: Callable[[str], None], data_dir: Path | None = None
) -> Report:
    """Train and time both ways, in turn."""
    missing = Links.available()
    if missing is not None:
        raise EnvironmentProblem("links cannot be emulated here", hint=missing)
    seeds, rounds, steps = ((0,), 1, 4) if quick else ((0, 1, 2), 3, 8)
    accuracy = _accuracies(seeds, data_dir, tell, quick=quick)
    cases = [Case(NODES, 32, link) for link in ((True,) if quick else (False, True))]
    speeds = {case: _speeds(case, rounds, steps, tell) for case in cases}
    data = "fashion-mini" if quick else "Fashion-MNIST"
    rows = [
        Row(f"lenet5 on {data}, {NODES} nodes", way, "% right", values)
        for way, values in accuracy.items()
    ]
    rows += [
        Row(case.label, way, "steps/s", values)
        for case, found in speeds.items()
        for way, values in found.items()
    ]
    lost = statistics.fmean(accuracy[EXACT]) - statistics.fmean(accuracy[MIXED])
    bars = [Bar("points of accuracy that mixing loses", lost, at_most=1.0)]
    bars += [
        Bar(f"{case.label}: mixing / sum, steps/s", median_ratio(found[MIXED], found[EXACT]))
        for case, found in speeds.items()
    ]
    return Report("mixing", len(seeds), tuple(rows), tuple(bars))


def _accuracies(
    seeds: tuple[int, ...], data_dir: Path | None, tell: Callable[[str], None], *, quick: bool
) -> dict[str, tuple[float, ...]]:
    found: dict[str, tuple[float, ...]] = {}
    for seed in seeds:
        config = recipe(seed, 0.0, data_dir).replaced({"epochs": EPOCHS, "batch": 256})
        if quick:
            config = config.replaced({"data": "fashion-mini", "data_dir": None, "epochs": 2})
        load_data(config, untracked)  # so that a missing file is told now
        for way, mixing in WAYS.items():
            value = _train(config, mixing=mixing)
            found[way] = (*found.get(way, ()), value)
            tell(f"seed {seed}: {way} {value:.2f} %")
    return found


def _train(config: Config, *, mixing: bool) -> float:
    own = {"strategy": "hybrid", "nodes": NODES, "layers": "columns", "mixing": mixing}
    with TemporaryDirectory() as folder:
        run = run_training({**config.as_dict(), **own, "out": str(Path(folder) / "run")})
    return 100 * run.accuracy


def _speeds(
    case: Case, rounds: int, steps: int, tell: Callable[[str], None]
) -> dict[str, tuple[float, ...]]:
    found: dict[str, tuple[float, ...]] = {}
    for number in range(rounds):
        for way, mixing in WAYS.items():
            value = measure_ours(case, steps, mixing=mixing).steps_per_s
            found[way] = (*found.get(way, ()), value)
            tell(f"round {number + 1} of {rounds}, {case.label}: {way} {value:.3g} steps/s")
    return found
