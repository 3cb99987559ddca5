"""The single-node benchmark: both loops do the same number of the same steps."""

import math
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from convoy.bench import single
from convoy.bench.single import Task, bench_single
from convoy.data.images import make_image_set


def test_both_loops_train_and_the_bar_is_their_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Task("lenet5", (1, 28, 28), batch=32, samples=128, slices=2)
    monkeypatch.setattr(single, "TASKS", (tiny,))
    report = bench_single(quick=True, tell=lambda _: None)
    systems = [row.system for row in report.rows]
    assert systems == ["bare PyTorch", "convoy", "convoy, varying images"]
    assert all(math.isfinite(row.median) and row.median > 0 for row in report.rows)
    (bar,) = report.bars
    ratios = [a / b for a, b in zip(report.rows[1].values, report.rows[0].values, strict=True)]
    assert bar.value == sorted(ratios)[1]
    assert bar.at_least == 0.97


def test_our_loop_really_learns_at_each_slice(tmp_path: Path) -> None:
    tiny = Task("lenet5", (1, 28, 28), batch=32, samples=128, slices=1)
    images = torch.zeros(128, 1, 28, 28, dtype=torch.uint8)
    part = make_image_set(images, torch.arange(128) % 10, None, "black")
    with ExitStack() as stack:
        job = single._make_job(tiny, part, tmp_path / "run", "none", stack)
        run = single._our_loop(job)
        before = [p.clone() for p in job.model.parameters()]
        run()
        run()
    assert job.progress.updates == 8
    assert not all(torch.equal(a, b) for a, b in zip(before, job.model.parameters(), strict=True))
