"""The optimizer's memory can be carried to another process without changing a step."""

import pytest
import torch
from torch import Tensor, nn, optim

from convoy.config import Config
from convoy.errors import CheckpointError
from convoy.inner.optimizer import make_optimizer, momentum_tensors, restore_momentum

_CONFIG = Config(lr=0.1, momentum=0.9, weight_decay=1e-3)


def _model(memory_format: torch.memory_format = torch.contiguous_format) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2))
    moved: nn.Module = model.to(memory_format=memory_format)  # type: ignore[call-overload]
    return moved


def _step(model: nn.Module, optimizer: optim.Optimizer, seed: int) -> None:
    images = torch.randn(5, 2, 4, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(images).square().sum().backward()
    optimizer.step()


def _saved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def test_the_options_reach_the_optimizer() -> None:
    config = Config(lr=0.3, momentum=0.7, nesterov=False, weight_decay=0.02)
    (group,) = make_optimizer(_model(), config).param_groups
    names = ("lr", "momentum", "nesterov", "weight_decay")
    assert [group[name] for name in names] == [0.3, 0.7, False, 0.02]
    assert len(group["params"]) == 4


def test_there_is_no_momentum_before_the_first_step() -> None:
    model = _model()
    assert momentum_tensors(make_optimizer(model, _CONFIG), model) == {}


def test_momentum_goes_by_the_names_of_the_weights() -> None:
    model = _model()
    optimizer = make_optimizer(model, _CONFIG)
    _step(model, optimizer, 0)
    found = momentum_tensors(optimizer, model)
    assert list(found) == [name for name, _ in model.named_parameters()]
    assert all(found[name].shape == p.shape for name, p in model.named_parameters())


def test_without_momentum_there_is_nothing_to_save() -> None:
    model = _model()
    optimizer = make_optimizer(model, Config(momentum=0.0, nesterov=False))
    _step(model, optimizer, 0)
    assert momentum_tensors(optimizer, model) == {}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_restored_momentum_gives_the_very_same_next_steps(
    memory_format: torch.memory_format,
) -> None:
    model = _model(memory_format)
    optimizer = make_optimizer(model, _CONFIG)
    for seed in range(3):
        _step(model, optimizer, seed)
    weights, momentum = _saved(model.state_dict()), _saved(momentum_tensors(optimizer, model))

    twin = _model(memory_format)
    twin.load_state_dict(weights)
    restored, fresh = make_optimizer(twin, _CONFIG), _model(memory_format)
    restore_momentum(restored, twin, momentum)
    fresh.load_state_dict(weights)
    forgetful = make_optimizer(fresh, _CONFIG)
    for seed in (3, 4):
        _step(model, optimizer, seed)
        _step(twin, restored, seed)
        _step(fresh, forgetful, seed)
    expected = model.state_dict()
    assert all(torch.equal(expected[name], t) for name, t in twin.state_dict().items())
    assert not any(torch.equal(expected[name], t) for name, t in fresh.state_dict().items())


def test_restored_momentum_is_a_copy_in_the_layout_of_the_weight() -> None:
    model = _model(torch.channels_last)
    optimizer = make_optimizer(model, _CONFIG)
    saved = {name: torch.ones(p.shape) for name, p in model.named_parameters()}
    restore_momentum(optimizer, model, saved)
    held = momentum_tensors(optimizer, model)
    assert held["0.weight"].is_contiguous(memory_format=torch.channels_last)
    _step(model, optimizer, 0)
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in saved.values())


def test_a_weight_without_saved_momentum_starts_afresh() -> None:
    model = _model()
    optimizer = make_optimizer(model, _CONFIG)
    restore_momentum(optimizer, model, {"2.bias": torch.ones(2)})
    assert list(momentum_tensors(optimizer, model)) == ["2.bias"]


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("9.weight", torch.ones(2)), ("2.bias", torch.ones(3)), ("2.bias", torch.ones(1))],
)
def test_momentum_of_another_network_is_refused(name: str, tensor: Tensor) -> None:
    model = _model()
    with pytest.raises(CheckpointError, match=f"does not fit the model at '{name}'"):
        restore_momentum(make_optimizer(model, _CONFIG), model, {name: tensor})


def test_momentum_that_was_not_saved_is_forgotten() -> None:
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(model, Config())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    restore_momentum(optimizer, model, {})
    assert momentum_tensors(optimizer, model) == {}
