"""Gradients of several nodes add up to what one node would have, however they are packed."""

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from convoy.config import Config
from convoy.data.batches import Batch
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.eager import EagerExecutor
from convoy.inner.graph import GraphExecutor
from convoy.inner.optimizer import make_optimizer
from convoy.outer.membership import Group, GroupLostError
from convoy.outer.reduction import Reduction
from tests.inner.tape import TapeRecorder

EXTRAS = 3
MIB = 1 << 20


class Table:
    """Where the members of a group, each in a thread, meet to add up."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=20)
        self._parts: list[Tensor] = [torch.empty(0)] * size

    def sum(self, rank: int, tensor: Tensor) -> None:
        self._parts[rank] = tensor.clone()
        self._barrier.wait()
        total = self._parts[0].clone()
        for part in self._parts[1:]:
            assert part.dtype == total.dtype
            assert part.shape == total.shape  # all are in the same order
            total += part
        self._barrier.wait()
        tensor.copy_(total)


class Member:
    """One node's place in such a group; it keeps what it sent."""

    def __init__(self, table: Table, rank: int) -> None:
        self._table = table
        self._rank = rank
        self.sent: list[tuple[int, torch.dtype]] = []
        self.expected = 0

    def expect(self, like: Tensor) -> None:
        self.expected = like.numel()

    def start_sum(self, tensor: Tensor) -> None:
        self.sum(tensor)

    def sum(self, tensor: Tensor) -> None:
        self.sent.append((tensor.numel(), tensor.dtype))
        self._table.sum(self._rank, tensor)

    def wait(self, work: object) -> None:
        assert work is None


class Net(nn.Module):
    """A network with a parameter that is never used and one that is used in one branch only."""

    def __init__(self, wide: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.first = nn.Linear(36, wide)
        self.branch = nn.Linear(36, wide)
        self.last = nn.Linear(wide, 3)
        self.unused = nn.Parameter(torch.ones(5))
        self.use_branch = False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x)).flatten(1)
        hidden = self.first(x) + (self.branch(x) if self.use_branch else 0)
        last: Tensor = self.last(torch.tanh(hidden))
        return last


def make_net(wide: int = 8, *, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(1)
    return Net(wide).to(dtype)


def make_batch(count: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(count, 2, 5, 5, generator=generator, dtype=torch.float64)
    return images.to(dtype), torch.randint(0, 3, (count,), generator=generator)


def backward(net: Net, images: Tensor, labels: Tensor, divisor: int) -> None:
    net.zero_grad(set_to_none=True)
    (functional.cross_entropy(net(images), labels, reduction="sum") / divisor).backward()


def together(
    nets: list[Net],
    shares: list[int],
    *,
    steps: int = 1,
    layouts: list[torch.memory_format] | None = None,
    **options: Any,
) -> tuple[list[Tensor], list[Member]]:
    """Let each net train its share; return the sums of the extra numbers, and the members."""
    table = Table(len(nets))
    members = [Member(table, rank) for rank in range(len(nets))]
    images, labels = make_batch(sum(shares), next(nets[0].parameters()).dtype)
    extras: list[Tensor] = [torch.empty(0)] * len(nets)
    formats = layouts or [torch.contiguous_format] * len(nets)
    reductions = []
    for net, layout in zip(nets, formats, strict=True):
        net.to(memory_format=layout)  # type: ignore[call-overload]
        reductions.append(Reduction(net, extras=EXTRAS, **options))
        reductions[-1].watch()

    def work(rank: int) -> None:
        start = sum(shares[:rank])
        span = slice(start, start + shares[rank])
        for _ in range(steps):
            reductions[rank].begin(cast(Group, members[rank]))
            if shares[rank]:
                backward(nets[rank], images[span], labels[span], sum(shares))
            else:
                nets[rank].zero_grad(set_to_none=True)
            own = torch.tensor([1.0, rank, 0.5], dtype=images.dtype)
            extras[rank] = reductions[rank].finish(own).clone()

    run_all([lambda r=rank: work(r) for rank in range(len(nets))])  # type: ignore[misc]
    for reduction in reductions:
        reduction.close()
    return extras, members


def run_all(calls: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def guarded(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors, errors


def alone(net: Net, count: int) -> dict[str, Tensor]:
    """Return the gradients of one node that trains it all; of an unused parameter, zero."""
    images, labels = make_batch(count, next(net.parameters()).dtype)
    backward(net, images, labels, count)
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in net.named_parameters()
    }


def assert_gradients(net: Net, expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("shares", [[5, 5], [7, 3], [1, 9], [4, 3, 3], [2, 0, 8]])
@pytest.mark.parametrize("same_layout", [True, False])
def test_gradients_of_unequal_shares_add_up_to_those_of_one_node(
    shares: list[int], same_layout: bool
) -> None:
    nets = [make_net() for _ in shares]
    extras, members = together(nets, shares, same_layout=same_layout)
    expected = alone(make_net(), sum(shares))
    for net in nets:
        assert_gradients(net, expected)
    ranks = len(shares)
    for found in extras:
        assert found.tolist() == [ranks, sum(range(ranks)), ranks / 2]
    assert len(members[0].sent) == 1  # a small network travels once, numbers included


def test_every_node_gets_the_same_bits() -> None:
    nets = [make_net(dtype=torch.float32) for _ in range(3)]
    together(nets, [4, 3, 3], steps=3)
    for parameters in zip(*(net.parameters() for net in nets), strict=True):
        assert all(torch.equal(p.grad, parameters[0].grad) for p in parameters)


def test_a_step_after_another_starts_afresh() -> None:
    nets = [make_net() for _ in range(2)]
    together(nets, [6, 4], steps=3)
    assert_gradients(nets[0], alone(make_net(), 10))


@pytest.mark.parametrize("steps", [1, 2])
def test_large_networks_travel_in_buckets_during_the_backward_pass(steps: int) -> None:
    wide = 40_000  # the last three layers have more than 4 MiB each
    nets = [make_net(wide) for _ in range(2)]
    _, members = together(nets, [6, 4], steps=steps, overlap=True)
    sizes = [numel for numel, _ in members[0].sent]
    assert len(sizes) >= 4 * steps
    assert [m.sent for m in members] == [members[0].sent] * 2
    assert sum(sizes) == steps * (sum(p.numel() for p in nets[0].parameters()) + EXTRAS)
    expected = alone(make_net(wide), 10)
    assert_gradients(nets[0], expected)
    assert_gradients(nets[1], expected)
    plain = [make_net(wide) for _ in range(2)]
    _, without = together(plain, [6, 4], steps=steps, overlap=False)
    assert len(without[0].sent) == steps
    for early, late in zip(nets[0].parameters(), plain[0].parameters(), strict=True):
        assert torch.equal(cast(Tensor, early.grad), cast(Tensor, late.grad))


def test_a_parameter_that_only_one_node_uses_reaches_the_others() -> None:
    nets = [make_net(40_000), make_net(40_000)]
    nets[1].use_branch = True  # its hooks fire on one node, and not on the other
    _, members = together(nets, [6, 4], overlap=True)
    assert members[0].sent == members[1].sent
    images, labels = make_batch(10)
    whole = make_net(40_000)
    backward(whole, images[:6], labels[:6], 10)
    first = {n: p.grad.clone() for n, p in whole.named_parameters() if p.grad is not None}
    whole.use_branch = True
    backward(whole, images[6:], labels[6:], 10)
    second = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    assert "branch.weight" in second
    assert "branch.weight" not in first
    for net in nets:
        for name, parameter in net.named_parameters():
            nothing = torch.zeros_like(parameter).detach()
            expected = first.get(name, nothing) + second.get(name, nothing)
            found = cast(Tensor, parameter.grad)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_members_with_other_layouts_add_up_element_by_element() -> None:
    nets = [make_net(), make_net()]
    layouts = [torch.contiguous_format, torch.channels_last]
    together(nets, [6, 4], layouts=layouts, same_layout=False)
    assert nets[1].conv.weight.stride() != nets[0].conv.weight.stride()
    expected = alone(make_net(), 10)
    for net in nets:
        assert_gradients(net, expected)
    gradient = cast(Tensor, nets[1].conv.weight.grad)
    assert gradient.stride() == nets[1].conv.weight.stride()  # as the optimizer wants it


def test_members_with_the_same_strange_layout_add_up_too() -> None:
    nets = [make_net(), make_net()]
    together(nets, [6, 4], layouts=[torch.channels_last] * 2, same_layout=True)
    assert_gradients(nets[0], alone(make_net(), 10))


@pytest.mark.parametrize("wide", [8, 40_000])
def test_rounded_gradients_travel_in_bf16_and_the_numbers_do_not(wide: int) -> None:
    nets = [make_net(wide, dtype=torch.float32) for _ in range(2)]
    extras, members = together(nets, [6, 4], wire=torch.bfloat16)
    kinds = [dtype for _, dtype in members[0].sent]
    assert kinds[-1] == torch.float32
    assert set(kinds[:-1]) == {torch.bfloat16}
    assert extras[0].tolist() == [2, 1, 1]
    expected = alone(make_net(wide, dtype=torch.float32), 10)
    difference = 0.0
    for name, parameter in nets[0].named_parameters():
        gradient = cast(Tensor, parameter.grad)
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, expected[name], rtol=0.05, atol=1e-3)
        difference = max(difference, (gradient - expected[name]).abs().max().item())
    assert difference > 0


def test_a_closed_reduction_notices_nothing_any_more() -> None:
    net = make_net(40_000)
    reduction = Reduction(net, extras=EXTRAS)
    assert reduction.overlaps
    reduction.watch()
    reduction.close()
    images, labels = make_batch(4)
    backward(net, images, labels, 4)  # would fail, for there is no group


def test_a_lost_member_reaches_the_caller() -> None:
    class Broken:
        def expect(self, like: Tensor) -> None:
            """Nothing comes."""

        def sum(self, tensor: Tensor) -> None:
            raise GroupLostError("a member was lost")

    net = make_net()
    reduction = Reduction(net, extras=EXTRAS)
    reduction.begin(cast(Group, Broken()))
    images, labels = make_batch(4)
    backward(net, images, labels, 4)
    with pytest.raises(GroupLostError):
        reduction.finish(torch.zeros(EXTRAS, dtype=torch.float64))


def test_gradients_of_a_replayed_step_are_all_sent_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("convoy.outer.reduction._BUCKET_BYTES", 1000)
    arithmetic = Arithmetic(torch.device("cpu"), "fp64")
    plain, recorded = make_net(), make_net()
    for net in (plain, recorded):
        del net.unused, net.branch  # SGD cannot start with weights that come later
    eager = EagerExecutor(plain, make_optimizer(plain, Config()), arithmetic)
    tapes = TapeRecorder()
    optimizer = make_optimizer(recorded, Config())
    graph = GraphExecutor(recorded, optimizer, arithmetic, make_recorder=lambda: tapes)
    member = Member(Table(1), 0)
    reduction = Reduction(recorded, extras=EXTRAS)
    reduction.watch()
    assert reduction.overlaps
    batch = Batch(*make_batch(10))
    for rate in (0.1, 0.2, 0.1, 0.3, 0.1):
        member.sent.clear()
        reduction.begin(cast(Group, member))
        graph.gradients(batch, 10)
        assert member.sent == []
        reduction.finish(torch.ones(EXTRAS, dtype=torch.float64))
        assert sum(count for count, _ in member.sent) == EXTRAS + sum(
            p.numel() for p in recorded.parameters()
        )
        graph.update(rate)
        eager.step(batch, 10, rate)
    reduction.close()
    assert [tape.replays for tape in tapes.tapes] == [4, 4]
    for mine, theirs in zip(recorded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
