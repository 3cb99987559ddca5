"""Batch-norm over a batch that is computed in groups, in torch's own operations.

Each group of samples finds its mean and the squared distances from it; those of all groups make
the statistics of the whole batch (Chan, Golub and LeVeque 1983), so that nothing depends on how
the batch was split:

    mean = sum n_g mean_g / n           squares = sum squares_g + sum n_g (mean_g - mean)^2
    y    = (x - mean) / sqrt(squares / n + eps) * weight + bias

Backward, with s = 1 / sqrt(squares / n + eps):

    dx = weight s (dy - sum(dy) / n - s^2 (x - mean) sum(dy (x - mean)) / n)

The two sums are over the whole batch, again added up group by group. The compiled form of the
same operations, one pass over memory each, is norms.cpp.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_SCHEMAS = (
    "norm_parts(Tensor x) -> Tensor",
    "norm_total(Tensor[] parts, int[] counts, Tensor(a!)? running_mean, Tensor(b!)? running_var, "
    "float momentum, float eps) -> Tensor",
    "norm_apply(Tensor x, Tensor total, Tensor? weight, Tensor? bias, Tensor? plus, bool relu) "
    "-> Tensor",
    "norm_back_parts(Tensor dy, Tensor x, Tensor total, Tensor? y) -> Tensor",
    "rectified_parts(Tensor dy, Tensor? more, Tensor y, Tensor x, Tensor total) "
    "-> (Tensor, Tensor)",
    "norm_back_total(Tensor[] parts, Tensor total, Tensor like) -> (Tensor, Tensor, Tensor)",
    "norm_back_apply(Tensor dy, Tensor x, Tensor total, Tensor sums, Tensor? weight, int count, "
    "Tensor? y) -> Tensor",
    "sum_parts(Tensor(a!) out, Tensor[] parts, int first) -> ()",
)


def norm_parts(x: Tensor) -> Tensor:
    """Return each channel's mean, and its squared distances from it added up."""
    rows = _rows(x)
    mean = rows.mean(0)
    return torch.stack([mean, (rows - mean).square().sum(0)])


def norm_total(
    parts: Sequence[Tensor],
    counts: Sequence[int],
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Return mean and 1 / deviation of the whole batch; move the running statistics."""
    n_g = torch.tensor(counts, dtype=torch.float64)[:, None]
    means, squares = torch.stack(list(parts)).unbind(1)
    n = sum(counts)
    mean = (n_g * means).sum(0) / n
    total = squares.sum(0) + (n_g * (means - mean).square()).sum(0)
    if running_mean is not None:
        running_mean.copy_((1 - momentum) * running_mean.double() + momentum * mean)
    if running_var is not None:
        spread = total / max(n - 1, 1)
        running_var.copy_((1 - momentum) * running_var.double() + momentum * spread)
    return torch.stack([mean, (total / n + eps).rsqrt()])


def norm_apply(
    x: Tensor,
    total: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    plus: Tensor | None,
    relu: bool,
) -> Tensor:
    """Return (x - mean) / deviation * weight + bias + plus, cut off at zero where asked for."""
    mean, scale = total
    slope = scale if weight is None else scale * weight.double()
    shift = -mean * slope if bias is None else bias.double() - mean * slope
    inner = _inner_type(x)
    y = x.to(inner) * _wide(slope.to(inner), x) + _wide(shift.to(inner), x)
    if plus is not None:
        y = y + plus
    return (y.clamp_min(0) if relu else y).to(x.dtype)


def norm_back_parts(dy: Tensor, x: Tensor, total: Tensor, y: Tensor | None) -> Tensor:
    """Return each channel's sum of what flows back, and of that times (x - mean)."""
    flow = _rows(_cut(dy, y))
    return torch.stack([flow.sum(0), (flow * (_rows(x) - total[0])).sum(0)])


def rectified_parts(
    dy: Tensor, more: Tensor | None, y: Tensor, x: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what gets through a norm's rectifier, and what `norm_back_parts` makes of it."""
    flow = _cut(dy if more is None else dy + more, y)
    return flow, norm_back_parts(flow, x, total, None)


def norm_back_total(
    parts: Sequence[Tensor], total: Tensor, like: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums over all groups, and from them the gradients of weight and bias."""
    sums = torch.stack(list(parts)).sum(0)
    return sums, (sums[1] * total[1]).to(like.dtype), sums[0].to(like.dtype)


def norm_back_apply(
    dy: Tensor,
    x: Tensor,
    total: Tensor,
    sums: Tensor,
    weight: Tensor | None,
    count: int,
    y: Tensor | None,
) -> Tensor:
    """Return what flows back to x."""
    mean, scale = total
    slope = scale if weight is None else scale * weight.double()
    pull = slope * scale * scale * sums[1] / count
    rest = pull * mean - slope * sums[0] / count
    inner = _inner_type(x)
    by_dy, by_x, constant = (_wide(part.to(inner), x) for part in (slope, -pull, rest))
    return (_cut(dy, y).to(inner) * by_dy + (x.to(inner) * by_x + constant)).to(x.dtype)


def sum_parts(out: Tensor, parts: Sequence[Tensor], first: int) -> None:
    """Add up what the groups found, in their order; as many rows as asked for, from one on."""
    inner = _inner_type(out)
    if out.ndim:
        parts = [part.narrow(0, first, len(out)) for part in parts]
    total = parts[0].to(inner, copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total)


def _rows(x: Tensor) -> Tensor:
    """Return a row of channels for each place of each sample, as doubles."""
    return x.double().movedim(1, -1).reshape(-1, x.shape[1])


def _wide(by_channel: Tensor, x: Tensor) -> Tensor:
    return by_channel.view(-1, *[1] * (x.ndim - 2))


def _inner_type(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _cut(dy: Tensor, y: Tensor | None) -> Tensor:
    """Return what gets through a rectifier on its way back."""
    return dy if y is None else torch.where(y <= 0, torch.zeros_like(dy), dy)


PORTABLE = {
    f"convoy::{function.__name__}": function
    for function in (
        norm_parts,
        norm_total,
        norm_apply,
        norm_back_parts,
        rectified_parts,
        norm_back_total,
        norm_back_apply,
        sum_parts,
    )
}

_library = torch.library.Library("convoy", "DEF")
for _schema in _SCHEMAS:
    _library.define(_schema)
OPS = torch.ops.convoy
