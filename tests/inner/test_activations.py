"""What a network keeps of a sample: counted as it is, and nothing is left behind."""

import torch
from torch import nn

from convoy.inner.activations import kept_of_a_sample
from convoy.inner.arithmetic import Arithmetic
from convoy.models.zoo import build_model

FP32 = Arithmetic(torch.device("cpu"), "fp32")


def test_inputs_and_outputs_are_counted_once_and_weights_not_at_all() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 5, 1))
    image, hidden = 3 * 8 * 8, 4 * 8 * 8  # relu's output is conv2's input; conv1's is not kept
    assert kept_of_a_sample(net, (3, 8, 8), FP32) == 4 * (image + hidden)


def test_the_network_is_left_as_it_was() -> None:
    net = build_model("resnet20", (3, 32, 32), 10, seed=0).eval()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    assert kept_of_a_sample(net, (3, 32, 32), FP32) > 500_000
    assert not net.training
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
