"""Bring a network together whose stages were trained by different nodes.

Every tensor has one owner. All others add zeros to it, so that one sum over all nodes gives
everyone everything, unchanged.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Sum = Callable[[Tensor], Tensor]


def gather(stages: Sequence[Sequence[Tensor]], own: int, add_up: Sum) -> None:
    """Overwrite the tensors of all other stages with those of their owners.

    Args:
        stages: the tensors of each stage, the same everywhere.
        own: the stage that was trained here.
        add_up: adds a tensor up over all nodes.
    """
    tensors = [(stage, tensor) for stage, found in enumerate(stages) for tensor in found]
    for dtype in sorted({tensor.dtype for _, tensor in tensors}, key=str):
        alike = [(stage, tensor) for stage, tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat(
            [
                (tensor if stage == own else torch.zeros_like(tensor)).detach().flatten().cpu()
                for stage, tensor in alike
            ]
        )
        parts = add_up(flat).split([tensor.numel() for _, tensor in alike])
        for (_, tensor), part in zip(alike, parts, strict=True):
            tensor.data.copy_(part.view(tensor.shape))
