"""How much of a network reads old weights: what the loss of accuracy follows."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from convoy.models.blocks import walk_units
from convoy.pipeline.partition import Bounds

_WEIGHT_LAYERS = (nn.Conv2d, nn.Linear)


def layer_weights(model: nn.Module) -> list[int]:
    """Count the numbers in each block's weight layers; batch-norm's are left out, as there."""
    return [
        sum(
            parameter.numel()
            for module in block.modules()
            if isinstance(module, _WEIGHT_LAYERS)
            for parameter in module.parameters(recurse=False)
        )
        for _, block in walk_units(model)
    ]


def stale_part(weights: Sequence[int], bounds: Bounds) -> float:
    """Return the part of all weights that lies in stages whose forwards run ahead.

    Those are all stages but the last.

    Args:
        weights: of each block.
        bounds: where the blocks are cut.

    >>> stale_part([10, 20, 70], (0, 1, 2, 3))
    0.3
    """
    *stale, current = (sum(weights[start:stop]) for start, stop in pairwise(bounds))
    return sum(stale) / (sum(stale) + current)
