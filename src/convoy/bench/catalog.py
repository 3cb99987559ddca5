"""The benchmarks by name."""

from collections.abc import Callable
from typing import Protocol

from convoy.bench.report import Report
from convoy.registry import Entry, Registry


class Benchmark(Protocol):
    """Measures something beside its peers."""

    def __call__(self, *, quick: bool, tell: Callable[[str], None]) -> Report:
        """Measure; `quick` gives a rough answer within 50 seconds on two cores."""
        ...


BENCHMARKS: Registry[Benchmark] = Registry(
    "benchmark",
    {
        "single": Entry(
            "convoy.bench.single:bench_single",
            "our training loop on one node against a bare, hand-written PyTorch loop",
        ),
        "loading": Entry(
            "convoy.bench.loading:bench_loading",
            "our batches of varied images against torch's DataLoader, on one core",
        ),
    },
)
