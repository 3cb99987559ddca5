"""The benchmarks by name."""

from collections.abc import Callable
from typing import Any, Protocol

from convoy.bench.report import Report
from convoy.registry import Entry, Registry


class Benchmark(Protocol):
    """Measures something beside its peers."""

    # One that trains on a named data set takes `data_dir` too, one of many tasks `only`.
    def __call__(self, *, quick: bool, tell: Callable[[str], None], **more: Any) -> Report:
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
        "unequal": Entry(
            "convoy.bench.unequal:bench_unequal",
            "lockstep on four unequal nodes against DDP, torchft, hivemind and the nodes' sum",
        ),
        "change": Entry(
            "convoy.bench.change:bench_change",
            "lockstep when a node becomes four times slower in mid-run, against the new sum",
        ),
        "tta": Entry(
            "convoy.bench.tta:bench_tta",
            "time to 88 % on Fashion-MNIST on four unequal nodes, lockstep against DDP",
        ),
        "lopsided": Entry(
            "convoy.bench.lopsided:bench_lopsided",
            "one fast node among very slow ones against the fast node alone",
        ),
        "bpt": Entry(
            "convoy.bench.bpt:bench_bpt",
            "BPT-CNN's own claims on four unequal nodes: IDPA or uniform, AGWU or SGWU",
        ),
        "slowlink": Entry(
            "convoy.bench.slowlink:bench_slowlink",
            "time to 85 % over links of 100 Mbit/s: parameter service, lockstep and DDP",
        ),
        "rules": Entry(
            "convoy.bench.rules:bench_rules",
            "what every update rule learns in the same time, in virtual time on a GPU",
        ),
        "monitor": Entry(
            "convoy.bench.monitor:bench_monitor",
            "what events and an open page cost training, with a reader that never reads",
        ),
        "gpu": Entry(
            "convoy.bench.gpu:bench_gpu",
            "a training step as one CUDA graph against eager PyTorch and torch.compile, on a GPU",
        ),
        "inner": Entry(
            "convoy.bench.inner:bench_inner",
            "a CPU step as tasks against PyTorch, eager and compiled, at its best threads",
        ),
        "pipeline": Entry(
            "convoy.bench.pipeline:bench_pipeline",
            "single-core stages against one core, torch's GPipe and 1F1B, and the cores' sum",
        ),
        "staleness": Entry(
            "convoy.bench.staleness:bench_staleness",
            "what stale weights cost in accuracy, at several depths: virtual pipelines on a GPU",
        ),
        "allreduce": Entry(
            "convoy.bench.allreduce:bench_allreduce",
            "our sums over the ranks of one machine against gloo's all-reduce, 4 KB to 64 MB",
        ),
        "hybrid": Entry(
            "convoy.bench.hybrid:bench_hybrid",
            "AlexNet with its fully connected layers cut over ranks, against DDP and DTensor",
        ),
        "mixing": Entry(
            "convoy.bench.mixing:bench_mixing",
            "butterfly mixing against the sum of all gradients: accuracy, and steps per second",
        ),
        "head": Entry(
            "convoy.bench.head:bench_head",
            "a classifier of 100,000 classes, cut over ranks: memory against DDP's",
        ),
        "service": Entry(
            "convoy.bench.service:bench_service",
            "an exchange with the parameter service against Ray's store, gloo and a socket",
        ),
    },
)
