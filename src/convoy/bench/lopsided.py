"""Is one fast node ever held up by slow ones? It must be as fast as if it were alone.

On any machine: one node with a whole core beside three that are fifty times slower. On a
machine with a GPU also: the GPU as one node, and CPU nodes beside it. The peer is the same
fast node training alone, by Convoy's own loop for one node (see `convoy bench single`), in turn.
"""

from collections.abc import Callable

import torch

from convoy.bench.ours import Recording, record_lockstep, speed_between
from convoy.bench.peers import Task
from convoy.bench.report import Bar, Report, Row, median_ratio
from convoy.machine import usable_cores

_SPEEDS = (1.0, 0.02, 0.02, 0.02)
_ON_CPU = Task("resnet20", (3, 32, 32), 10, 128, (128,))
_ON_GPU = Task("resnet20", (3, 32, 32), 10, 512, (512,))


def bench_lopsided(*, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure the fast node alone and among slow ones, in turn."""
    repeats = 1 if quick else 3
    rows, bars = _compare(
        "1 core beside three of 0.02", _on_cpu, repeats, 20 if quick else 40, tell
    )
    if torch.cuda.is_available():
        more_rows, more_bars = _compare(
            f"{torch.cuda.get_device_name()} beside {_cpu_nodes()} CPU nodes",
            _on_gpu,
            repeats,
            400 if quick else 1500,
            tell,
        )
        rows, bars = [*rows, *more_rows], [*bars, *more_bars]
    return Report("lopsided", repeats, tuple(rows), tuple(bars))


def _compare(
    name: str,
    run: Callable[[int, bool], float],
    repeats: int,
    steps: int,
    tell: Callable[[str], None],
) -> tuple[list[Row], list[Bar]]:
    alone: tuple[float, ...] = ()
    among: tuple[float, ...] = ()
    for number in range(repeats):
        alone += (run(steps, True),)
        among += (run(steps, False),)
        tell(
            f"{name}, round {number + 1} of {repeats}: alone {alone[-1]:,.0f}, "
            f"among slow ones {among[-1]:,.0f} samples/s"
        )
    rows = [
        Row(name, "fast node alone", "samples/s", alone),
        Row(name, "convoy lockstep, all nodes", "samples/s", among),
    ]
    return rows, [Bar(f"{name}: lockstep / alone", median_ratio(among, alone), at_least=0.97)]


def _on_cpu(steps: int, alone: bool) -> float:
    speeds = _SPEEDS[:1] if alone else _SPEEDS
    return _second_half(record_lockstep(_ON_CPU, speeds, steps), steps)


def _on_gpu(steps: int, alone: bool) -> float:
    if alone:
        options = {"strategy": "single", "device": "cuda:0"}
    else:
        options = {"devices": ",".join(["cuda:0", *["cpu"] * _cpu_nodes()])}
    return _second_half(record_lockstep(_ON_GPU, (), steps, **options), steps)


def _cpu_nodes() -> int:
    return max(1, min(8, usable_cores() - 2))


def _second_half(recording: Recording, steps: int) -> float:
    return speed_between(recording, steps // 2, steps)
