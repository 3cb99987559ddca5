"""The benchmark of the hybrid strategy: its peer learns what one process does, its bars count."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from convoy.bench import hybrid
from convoy.bench.hybrid import (
    DDP,
    DTENSOR,
    FULL,
    OURS,
    QUICK,
    Case,
    Measured,
    Settings,
    Watch,
    bench_hybrid,
    find_settings,
    make_bars,
    parse_sent,
)
from convoy.bench.ours import Enough
from convoy.bench.peers import Task, ddp
from convoy.bench.peers.alone import Samples, make_model
from convoy.bench.peers.crew import Crew, Link
from convoy.bench.peers.dtensor import HybridNet, make_loop
from convoy.errors import EnvironmentProblem
from convoy.inner.optimizer import make_optimizer
from convoy.launch.links import Links
from convoy.monitor.events import JoinEvent, StepEvent

PATIENCE_S = 60.0
LOOPBACK, LINK = Case(2, 32, link=False), Case(2, 32, link=True)


# ---------------------------------------------------------------- torch's own hybrid


@pytest.mark.parametrize("settings", [(), (("static_graph", True),)], ids=["plain", "static graph"])
def test_the_peer_learns_what_one_process_learns(settings: Settings) -> None:
    task = Task("lenet5", (1, 28, 28), 10, 12, (6, 6), "contiguous", "fp64", ddp=settings)
    with ddp.open_store() as address:
        given = [(task, node, address) for node in range(task.num_nodes)]
        with Crew(_learn_three_steps, given) as crew:
            found = crew.receive(PATIENCE_S)
    expected = _learned_by_one_process(task)
    for gradients, weights in found:
        for told, right in zip((gradients, weights), expected, strict=True):
            torch.testing.assert_close(torch.tensor(told, dtype=torch.float64), right)


def _learn_three_steps(link: Link, task: Task, node: int, address: str) -> None:
    with ddp.group(address, node, task.num_nodes):
        net = HybridNet(task)
        loop = make_loop(task, node, net)
        for _ in range(3):
            loop.step()
        gradients = _flat([weight.grad for weight in net.parameters()])
        link.send((gradients.tolist(), _flat(list(net.parameters())).tolist()))


def _learned_by_one_process(task: Task) -> tuple[Tensor, Tensor]:
    model = make_model(task)
    optimizer = make_optimizer(model, task.config)
    parts = [Samples(task, node, share) for node, share in enumerate(task.equal_shares)]
    for _ in range(3):
        images, labels = map(torch.cat, zip(*(part.take() for part in parts), strict=True))
        optimizer.zero_grad()
        functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    gradients = _flat([weight.grad for weight in model.parameters()])
    assert gradients.abs().max() > 0
    return gradients, _flat(list(model.parameters()))


def _flat(tensors: Sequence[Tensor | None]) -> Tensor:
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    assert len(whole) == len(tensors)
    return torch.cat([tensor.detach().flatten() for tensor in whole])


# ---------------------------------------------------------------- what is measured


def test_every_case_is_in_the_full_plan() -> None:
    assert len(set(FULL.cases)) == 8
    assert {(case.ranks, case.each) for case in FULL.cases} == {
        (ranks, each) for ranks in (2, 4) for each in (32, 128)
    }
    slow = Case(4, 128, link=True)
    assert FULL.steps(slow, DDP) < FULL.steps(slow, OURS) == FULL.steps(slow, DTENSOR)
    assert FULL.steps(LOOPBACK, DDP) == FULL.steps(LOOPBACK, OURS) > 4


def test_all_systems_train_the_same() -> None:
    task = Case(4, 32, link=True).task((("bucket_cap_mb", 1),))
    assert (task.batch, task.equal_shares, task.precision) == (128, (32,) * 4, "fp32")
    assert dict(task.ddp) == {"init_sync": False, "bucket_cap_mb": 1}


def test_what_a_card_has_sent_is_read_from_the_kernel() -> None:
    text = (
        "Inter-|   Receive                          |  Transmit\n"
        " face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets\n"
        "    lo: 1000 10 0 0 0 0 0 0 2000 20 0 0 0 0 0 0\n"
        "  eth0:77 1 0 0 0 0 0 0 88 2 0 0 0 0 0 0\n"
    )
    assert parse_sent(text) == {"lo": 2000, "eth0": 88}
    assert hybrid.sent_so_far(LOOPBACK, []) >= 0


def test_steps_and_bytes_of_ours_are_those_between_two_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = iter([500, 1000, 3000])
    seen: list[Sequence[int]] = []

    def read(case: Case, pids: Sequence[int]) -> int:
        seen.append(pids)
        return next(sent)

    monkeypatch.setattr(hybrid, "sent_so_far", read)
    watch = Watch(case=LINK, last=12)
    for node, pid in enumerate((70, 80)):
        watch.receive(JoinEvent(node=node, name="", pid=pid, device="cpu", reason=""), 0.0)
    watch.receive(_step(1), 1.0)
    watch.receive(_step(2), 2.0)
    with pytest.raises(Enough):
        watch.receive(_step(12), 7.0)
    assert seen == [[70, 80]] * 3
    assert watch.measured(first=2) == Measured(steps_per_s=2.0, sent_bytes=100.0)


def _step(number: int) -> StepEvent:
    return StepEvent(
        epoch=1,
        step=number,
        steps=20,
        samples=0,
        loss=0.0,
        accuracy=0.0,
        samples_per_s=0.0,
        learning_rate=0.0,
    )


def _measured(system: str, case: Case, settings: Settings, steps: int) -> Measured:
    """Say what a quiet machine would give."""
    del steps
    bucket = dict(settings).get("bucket_cap_mb", 25)
    slow = 1.0 if bucket == 100 else 0.9
    speed = {DDP: 1.0 * slow, DTENSOR: 4.0, OURS: 5.0}[system]
    sent = {DDP: 100e6, DTENSOR: 12e6, OURS: 10e6}[system]
    return Measured(speed / case.ranks, sent)


def test_a_full_report_has_its_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "measure", _measured)
    told: list[str] = []
    report = bench_hybrid(quick=False, tell=told.append)
    assert len(report.rows) == 8 * 3 * 2
    assert all(len(row.values) == FULL.repeats for row in report.rows)
    assert len(report.bars) == 4 + 2 + 8
    assert all(bar.is_met for bar in report.bars)
    bars = {bar.name: bar for bar in report.bars}
    bytes_ = bars["alexnet, 4 ranks of 128, 200 Mbit/s: ours / DDP, bytes"]
    assert bytes_.value == pytest.approx(0.1)
    assert bytes_.at_most == 0.25
    steps = bars["alexnet, 2 ranks of 32, 200 Mbit/s: ours / DDP, steps/s"]
    assert steps.value == pytest.approx(5.0)
    assert steps.at_least == 3.0
    assert bars["alexnet, 2 ranks of 32, loopback: ours / DDP + DTensor, steps/s"].at_least == 1.0


def test_a_slower_run_misses_its_bars() -> None:
    values = {
        (LINK, DDP): [Measured(1.0, 100.0)],
        (LINK, DTENSOR): [Measured(3.0, 20.0)],
        (LINK, OURS): [Measured(2.9, 26.0)],
    }
    assert [bar.is_met for bar in make_bars(values)] == [False, False, False]


def test_ddp_gets_the_settings_that_it_is_fastest_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "measure", _measured)
    found = find_settings(FULL, lambda _: None)
    assert {key: dict(found[key])["bucket_cap_mb"] for key in [(2, DDP), (4, DDP)]} == {
        (2, DDP): 100,
        (4, DDP): 100,
    }
    assert find_settings(QUICK, lambda _: None) == {}


def test_without_links_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Links, "available", staticmethod(lambda: "no rights"))
    with pytest.raises(EnvironmentProblem, match="links cannot be emulated"):
        bench_hybrid(quick=True, tell=lambda _: None)


@pytest.mark.parametrize(("system", "steps"), [(DTENSOR, 2), (OURS, 60)])
def test_a_real_measurement_of_a_small_network(
    system: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "_MODEL", "lenet5")
    monkeypatch.setattr(hybrid, "_SHAPE", (1, 28, 28))
    monkeypatch.setattr(hybrid, "RATE_MBIT", 500.0)
    found = hybrid.measure(system, Case(2, 8, link=True), (), steps)
    assert found.steps_per_s > 0
    weights = 61_706 * 4
    assert 0.02 * weights < found.sent_bytes < 4 * weights
