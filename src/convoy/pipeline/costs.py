"""What each block of a network costs here: time, what it sends on, what it keeps."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from convoy.inner.activations import count_kept
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.borrow import borrow
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
    images = torch.zeros(batch, *shape_chw, device=arithmetic.device, dtype=arithmetic.dtype)
    images = images.to(memory_format=arithmetic.memory_format)
    keys = torch.zeros(batch, dtype=torch.int64, device=arithmetic.device)
    with borrow(model), drop_by(keys):
        described = _describe(names, blocks, images, arithmetic)
        seconds = evened(described, _time(blocks, images, arithmetic, budget_s))
    return Costs(described, seconds)


def evened(blocks: Sequence[Block], seconds: Sequence[float]) -> tuple[float, ...]:
    """Return the times with the same for all blocks that are alike: the middle one of theirs.

    Deep networks repeat their blocks. There is time to run each a few times only, and one that
    seems to be slower than its likes would move a cut.

    >>> stem, block = Block("stem", 1, 8, 8, 4), Block("block", 2, 8, 16, 8)
    >>> evened([stem, block, block, block], [1.0, 2.0, 2.2, 9.0])
    (1.0, 2.2, 2.2, 2.2)
    """
    likes: dict[tuple[int, ...], list[float]] = {}
    kinds = [(b.layers, b.out_bytes, b.kept_bytes, b.weight_bytes) for b in blocks]
    for kind, found in zip(kinds, seconds, strict=True):
        likes.setdefault(kind, []).append(found)
    return tuple(statistics.median(likes[kind]) for kind in kinds)


def _describe(
    names: Sequence[str], blocks: Sequence[nn.Module], images: Tensor, arithmetic: Arithmetic
) -> tuple[Block, ...]:
    """Run the network once, and note what each block sends on and keeps."""
    found, x = [], images
    with count_kept(p for block in blocks for p in block.parameters()) as kept:
        for name, block in zip(names, blocks, strict=True):
            before = kept.num_bytes
            with arithmetic.autocast():
                x = block(x.detach().requires_grad_(x.is_floating_point()))
            weights = sum(p.nbytes for p in block.parameters())
            layers = count_weight_layers(block)
            found.append(Block(name, layers, x.nbytes, kept.num_bytes - before, weights))
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
