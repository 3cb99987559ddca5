"""The benchmark of a huge classifier, with small numbers: it learns the same, and takes less."""

import subprocess
import sys

import pytest
import torch

from convoy.bench import head
from convoy.bench.head import (
    DDP,
    FEATURES,
    OURS,
    Found,
    Plan,
    Sizes,
    bench_head,
    class_weights,
    limit_bars,
    loss_bars,
    make_samples,
    measure,
    memory_bars,
)
from convoy.bench.peers.crew import Crew, Link
from convoy.errors import ConvoyError

SMALL = Sizes(classes=3_001, batch=12, steps=2)
PATIENCE_S = 60.0


def test_weights_of_a_class_do_not_depend_on_who_makes_them() -> None:
    whole = class_weights(0, 2500)
    assert whole.shape == (2500, FEATURES)
    for first, stop in [(0, 1), (999, 1001), (700, 2500), (1000, 2000), (5, 5)]:
        assert torch.equal(class_weights(first, stop), whole[first:stop])
    assert whole.unique(dim=0).shape == whole.shape


def test_ranks_have_the_samples_of_the_whole_batch() -> None:
    images, labels = make_samples(SMALL, 0, 1)
    parts = [make_samples(SMALL, rank, 4) for rank in range(4)]
    assert torch.equal(torch.cat([part[0] for part in parts]), images)
    assert torch.equal(torch.cat([part[1] for part in parts]), labels)
    assert len(labels.unique()) == SMALL.batch


def test_all_systems_learn_the_same_from_the_same_start() -> None:
    told = {
        (system, ranks): [measure(system, SMALL, ranks)] for system, ranks in [(DDP, 2), (OURS, 3)]
    }
    assert all(len(found[0]) == ranks for (_, ranks), found in told.items())
    assert all(bar.is_met for bar in loss_bars(told))
    losses = told[OURS, 3][0][0].losses
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    for found in told.values():
        assert all(one.steps_per_s > 0 and one.peak_bytes > 0 for one in found[0])


def test_two_ranks_have_room_for_what_is_too_large_for_data_parallel() -> None:
    # Far beyond what threads take: 90 MB of weights, of which there is room for nearly three.
    sizes = Sizes(classes=44_000, batch=4, steps=1)
    limit = round(sizes.head_bytes * 2.9)
    told: list[str] = []
    assert head.trains_within(OURS, sizes, 2, limit, told.append)
    assert not head.trains_within(DDP, sizes, 2, limit, told.append)
    assert "convoy hybrid trains" in told[0]
    assert "DDP is out of memory: can't allocate memory" in told[1]


def test_another_failure_is_not_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[Found]:
        raise ConvoyError("node 0 failed: the disk is on fire")

    monkeypatch.setattr(head, "measure", fail)
    with pytest.raises(ConvoyError, match="on fire"):
        head.trains_within(OURS, SMALL, 2, 1, lambda _: None)


def _touch_memory(link: Link) -> None:
    before = head.read_status("VmRSS")
    block = torch.ones(10_000_000)
    peak = head.read_status("VmHWM")
    del block
    head.reset_peak()
    link.send((peak - before, head.read_status("VmHWM") - before))


def test_a_peak_is_seen_and_forgotten() -> None:
    with Crew(_touch_memory, [()]) as crew:
        ((peak, later),) = crew.receive(PATIENCE_S)
    assert 40_000_000 <= peak < 60_000_000
    assert later < 30_000_000


# ---------------------------------------------------------------- the report


def _found(steady: int, losses: tuple[float, ...] = (8.0, 7.0), speed: float = 2.0) -> Found:
    return Found(losses, speed, steady + 100, steady)


def test_what_is_not_the_heads_is_taken_off() -> None:
    huge = {
        (DDP, 2): [[_found(1100), _found(1050)]],
        (OURS, 2): [[_found(640), _found(600)]],
    }
    small = {key: [[_found(100), _found(90)]] for key in huge}
    (bar,) = memory_bars(huge, small)
    assert bar.value == pytest.approx(0.54)
    assert bar.at_most == 0.6
    assert bar.is_met


def test_losses_are_compared_step_by_step_over_all_ranks() -> None:
    told = {
        (DDP, 1): [[_found(1, (8.0, 4.0))]],
        (OURS, 2): [[_found(1, (3.0, 1.0)), _found(1, (5.0, 2.999))]],
    }
    first, all_steps = loss_bars(told)
    assert first.value == 0
    assert all_steps.value == pytest.approx(0.001 / 4)


def test_the_limit_is_for_both() -> None:
    assert all(bar.is_met for bar in limit_bars({OURS: True, DDP: False}, 10**6))
    assert not any(bar.is_met for bar in limit_bars({OURS: False, DDP: True}, 10**6))


def test_a_report_has_memory_and_speed_of_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    def pretend(system: str, sizes: Sizes, ranks: int, limit: int | None = None) -> list[Found]:
        if limit is not None and system == DDP:
            raise ConvoyError("DefaultCPUAllocator: can't allocate memory: you tried. Buy more")
        copies = 3 if system == DDP else 3 / ranks
        return [_found(round(sizes.head_bytes * copies), (8 / ranks, 7 / ranks))] * ranks

    monkeypatch.setattr(head, "measure", pretend)
    monkeypatch.setattr(head, "FULL", Plan(SMALL, Sizes(10, 12, 2), (1, 2, 4), repeats=2))
    report = bench_head(quick=False, tell=lambda _: None)
    assert len(report.rows) == 2 * 3 * 3
    assert all(len(row.values) == 2 for row in report.rows)
    assert len(report.bars) == 3 + 2 + 2
    assert all(bar.is_met for bar in report.bars)


def test_the_bench_needs_no_torch_to_be_listed() -> None:
    code = "import sys; import convoy.bench.catalog; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
