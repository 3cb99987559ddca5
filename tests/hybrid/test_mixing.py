"""Butterfly mixing of the weights that all nodes have."""

from typing import Any, cast

import torch
from torch import nn, optim

from convoy.collectives.allreduce import AllReduce
from convoy.hybrid.mixing import Mixing, is_power_of_two
from convoy.outer.membership import Group
from tests.hybrid.mailroom import MailWires, on_all

GRADIENTS = (1.0, 2.0, 3.0, 6.0)
MIXED = [  # vector B4: the weights after each mix
    (-1.5, -1.5, -4.5, -4.5),
    (-5.0, -7.0, -5.0, -7.0),
    (-7.5, -7.5, -10.5, -10.5),
    (-11.0, -13.0, -11.0, -13.0),
]


def test_vector_b4() -> None:
    def act(rank: int, wires: MailWires) -> list[float]:
        sums = AllReduce(wires, rank, 4, host=str(rank))  # no memory is shared: threads are hosts
        net = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(net.weight)
        optimizer = optim.SGD(net.parameters(), lr=1.0, momentum=0.0)
        mixing = Mixing(net, optimizer, cast(Group, _Sums(sums)), 4)
        weights = []
        for step in range(4):
            net.weight.grad = torch.full_like(net.weight, GRADIENTS[rank] / 4)  # of a batch of 4
            mixing.scale()
            optimizer.step()
            mixing.mix(step)
            weights.append(net.weight.item())
        mixing.settle()
        assert net.weight.item() == -12.0
        sums.close()
        return weights

    found, _ = on_all(4, act)
    assert list(zip(*found, strict=True)) == MIXED


class _Sums:
    """What mixing asks of a group."""

    def __init__(self, sums: AllReduce) -> None:
        self.sum, self.mix = sums.sum, sums.mix


def test_momentum_is_averaged_where_nodes_must_be_equal() -> None:
    def act(rank: int, wires: MailWires) -> Any:
        sums = AllReduce(wires, rank, 2, host=str(rank))
        net = nn.Linear(2, 1).double()
        optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        mixing = Mixing(net, optimizer, cast(Group, _Sums(sums)), 2)
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, rank + 1.0)
        optimizer.step()
        mixing.settle()
        sums.close()
        return [optimizer.state[p]["momentum_buffer"].unique().tolist() for p in net.parameters()]

    found, _ = on_all(2, act)
    assert found == [[[1.5], [1.5]]] * 2


def test_a_butterfly_has_a_partner_for_everyone() -> None:
    assert [n for n in range(1, 17) if is_power_of_two(n)] == [1, 2, 4, 8, 16]
