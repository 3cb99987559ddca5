"""Before training: do tasks find what plain PyTorch finds, on a few random samples?

With bf16, rounding would hide a mistake: then the same network is compared in fp64.
"""

import copy
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from convoy.inner.arithmetic import Arithmetic
from convoy.inner.tasks.capture import CannotCaptureError

SAMPLES = 5
_TOLERANCE = {"fp64": 1e-8, "fp32": 2e-2, "bf16": 2e-1}  # on few samples, not of training


def twin_of(part: nn.Module, way: Arithmetic) -> tuple[nn.Module, Arithmetic]:
    """Return a copy to check with, and the arithmetic to do it in."""
    twin = copy.deepcopy(part)
    if way.precision == "bf16":
        way = replace(way, precision="fp64")
        way.place(twin)
    return twin, way


def random_samples(shape: Iterable[int], layout: torch.memory_format, dtype: torch.dtype) -> Tensor:
    """Return some random samples, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(SAMPLES, *shape, generator=generator).to(dtype)
    return found.to(memory_format=layout)


def check_same(ours: Iterable[Tensor], theirs: Iterable[Tensor], precision: str) -> None:
    """Refuse gradients that are not PyTorch's.

    Raises:
        CannotCaptureError: they differ.
    """
    a, b = (torch.cat([t.flatten().double() for t in found]) for found in (ours, theirs))
    if len(a) != len(b) or not (a - b).norm() <= _TOLERANCE[precision] * b.norm():
        raise CannotCaptureError("its gradients would differ from PyTorch's")
