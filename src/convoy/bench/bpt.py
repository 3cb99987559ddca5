"""The questions of BPT-CNN's own experiments, asked on four unequal nodes of this machine.

{IDPA, uniform allocation} x {SGWU, AGWU}, everything else equal: LeNet-5, samples streamed to
the nodes that were given them, one exchange for each pass over what a node holds. Speed-up by
cluster size, and what happens when nodes slow down at random, are asked too. Our own default
and Lockstep stand beside them.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from convoy.bench.report import Bar, Report, Row
from convoy.errors import ConvoyError
from convoy.launch.parameters.record import read_record
from convoy.trainer import run_training

SPEEDS = (0.8, 0.6, 0.4, 0.2)
EQUAL = (0.5, 0.5, 0.5, 0.5)
LEVELS = (0.6, 0.7, 0.75)
EPOCHS = 12
# Every few seconds another node is four times slower for a while: what IDPA cannot foresee.
STUMBLES = "1:0.2@4,1:0.8@7,2:0.15@8,2:0.6@11,3:0.1@12,3:0.4@15,1:0.2@16,1:0.8@19"
IDPA_AGWU, IDPA_SGWU = "IDPA + AGWU", "IDPA + SGWU"
UNIFORM_AGWU, UNIFORM_SGWU = "uniform + AGWU", "uniform + SGWU"
OURS, LOCKSTEP = "our default (beat)", "lockstep"


@dataclass(frozen=True)
class Outcome:
    """What one run gave."""

    summary: dict[str, Any]
    balance: float

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Return seconds and accuracy after each epoch."""
        return [(h["seconds"], h["test_accuracy"]) for h in self.summary["history"]]

    @property
    def accuracy(self) -> float:
        """Return the accuracy at the end, in per cent."""
        return 100 * float(self.summary["test_accuracy"])

    @property
    def seconds(self) -> float:
        """Return how long all epochs took."""
        return float(self.summary["seconds"])

    def reached(self, level: float) -> tuple[float, float] | None:
        """Return after how many seconds and epochs a level was reached, if it was."""
        places = enumerate(self.curve, start=1)
        return next(((s, float(epoch)) for epoch, (s, found) in places if found >= level), None)


def _options(name: str) -> dict[str, Any]:
    if name == LOCKSTEP:
        return {"strategy": "lockstep"}
    if name == OURS:
        return {"strategy": "server"}
    allocation, _, rule = name.partition(" + ")
    return {
        "strategy": rule.lower(),
        "holdings": "cumulative" if allocation == "IDPA" else "uniform",
        "stream_data": True,
        "local_batch": 32,
    }


def bench_bpt(*, quick: bool, tell: Callable[[str], None]) -> Report:
    """Run the grid, and answer claim by claim."""
    seeds = range(1) if quick else range(3)
    names = (IDPA_AGWU, UNIFORM_SGWU) if quick else (*_GRID, OURS, LOCKSTEP)
    epochs = 4 if quick else EPOCHS
    found: dict[tuple[str, str], list[Outcome]] = {}

    def add(kind: str, name: str, seed: int, **more: object) -> None:
        outcome = _run(name, seed, {"epochs": epochs, "speeds": SPEEDS, **more})
        found.setdefault((kind, name), []).append(outcome)
        tell(f"{kind}, {name}, seed {seed}: {outcome.accuracy:.1f} % in {outcome.seconds:.1f} s")

    for seed in seeds:
        for name in names:
            add("unequal", name, seed)
        for name in () if quick else _GRID:
            add("equal", name, seed, speeds=EQUAL)
            add("stumbling", name, seed, speed_changes=STUMBLES)
        for size in () if quick else (1, 2):
            add(_count(size), IDPA_AGWU, seed, speeds=SPEEDS[:size])
    return Report("bpt", len(seeds), tuple(_rows(found)), tuple(_bars(found)))


def _count(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"


_GRID = (IDPA_AGWU, IDPA_SGWU, UNIFORM_AGWU, UNIFORM_SGWU)


def _run(name: str, seed: int, more: dict[str, Any]) -> Outcome:
    with TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run = run_training(
            {
                "data": "fashion-mini",
                "model": "lenet5",
                "batch": 128,
                "lr": 0.05,
                "warmup_epochs": 0.5,
                "precision": "fp32",
                "memory_format": "contiguous",
                "device": "cpu",
                "threads": 1,
                "seed": seed,
                "out": str(out),
                "cache_dir": str(Path(folder) / "cache"),  # so that all samples travel
                **_options(name),
                **more,
            }
        )
        record = out / "record.jsonl"
        balance = balance_of(record) if record.exists() else float("nan")
        summary = json.loads(json.dumps(run.summary, default=str))
    return Outcome(summary, balance)


def balance_of(record: Path) -> float:
    """Return mean over max of the nodes' times, as the median over their iterations.

    Only the later half counts: in the first the data is still being handed out.
    """
    times: dict[int, list[float]] = {}
    for happening in read_record(record):
        if happening["event"] == "submit":
            times.setdefault(happening["node"], []).append(happening["report"]["busy_s"])
    count = min((len(mine) for mine in times.values()), default=0)
    if count < 2:
        raise ConvoyError("the record holds too few iterations to judge their balance")
    rounds = list(zip(*(mine[-(count // 2) :] for mine in times.values()), strict=False))
    parts = [statistics.fmean(part) / max(part) for part in rounds]
    return float(statistics.median(parts))


def _rows(found: dict[tuple[str, str], list[Outcome]]) -> list[Row]:
    rows = []
    for (kind, name), outcomes in found.items():
        parts: list[tuple[str, str, list[float]]] = [
            ("accuracy", "% right", [o.accuracy for o in outcomes]),
            ("all epochs", "seconds", [o.seconds for o in outcomes]),
            ("waiting", "% of time", [100 * o.summary["idle_fraction"] for o in outcomes]),
        ]
        if name in _GRID:
            parts += [
                ("balance", "mean / max", [o.balance for o in outcomes]),
                ("weights moved", "MB", [o.summary["weight_bytes"] / 1e6 for o in outcomes]),
                ("samples moved", "MB", [o.summary["sample_bytes"] / 1e6 for o in outcomes]),
                ("submissions", "count", [float(o.summary["submissions"]) for o in outcomes]),
            ]
        for level in LEVELS:
            reached = [found for found in (o.reached(level) for o in outcomes) if found]
            if len(reached) == len(outcomes):
                parts.append((f"to {level:.0%}", "seconds", [s for s, _ in reached]))
                parts.append((f"epochs to {level:.0%}", "epochs", [e for _, e in reached]))
        rows += [Row(f"{kind}: {what}", name, unit, tuple(v)) for what, unit, v in parts]
    for kind, size in ((_count(1), 1), (_count(2), 2), ("unequal", len(SPEEDS))):
        seconds = tuple(o.seconds for o in found.get((kind, IDPA_AGWU), ()))
        if seconds:
            rows.append(Row(f"cluster: {IDPA_AGWU}, all epochs", _count(size), "seconds", seconds))
    return rows


def _bars(found: dict[tuple[str, str], list[Outcome]]) -> list[Bar]:
    """Return the claims as ratios; a claim that does not hold is a bar that is missed."""

    def median(kind: str, name: str, value: Callable[[Outcome], float]) -> float:
        return statistics.median(value(o) for o in found[kind, name])

    def seconds(o: Outcome) -> float:
        return o.seconds

    def waiting(o: Outcome) -> float:
        return float(o.summary["idle_fraction"])

    first = median("unequal", UNIFORM_SGWU, seconds) / median("unequal", IDPA_AGWU, seconds)
    bars = [Bar("C1: speed-up of IDPA + AGWU over uniform + SGWU", first, at_least=1.0)]
    if ("unequal", IDPA_SGWU) not in found:
        return bars
    lost = median("unequal", UNIFORM_SGWU, lambda o: o.accuracy) - median(
        "unequal", IDPA_AGWU, lambda o: o.accuracy
    )
    two, one = (median(_count(n), IDPA_AGWU, seconds) for n in (2, 1))
    four = median("unequal", IDPA_AGWU, seconds)
    balance = [median("unequal", name, lambda o: o.balance) for name in (IDPA_AGWU, UNIFORM_AGWU)]
    return [
        *bars,
        Bar("C1: points of accuracy lost by it", lost, at_most=0.0),
        Bar("C4: speed-up of 4 nodes over 2", two / four, at_least=1.0),
        Bar("C4: speed-up of 2 nodes over 1", one / two, at_least=1.0),
        Bar(
            "C6: IDPA over uniform, SGWU",
            median("unequal", UNIFORM_SGWU, seconds) / median("unequal", IDPA_SGWU, seconds),
            at_least=1.0,
        ),
        Bar(
            "C6: AGWU over SGWU, IDPA",
            median("unequal", IDPA_SGWU, seconds) / four,
            at_least=1.0,
        ),
        Bar("C8: balance of IDPA / of uniform", balance[0] / balance[1], at_least=1.0),
        Bar("C9: waiting of AGWU, uniform", median("unequal", UNIFORM_AGWU, waiting), at_most=0.01),
    ]
