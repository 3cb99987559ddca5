"""A network is the sequence of its blocks, and can be cut where the paper cuts it."""

from collections import OrderedDict
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn

from convoy.models.blocks import count_parameters, count_weight_layers, walk_blocks
from convoy.models.resnet import BasicBlock
from convoy.models.zoo import ZOO, build_model


def _shape(name: str) -> tuple[int, int, int]:
    return (1, 28, 28) if name == "lenet5" else (3, 32, 32)


@pytest.mark.parametrize("name", ZOO)
@torch.no_grad()
def test_running_the_blocks_one_after_the_other_equals_the_network(name: str) -> None:
    model = build_model(name, _shape(name), 10, seed=0).double().eval()
    images = torch.randn(
        2, *_shape(name), dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    x = images
    for _, block in walk_blocks(model):
        x = block(x)
    expected = model(images)
    assert torch.equal(x, expected)
    assert float(expected.std()) > 0


@pytest.mark.parametrize("name", ZOO)
def test_blocks_have_unique_names_that_find_them(name: str) -> None:
    with torch.device("meta"):
        model = ZOO[name](_shape(name), 10)
    blocks = list(walk_blocks(model))
    assert len({name for name, _ in blocks}) == len(blocks)
    assert all(model.get_submodule(name) is block for name, block in blocks)
    assert sum(count_parameters(block) for _, block in blocks) == count_parameters(model)


def _weights(module: nn.Module) -> int:
    layers = (m for m in module.modules() if isinstance(m, (nn.Conv2d, nn.Linear)))
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("name", "cut", "percentage"),
    [
        ("resnet20", 7, 5.31),
        ("resnet20", 13, 24.20),
        ("resnet20", 19, 99.76),
        ("resnet56", 19, 4.94),
        ("resnet110", 37, 4.85),
        ("resnet224", 75, 4.80),
        ("resnet362", 121, 4.79),
        ("vgg16", 2, 0.25),
        ("vgg16", 4, 1.71),
        ("vgg16", 7, 11.38),
        ("vgg16", 10, 50.08),
        ("lenet5", 1, 0.25),
        ("lenet5", 2, 4.17),
        ("lenet5", 3, 82.15),
        ("lenet5", 4, 98.62),
        ("alexnet", 1, 0.01),
        ("alexnet", 2, 0.48),
        ("alexnet", 3, 3.34),
        ("alexnet", 4, 7.14),
        ("alexnet", 5, 9.67),
    ],
)
def test_the_part_of_the_weights_before_a_cut_is_the_papers(
    name: str, cut: int, percentage: float
) -> None:
    with torch.device("meta"):
        model = ZOO[name](_shape(name), 10)
    blocks = [block for _, block in walk_blocks(model)]
    layers = list(accumulate(count_weight_layers(block) for block in blocks))
    weights = list(accumulate(_weights(block) for block in blocks))
    assert cut in layers  # the cut falls between two blocks
    before = weights[layers.index(cut)]
    assert 100 * before / weights[-1] == pytest.approx(percentage, abs=0.01)


def test_a_nested_sequence_is_walked_with_dotted_names() -> None:
    last = nn.Linear(3, 2)
    model = nn.Sequential(
        OrderedDict(
            body=nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.ReLU(), nn.Tanh())), head=last
        )
    )
    blocks = dict(walk_blocks(model))
    assert list(blocks) == ["body.0", "body.1.0", "body.1.1", "head"]
    assert blocks["head"] is last
    x = expected = torch.randn(5, 4)
    for block in blocks.values():
        x = block(x)
    assert torch.equal(x, model(expected))


def test_what_is_no_sequence_is_one_block() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = -self.fc(x)
            return result

    model = Own()
    assert list(walk_blocks(model)) == [("", model)]
    assert [name for name, _ in walk_blocks(nn.Sequential(model, nn.ReLU()))] == ["0", "1"]
    assert count_weight_layers(model) == 2


def test_only_trainable_parameters_are_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    assert count_parameters(model) == 8


def _silenced(block: BasicBlock) -> BasicBlock:
    """Make the residual zero, so that only the shortcut is left."""
    nn.init.zeros_(block.norm2.weight)
    nn.init.zeros_(block.norm2.bias)
    return block.eval()


def test_a_shortcut_within_a_group_is_the_identity() -> None:
    images = torch.rand(2, 16, 6, 6)
    assert torch.equal(_silenced(BasicBlock(16, 16, 1))(images), images)


@pytest.mark.parametrize("channels", [16, 32])
@pytest.mark.parametrize("side", [6, 7])
def test_a_shortcut_between_groups_is_option_a(channels: int, side: int) -> None:
    images = torch.rand(2, channels, side, side)
    made = _silenced(BasicBlock(channels, 2 * channels, 2))(images)
    half = channels // 2
    expected = torch.zeros(2, 2 * channels, (side + 1) // 2, (side + 1) // 2)
    expected[:, half : half + channels] = images[:, :, ::2, ::2]
    assert torch.equal(made, expected)


@pytest.mark.parametrize(("channels", "stride"), [(16, 1), (32, 2)])
def test_a_shortcut_has_no_weights(channels: int, stride: int) -> None:
    block = BasicBlock(16, channels, stride)
    convolutions = 9 * 16 * channels + 9 * channels * channels
    assert count_parameters(block) == convolutions + 4 * channels
    assert count_weight_layers(block) == 2


def test_a_module_used_twice_is_walked_twice() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(2, 2), relu, nn.Linear(2, 2), relu)
    assert [name for name, _ in walk_blocks(model)] == ["0", "1", "2", "3"]


class _Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = x + block(x)
        return x


def test_a_sequence_that_runs_in_its_own_way_is_one_block() -> None:
    model = nn.Sequential(_Residual(nn.Linear(2, 2), nn.ReLU()), nn.Linear(2, 2))
    assert [name for name, _ in walk_blocks(model)] == ["0", "1"]
    x = torch.randn(3, 2)
    y = x
    for _, block in walk_blocks(model):
        y = block(y)
    assert torch.equal(y, model(x))
