"""What blocks cost: counted as they are, and nothing is left behind."""

import gc
import weakref

import torch
from torch import Tensor, nn

from convoy.inner.arithmetic import Arithmetic
from convoy.models.blocks import walk_units
from convoy.models.zoo import build_model
from convoy.pipeline.costs import measure_blocks

_FP32 = Arithmetic(torch.device("cpu"), "fp32")


def test_what_a_block_sends_and_keeps_is_counted() -> None:
    model = build_model("vgg16", (3, 32, 32), 10, seed=0)
    costs = measure_blocks(model, (3, 32, 32), 4, _FP32, budget_s=0.0)
    assert [block.layers for block in costs.blocks] == [1] * 16
    assert costs.blocks[1].out_bytes == 4 * 64 * 16 * 16 * 4  # after pooling
    assert costs.blocks[-1].out_bytes == 4 * 10 * 4
    # conv2's input, its output after the activation, and where pooling found the largest (int64)
    assert costs.blocks[1].kept_bytes >= 4 * 64 * 32 * 32 * 4
    assert sum(block.weight_bytes for block in costs.blocks) == 4 * 15_245_130
    assert all(seconds > 0 for seconds in costs.seconds)


def test_the_network_is_left_as_it_was_and_no_graph_stays_alive() -> None:
    seen: list[weakref.ref[Tensor]] = []

    class Watched(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            seen.append(weakref.ref(y))
            return y

    model = nn.Sequential(
        Watched(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3)
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.eval()
    measure_blocks(model, (3, 8, 8), 2, _FP32, budget_s=0.0)
    gc.collect()
    assert not any(ref() is not None for ref in seen)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_blocks_that_are_alike_cost_the_same() -> None:
    model = build_model("resnet20", (3, 32, 32), 10, seed=0)
    costs = measure_blocks(model, (3, 32, 32), 4, _FP32, budget_s=0.0)
    likes = [s for b, s in zip(costs.blocks, costs.seconds, strict=True) if "group1" in b.name]
    assert len(likes) == 3
    assert len(set(likes)) == 1


def test_units_start_with_weights() -> None:
    model = build_model("alexnet", (3, 32, 32), 10, seed=0)
    names = [name for name, _ in walk_units(model)]
    assert names == ["conv1", "conv2", "conv3", "conv4", "conv5", "fc1", "fc2", "fc3"]
    x = torch.randn(2, 3, 32, 32)
    model.eval()
    y = x
    for _, unit in walk_units(model):
        y = unit(y)
    assert torch.equal(y, model(x))
