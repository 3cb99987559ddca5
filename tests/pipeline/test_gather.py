"""A network whose stages were trained by different nodes comes together unchanged."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from convoy.models.zoo import build_model
from convoy.pipeline.gather import gather
from convoy.pipeline.layout import lay_out

_PATIENCE_S = 30.0


class Table:
    """Adds up what several parties put on it, one tensor of each at a time."""

    def __init__(self, parties: int) -> None:
        self._barrier = threading.Barrier(parties, timeout=_PATIENCE_S)
        self._lying: list[Tensor | None] = [None] * parties
        self.sums = 0

    def seat(self, party: int) -> Callable[[Tensor], Tensor]:
        """Return what a party calls to add up."""

        def add_up(values: Tensor) -> Tensor:
            assert values.dim() == 1
            assert values.device.type == "cpu"
            self._lying[party] = values.clone()
            self._barrier.wait()
            found = [tensor for tensor in self._lying if tensor is not None]
            assert len({(tensor.dtype, tensor.shape) for tensor in found}) == 1
            total = found[0].clone()
            for tensor in found[1:]:
                total += tensor
            if self._barrier.wait() == 0:
                self.sums += 1
            self._barrier.wait()
            return values.copy_(total)  # in place, as a group does it

        return add_up


def _gather_everywhere(stages_of: list[list[list[Tensor]]], owners: list[int]) -> Table:
    """Let each party gather; its own stage is the one of the same place in `owners`."""
    table = Table(len(stages_of))
    failures: list[BaseException] = []

    def work(party: int) -> None:
        try:
            gather(stages_of[party], owners[party], table.seat(party))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(len(owners))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _PATIENCE_S)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    return table


def _tensors(net: nn.Module, bounds: tuple[int, ...]) -> list[list[Tensor]]:
    layout = lay_out(net, bounds)
    return [
        [
            *(p for block in layout.blocks_of(stage) for p in block.parameters()),
            *(b for block in layout.blocks_of(stage) for b in block.buffers()),
        ]
        for stage in range(layout.size)
    ]


def _fill(tensors: list[Tensor], party: int) -> None:
    """Give each number a value of the party's own."""
    generator = torch.Generator().manual_seed(party)
    with torch.no_grad():
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
            else:
                tensor.fill_(2**40 + party)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("bounds", [(0, 11), (0, 4, 11), (0, 1, 4, 7, 11)])
def test_everyone_gets_the_owners_tensors_bit_for_bit(
    bounds: tuple[int, ...], layout: torch.memory_format, dtype: torch.dtype
) -> None:
    size = len(bounds) - 1
    nets = [build_model("resnet20", (3, 32, 32), 10, seed=0).to(dtype) for _ in range(size)]
    nets = [net.to(memory_format=layout) for net in nets]  # type: ignore[call-overload]
    everything = [_tensors(net, bounds) for net in nets]
    for party, stages in enumerate(everything):
        for tensors in stages:
            _fill(tensors, party)
    kept = [[tensor.detach().clone() for tensor in everything[n][n]] for n in range(size)]
    where = [tensor.data_ptr() for stages in everything for part in stages for tensor in part]
    strides = [tensor.stride() for stages in everything for part in stages for tensor in part]
    table = _gather_everywhere(everything, list(range(size)))
    assert table.sums == 2  # one for the weights, one for the counters of batches
    for stages in everything:
        for found, expected in zip(stages, kept, strict=True):
            for ours, theirs in zip(found, expected, strict=True):
                assert ours.dtype == theirs.dtype
                assert torch.equal(ours, theirs)
    # The network's tensors are written over, not replaced: optimizers hold on to them.
    assert where == [t.data_ptr() for stages in everything for part in stages for t in part]
    assert strides == [t.stride() for stages in everything for part in stages for t in part]
    assert sum(map(len, everything[0])) == len(nets[0].state_dict())
    states = [net.state_dict() for net in nets]
    assert all(torch.equal(states[0][name], state[name]) for state in states for name in state)


def test_weights_that_are_trained_can_be_gathered_between_two_steps() -> None:
    nets = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)]
    _gather_everywhere([_tensors(net, (0, 1, 2)) for net in nets], [0, 1])
    for net in nets:
        net(torch.ones(1, 2)).sum().backward()
        assert all(p.requires_grad and p.grad is not None for p in net.parameters())


def test_numbers_that_are_none_or_endless_come_through() -> None:
    strange = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-40])
    stages = [[[strange.clone()], [torch.zeros(2)]], [[torch.ones(4)], [torch.zeros(2)]]]
    _gather_everywhere(stages, [0, 1])
    torch.testing.assert_close(stages[1][0][0], strange, equal_nan=True, rtol=0, atol=0)


def test_what_is_elsewhere_does_not_matter_however_broken() -> None:
    stages = [[[torch.ones(2)], [torch.full((2,), torch.nan)]], [[torch.full((2,), torch.inf)]]]
    stages[1].append([torch.full((2,), 3.0)])
    _gather_everywhere(stages, [0, 1])
    for found in stages:
        assert [part[0].tolist() for part in found] == [[1.0, 1.0], [3.0, 3.0]]


def test_owners_may_stand_in_any_order() -> None:
    stages = [
        [[torch.full((1,), float(10 * party + stage))] for stage in range(3)] for party in range(3)
    ]
    _gather_everywhere(stages, [2, 0, 1])
    for found in stages:
        assert [part[0].item() for part in found] == [10.0, 21.0, 2.0]


def test_a_stage_may_have_nothing() -> None:
    stages: list[list[list[Tensor]]] = [[[], [torch.zeros(1)]], [[], [torch.ones(1)]]]
    _gather_everywhere(stages, [0, 1])
    assert stages[0][1][0].item() == 1.0
