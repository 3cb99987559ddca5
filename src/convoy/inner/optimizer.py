"""SGD, and its memory as named tensors that any other process can take over."""

import torch
from torch import Tensor, nn, optim

from convoy.config import Config
from convoy.errors import CheckpointError

_BUFFER = "momentum_buffer"


def make_optimizer(model: nn.Module, config: Config) -> optim.SGD:
    """Return SGD over a network's weights; the rate is set anew at each step."""
    return optim.SGD(
        model.parameters(),
        lr=config.lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
        weight_decay=config.weight_decay,
        fused=True,
    )


def momentum_tensors(optimizer: optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the momentum of each weight that has one, under the weight's name."""
    found = {}
    for name, parameter in model.named_parameters():
        buffer = optimizer.state.get(parameter, {}).get(_BUFFER)
        if buffer is not None:
            found[name] = buffer
    return found


def restore_momentum(
    optimizer: optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]
) -> None:
    """Put saved momentum back; a weight without any starts afresh."""
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for name, saved in tensors.items():
        parameter = parameters.get(name)
        if parameter is None or parameter.shape != saved.shape:
            raise CheckpointError(f"the checkpoint's optimizer does not fit the model at '{name}'")
        # empty_like keeps the weight's memory layout, so that the update stays one fast pass.
        buffer = torch.empty_like(parameter, memory_format=torch.preserve_format)
        optimizer.state[parameter][_BUFFER] = buffer.copy_(saved)


def hold_momentum(optimizer: optim.Optimizer, held: dict[Tensor, Tensor]) -> None:
    """Bring each weight's momentum to the place where it is held, whatever was put in its stead.

    A weight that has none starts from zero, which gives what SGD's first step gives.
    """
    empty, moved, values = [], [], []
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            if not parameter.requires_grad:
                continue
            found, place = optimizer.state[parameter].get(_BUFFER), held.get(parameter)
            if found is not None and found is place:
                continue
            if place is None:
                place = held[parameter] = torch.empty_like(parameter, requires_grad=False)
            if found is None:
                empty.append(place)
            else:
                moved.append(place)
                values.append(found)
            optimizer.state[parameter][_BUFFER] = place
    if empty:
        torch._foreach_zero_(empty)
    if moved:
        torch._foreach_copy_(moved, values)
