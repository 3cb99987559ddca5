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
