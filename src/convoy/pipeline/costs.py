"""What each block of a network costs here: time, what it sends on, what it keeps."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from convoy.inner.arithmetic import Arithmetic
from convoy.models.blocks import count_weight_layers, walk_units
from convoy.models.dropout import drop_by
from convoy.pipeline.partition import Block

_ROUNDS_AT_MOST = 20


@dataclass(frozen=True, slots=True)
class Costs:
    """A network's blocks, and the seconds that each takes on this worker."""

    blocks: tuple[Block, ...]
    seconds: tuple[float, ...]


def measure_blocks(
    model: nn.Module,
    shape_chw: tuple[int, ...],
    batch: int,
    arithmetic: Arithmetic,
    budget_s: float = 1.0,
) -> Costs:
    """Run each block forward and backward on a blank batch; the network is left as it was."""
    names, blocks = zip(*walk_units(model), strict=True)
    statistics = [(buffer, buffer.clone()) for buffer in model.buffers()]
    was_training = model.training
    model.train()
    images = torch.zeros(batch, *shape_chw, device=arithmetic.device, dtype=arithmetic.dtype)
    images = images.to(memory_format=arithmetic.memory_format)
    keys = torch.zeros(batch, dtype=torch.int64, device=arithmetic.device)
    try:
        with drop_by(keys):
            described = _describe(names, blocks, images, arithmetic)
            seconds = _time(blocks, images, arithmetic, budget_s)
    finally:
        for parameter in model.parameters():
            parameter.grad = None
        for buffer, former in statistics:
            buffer.copy_(former)
        model.train(was_training)
    return Costs(described, seconds)


def _describe(
    names: Sequence[str], blocks: Sequence[nn.Module], images: Tensor, arithmetic: Arithmetic
) -> tuple[Block, ...]:
    """Run the network once, and note what each block sends on and keeps."""
    ours = {p.untyped_storage().data_ptr() for block in blocks for p in block.parameters()}
    kept: dict[int, Tensor] = {}  # held, so that no other tensor comes to lie there
    found, x = [], images
    for name, block in zip(names, blocks, strict=True):
        before = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

        def note(tensor: Tensor) -> Tensor:
            where = tensor.untyped_storage().data_ptr()
            tensor = tensor.detach()  # with its graph it would keep the graph alive, for ever
            if where not in ours:
                kept.setdefault(where, tensor)
            return tensor

        noted = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
        with noted, arithmetic.autocast():
            x = block(x.detach().requires_grad_(x.is_floating_point()))
        after = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
        weights = sum(p.nbytes for p in block.parameters())
        found.append(Block(name, count_weight_layers(block), x.nbytes, after - before, weights))
    return tuple(found)


def _time(
    blocks: Sequence[nn.Module], images: Tensor, arithmetic: Arithmetic, budget_s: float
) -> tuple[float, ...]:
    """Return each block's part of the time that a batch takes.

    The parts are those of the shortest times: whatever disturbs, makes longer. The whole is the
    middle one of all rounds: a worker that has half a core is at full speed for moments.
    """
    _round(blocks, images, arithmetic)  # fills caches
    rounds: list[list[float]] = []
    started = time.perf_counter()
    while len(rounds) < _ROUNDS_AT_MOST and time.perf_counter() - started < budget_s:
        rounds.append(_round(blocks, images, arithmetic))
    rounds = rounds or [_round(blocks, images, arithmetic)]
    shortest = [min(times) for times in zip(*rounds, strict=True)]
    scale = statistics.median(sum(times) for times in rounds) / sum(shortest)
    return tuple(seconds * scale for seconds in shortest)


def _round(blocks: Sequence[nn.Module], images: Tensor, arithmetic: Arithmetic) -> list[float]:
    """Run through all blocks and back, as training does, and time each block's two parts."""
    on_gpu = images.device.type == "cuda"

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    passes, seconds = [], []
    x = images
    for number, block in enumerate(blocks):
        x = x.detach()
        if number:
            x.requires_grad_()
        started = now()
        with arithmetic.autocast():
            y = block(x)
        seconds.append(now() - started)
        passes.append((x, y))
        x = y
    gradient = torch.zeros_like(x)
    for number in range(len(blocks) - 1, -1, -1):
        x, y = passes.pop()
        started = now()
        if y.requires_grad:
            y.backward(gradient)
        seconds[number] += now() - started
        if number and x.grad is not None:
            gradient = x.grad
    return seconds
