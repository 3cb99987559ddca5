"""Gradients of weights that come later are the same, and come only when they are asked for."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from convoy.models.zoo import build_model
from convoy.pipeline.postponed import Postponed


def block() -> nn.Sequential:
    """Return convolutions with and without biases, groups, strides, dilation and padding."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, groups=4, bias=False),
        nn.Conv2d(8, 6, (1, 3), dilation=2, padding=(0, 2)),
        nn.Conv2d(6, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
    )


def placed(net: nn.Module, dtype: torch.dtype, layout: torch.memory_format) -> nn.Module:
    return net.to(dtype).to(memory_format=layout)  # type: ignore[call-overload,no-any-return]


def backward(net: nn.Module, x: Tensor, postponed: Postponed | None) -> Tensor:
    """Return the gradient of the input; those of the weights are left where they are."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    if postponed is None:
        net(x).square().sum().backward()
    else:
        with postponed.watch():
            loss = net(x).square().sum()
        postponed.backward(loss, torch.ones_like(loss))
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", [block, lambda: build_model("resnet20", (3, 16, 16), 10, seed=0)])
def test_all_gradients_have_the_bits_and_the_layout_that_autograd_gives(
    make: Callable[[], nn.Module], dtype: torch.dtype, layout: torch.memory_format
) -> None:
    one, two = (placed(make(), dtype, layout) for _ in range(2))
    images = torch.randn(16, 3, 16, 16, dtype=dtype).to(memory_format=layout)
    postponed = Postponed()
    for _ in range(2):  # the second time they are added to the first ones
        expected, found = backward(one, images, None), backward(two, images, postponed)
        assert torch.equal(found, expected)
        postponed.compute()
    for (name, ours), theirs in zip(two.named_parameters(), one.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad), name
        assert ours.grad.stride() == theirs.grad.stride(), name


def test_only_what_the_stage_before_waits_for_is_computed_at_once() -> None:
    net, postponed = block(), Postponed()
    backward(net, torch.randn(2, 3, 16, 16), postponed)
    convolutions = [layer for layer in net if isinstance(layer, nn.Conv2d)]
    there = [layer.weight.grad is not None for layer in convolutions]
    assert there == [False, False, False, True, False]  # "same" is left to PyTorch
    assert net[1].weight.grad is not None
    postponed.compute()
    assert all(parameter.grad is not None for parameter in net.parameters())
    before = [
        parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None
    ]
    postponed.compute()  # there is nothing left
    assert all(
        torch.equal(parameter.grad, former)
        for parameter, former in zip(net.parameters(), before, strict=True)
        if parameter.grad is not None
    )


def test_activations_are_let_go_of() -> None:
    net, postponed = block(), Postponed()
    inputs: list[weakref.ref[Tensor]] = []
    net[3].register_forward_hook(lambda _, given, __: inputs.append(weakref.ref(given[0])))
    backward(net, torch.randn(2, 3, 16, 16), postponed)
    postponed.compute()
    gc.collect()
    assert [found() for found in inputs] == [None]


class Recomputing(nn.Module):
    """Keeps no activations: they are computed a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = block()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inside, x, use_reentrant=False)
        return found


class Standardised(nn.Conv2d):
    """Its weights are made of others."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(dim=(1, 2, 3), keepdim=True)
        return functional.conv2d(x, weight, self.bias)


def standardised() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Standardised(3, 4, 3), nn.Conv2d(4, 4, 3))


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), nn.Conv2d(4, 4, 3))


def half_frozen() -> nn.Module:
    net = block()
    net[0].weight.requires_grad_(False)
    net[4].bias.requires_grad_(False)
    return net


class Hooked(nn.Module):
    """Wants to see the gradients of its weights, and doubles them."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = block()
        self.seen: list[Tensor] = []
        first, second = (self.inside.get_parameter(name) for name in ("0.weight", "3.weight"))
        first.register_hook(lambda gradient: 2 * gradient)
        second.register_post_accumulate_grad_hook(self._see)

    def _see(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self.seen.append(weight.grad)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inside(x)
        return found


class Compiled(nn.Module):
    """A block that torch.compile has to look through."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
        self._fast = torch.compile(self.inside, backend="eager", fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self._fast(x)
        return found


class Mapped(nn.Module):
    """Goes over its samples by torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.func.vmap(self.inside)(x.unsqueeze(1)).squeeze(1)
        return found


class Inquiring(nn.Module):
    """Asks for gradients in its forward pass, and is trained by them too."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inside(x).square()
        weight = self.inside.get_parameter("0.weight")
        of_x, of_weight = torch.autograd.grad(y.sum(), [x, weight], create_graph=True)
        found: Tensor = y + of_x + 0.01 * of_weight.square().sum()
        return found


@pytest.mark.parametrize(
    "make", [Recomputing, standardised, normed, half_frozen, Hooked, Compiled, Mapped]
)
def test_networks_of_users(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    one = make()
    torch.manual_seed(0)
    two = make()
    two.load_state_dict(one.state_dict())
    images, postponed = torch.randn(4, 3, 16, 16), Postponed()
    expected, found = backward(one, images, None), backward(two, images, postponed)
    postponed.compute()
    assert torch.equal(found, expected)
    for (name, ours), theirs in zip(two.named_parameters(), one.named_parameters(), strict=True):
        grad = theirs[1].grad
        assert (ours.grad is None) == (grad is None), name
        assert grad is None or (ours.grad is not None and torch.equal(ours.grad, grad)), name


def test_a_network_that_asks_for_gradients_itself() -> None:
    torch.manual_seed(0)
    one, two = Inquiring().double(), Inquiring().double()
    two.load_state_dict(one.state_dict())
    images, postponed = torch.randn(4, 3, 8, 8, dtype=torch.float64), Postponed()
    expected, found = backward(one, images, None), backward(two, images, postponed)
    assert len(postponed) == 2  # those of the stage's own backward pass
    postponed.compute()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(two.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_autocast_is_left_alone() -> None:
    net, postponed = block(), Postponed()
    with torch.autocast("cpu", torch.bfloat16):
        backward(net, torch.randn(2, 3, 16, 16), postponed)
    assert all(parameter.grad is not None for parameter in net.parameters())


def test_an_image_by_itself_is_left_alone() -> None:
    net, postponed = nn.Conv2d(3, 4, 3), Postponed()
    backward(net, torch.randn(3, 8, 8), postponed)
    assert net.weight.grad is not None


def test_evaluation_leaves_nothing() -> None:
    net, postponed = block(), Postponed()
    with torch.no_grad(), postponed.watch():
        net(torch.randn(2, 3, 16, 16))
    postponed.compute()
    assert all(parameter.grad is None for parameter in net.parameters())
