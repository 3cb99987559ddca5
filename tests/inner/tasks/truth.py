"""Convolutions in float64, and how close ours must come to them."""

from typing import Any

import pytest
import torch
from torch import Tensor

LAST = torch.channels_last
NO_NORM = (None, None, None)  # before a convolution
_TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 6e-3}
BOTH_TYPES = pytest.mark.parametrize("dtype", list(_TOLERANCE), ids=str)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return random numbers; images lie channels last."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return made.contiguous(memory_format=LAST) if len(shape) == 4 else made


def assert_close(ours: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    """Compare by norms, as closely as numbers of a type allow."""
    assert ours.shape == truth.shape
    assert (ours.double() - truth).norm() <= _TOLERANCE[dtype] * truth.norm()


class Truth:
    """A convolution and its ways back in float64."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, pad: Any
    ) -> None:
        self._args = (list(stride), list(pad), [1, 1], False, [0, 0], 1)
        self._x, self._weight = x.double(), weight.double()
        self.y = torch.ops.aten.convolution(
            self._x, self._weight, None if bias is None else bias.double(), *self._args
        )

    def back(self, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the error and the gradients of filters and bias."""
        sizes = [dy.shape[1]]
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            dy.double(), self._x, self._weight, sizes, *self._args, [True, True, True]
        )
        return found


class Normed:
    """What a norm and a rectifier make of x, in float64."""

    def __init__(self, x: Tensor, *, affine: bool) -> None:
        channels = x.shape[1]
        weight, bias = (
            random(channels, dtype=torch.float32, seed=s) if affine else None for s in (3, 4)
        )
        mean = random(channels, dtype=torch.float64, seed=5)
        self.total = torch.stack([mean, torch.rand(channels).double() + 0.5])
        self.norm = (self.total, weight, bias)
        a, b = (torch.ones(channels), torch.zeros(channels))
        slope, shift, mean, scale = (
            t.double().view(1, -1, 1, 1)
            for t in (a if weight is None else weight, b if bias is None else bias, *self.total)
        )
        self.made = ((x.double() - mean) * scale * slope + shift).clamp_min(0)
