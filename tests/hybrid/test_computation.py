"""A network that is cut over nodes computes what one process computes on the whole batch."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from convoy.config import Config
from convoy.hybrid.allot import allot
from convoy.hybrid.computation import Computation, Marks
from convoy.hybrid.exchange import Exchange
from convoy.hybrid.head import find_parts, lay_out
from convoy.hybrid.layout import Dense, Kind, Setting, choose_kinds
from convoy.hybrid.passes import Scheme
from convoy.hybrid.split import Split
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.optimizer import make_optimizer
from convoy.models.dropout import drop_by, key_dropout
from convoy.models.zoo import build_model
from convoy.randomness import sample_keys
from tests.hybrid.mailroom import MailWires, on_all

FP64 = Arithmetic(torch.device("cpu"), "fp64")
CONFIG = Config(momentum=0.9, nesterov=True)
CLASSES = 7


def network(*, hidden: int = 12, dropout: bool = False, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    drop = [nn.Dropout(0.4)] if dropout else []
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        *drop,
        nn.Linear(4 * 3 * 3, hidden),
        *([nn.BatchNorm1d(hidden)] if norm else []),
        nn.ReLU(inplace=True),
        *drop,
        nn.Linear(hidden, 9, bias=not dropout),
        nn.Tanh(),
        nn.Linear(9, CLASSES),
    )
    return key_dropout(net).double()  # type: ignore[return-value]


def samples(
    count: int, shape: tuple[int, ...] = (1, 8, 8), classes: int = CLASSES
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, *shape, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, classes, (count,), generator=generator)
    return images, labels, sample_keys(0, 0, torch.arange(count))


class Node:
    """One node's part of a network, trained by hand."""

    def __init__(
        self,
        model: nn.Module,
        wires: MailWires,
        rank: int,
        size: int,
        kinds: Sequence[Kind],
        speeds: Sequence[float],
        **more: Any,
    ) -> None:
        self.model = model = copy.deepcopy(model)
        self.optimizer = make_optimizer(model, CONFIG)
        parts = find_parts(model)
        dense = [block for block in parts.blocks if isinstance(block, Dense)]
        widths = [allot(d.outputs, speeds, 8 * d.inputs, [1e9] * size) for d in dense]
        trunk, layers = lay_out(parts, kinds, widths, size)
        self.split = Split(layers, self.optimizer, rank)
        self.exchange = Exchange(wires, rank, size)
        self.computation = Computation(trunk, layers, self.split, self.exchange, FP64, **more)
        self.local = self.split.make_optimizers(self.computation.shared, CONFIG)

    def step(self, images: Tensor, labels: Tensor, keys: Tensor, counts: Sequence[int]) -> float:
        marks = Marks(tuple(counts), labels, keys)
        own = marks.own(self.exchange.rank)
        shared_optimizer, _ = self.local
        shared_optimizer.zero_grad(set_to_none=True)  # the others' gradients are written over
        given = images[own] if counts[self.exchange.rank] else None
        places = [cut.part.grad for cut in self.split.cuts]
        sums = self.computation.gradients(given, marks, len(labels), lambda: None)
        for cut, place in zip(self.split.cuts, places, strict=True):
            if place is not None and place.ndim > 1:
                assert cut.part.grad is place  # memory that is mapped anew costs more than the sum
        shared = list(self.computation.shared.parameters())
        flat = torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in shared]
        )
        every = self.exchange.gather(flat[None], [1] * self.exchange.size).sum(0)
        for p, part in zip(shared, every.split([p.numel() for p in shared]), strict=True):
            p.grad = part.view_as(p)
        self.loss = float(sums.loss)
        self.correct = int(sums.count_correct())
        for optimizer in self.local:
            optimizer.param_groups[0]["lr"] = 0.1
            optimizer.step()
        return self.loss


def by_hand(
    model: nn.Module, batch: tuple[Tensor, Tensor, Tensor], steps: int, smoothing: float = 0.0
) -> tuple[nn.Module, torch.optim.SGD, float]:
    model = copy.deepcopy(model).train()
    optimizer = make_optimizer(model, CONFIG)
    images, labels, keys = batch
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        with drop_by(keys):
            logits = model(images)
        loss = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
        (loss / len(labels)).backward()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
    return model, optimizer, float(loss.detach())


def assert_same(
    model: nn.Module,
    batch: tuple[Tensor, Tensor, Tensor],
    counts: Sequence[int],
    kinds: Sequence[Kind],
    *,
    speeds: Sequence[float] = (),
    steps: int = 3,
    smoothing: float = 0.0,
    scheme: Scheme = "all",
) -> None:
    expected, momentum, loss = by_hand(model, batch, steps, smoothing)
    size = len(counts)

    def act(rank: int, wires: MailWires) -> Node:
        node = Node(
            model,
            wires,
            rank,
            size,
            kinds,
            speeds or [1] * size,
            smoothing=smoothing,
            scheme=scheme,
        )
        for _ in range(steps):
            node.step(*batch, counts)
        node.split.collect(node.exchange, range(size))
        return node

    nodes, _ = on_all(size, act)
    assert sum(node.loss for node in nodes) == pytest.approx(loss, abs=1e-9)
    for node in nodes:
        for (name, found), whole in zip(
            node.model.named_parameters(), expected.parameters(), strict=True
        ):
            torch.testing.assert_close(found, whole, atol=1e-10, rtol=1e-10, msg=name)
            held = node.optimizer.state[found]["momentum_buffer"]
            right = momentum.state[whole]["momentum_buffer"]
            torch.testing.assert_close(held, right, atol=1e-10, rtol=1e-10, msg=name)


LAYOUTS: list[tuple[Kind, ...]] = [
    ("columns", "columns", "columns"),
    ("columns", "rows", "copy"),
    ("columns", "rows", "columns"),
    ("copy", "columns", "rows"),
    ("copy", "copy", "columns"),
]


@pytest.mark.parametrize("kinds", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("scheme", ["all", "turns", "slices"])
def test_every_layout_and_scheme_equals_one_process(
    kinds: tuple[Kind, ...], scheme: Scheme
) -> None:
    assert_same(network(), samples(13), (7, 1, 5), kinds, speeds=(3, 1, 2), scheme=scheme)


@pytest.mark.parametrize("scheme", ["all", "turns", "slices"])
@pytest.mark.parametrize("counts", [(5, 8), (13, 0), (3, 4, 0, 6)], ids=str)
def test_any_number_of_nodes_and_any_shares(counts: tuple[int, ...], scheme: Scheme) -> None:
    kinds: tuple[Kind, ...] = ("columns", "rows", "columns")
    assert_same(network(), samples(13), counts, kinds, scheme=scheme, smoothing=0.1)


@pytest.mark.parametrize("kinds", LAYOUTS, ids="-".join)
@pytest.mark.parametrize("scheme", ["all", "slices"])
def test_dropout_does_not_depend_on_who_computes_a_neuron(
    kinds: tuple[Kind, ...], scheme: Scheme
) -> None:
    assert_same(network(dropout=True), samples(12), (5, 7), kinds, scheme=scheme)


@pytest.mark.parametrize("name", ["lenet5", "alexnet", "vgg16"])
def test_the_zoo_with_the_layout_that_is_chosen(name: str) -> None:
    shape = (1, 28, 28) if name == "lenet5" else (3, 32, 32)
    model = build_model(name, shape, 10, seed=0).double()
    kinds = choose_kinds(find_parts(model).blocks, Setting(2, 6))
    assert "columns" in kinds
    assert_same(model, samples(6, shape, 10), (2, 4), kinds, steps=1)
