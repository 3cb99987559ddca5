"""Batch-norm by groups is torch's batch-norm, compiled and portable."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from convoy.data.batches import Batch
from convoy.inner.tasks.engine import load_engine
from convoy.inner.tasks.norms import PORTABLE
from convoy.inner.tasks.step import Grain, group_sizes
from tests.inner.tasks.nets import chain, gradients_of, make_batch, make_twins

EPS, MOMENTUM = 1e-5, 0.3


class Ops:
    """The operations of one kind by their names."""

    def __init__(self, compiled: bool) -> None:
        self._compiled = compiled
        if compiled:
            load_engine()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.ops.convoy, name) if self._compiled else PORTABLE[f"convoy::{name}"]


@pytest.fixture(params=[True, False], ids=["compiled", "portable"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return Ops(request.param)


def _input(shape: Sequence[int], layout: str, dtype: torch.dtype = torch.float64) -> Tensor:
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x = (x * 2 + 1).to(dtype)
    if layout == "channels_last":
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "strided":
        return torch.stack([x, x], -1)[..., 0]
    return x


def _forward(
    ops: Ops,
    parts: Sequence[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor | None, Tensor | None] = (None, None),
    *,
    relu: bool = False,
) -> tuple[list[Tensor], Tensor]:
    counts = [x.numel() // x.shape[1] for x in parts]
    found = [ops.norm_parts(x) for x in parts]
    total = ops.norm_total(found, counts, *running, MOMENTUM, EPS)
    return [ops.norm_apply(x, total, weight, bias, None, relu) for x in parts], total


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((11, 5, 4, 3), "contiguous"),
        ((11, 5, 4, 3), "channels_last"),
        ((11, 5, 4, 3), "strided"),
        ((7, 33, 5, 5), "channels_last"),
        ((6, 1, 3, 3), "contiguous"),
        ((11, 19), "contiguous"),
        ((5, 6, 1, 1), "contiguous"),
        ((5, 6, 40), "contiguous"),
        ((5, 3, 2, 3, 4), "contiguous"),
    ],
)
def test_forward_and_backward_are_those_of_torch(
    ops: Ops, shape: tuple[int, ...], layout: str, affine: bool, relu: bool
) -> None:
    x = _input(shape, layout).requires_grad_()
    channels = shape[1]
    weight = torch.linspace(-1, 2, channels).double().requires_grad_() if affine else None
    bias = torch.linspace(1, -1, channels).double().requires_grad_() if affine else None
    means = [torch.linspace(0, 1, channels).double() for _ in range(2)]
    spreads = [torch.linspace(1, 2, channels).double() for _ in range(2)]
    y = functional.batch_norm(
        x, means[0], spreads[0], weight, bias, training=True, momentum=MOMENTUM, eps=EPS
    )
    y = torch.relu(y) if relu else y
    dy = _input(shape, layout).cos()
    y.backward(dy)

    sizes = group_sizes(shape[0], 3)
    with torch.no_grad():
        parts, pulls = x.detach().split(sizes), dy.split(sizes)
        ours, total = _forward(ops, parts, weight, bias, (means[1], spreads[1]), relu=relu)
        assert torch.allclose(torch.cat(ours), y, rtol=1e-11, atol=1e-11)
        assert torch.allclose(means[1], means[0], rtol=1e-12, atol=1e-12)
        assert torch.allclose(spreads[1], spreads[0], rtol=1e-12, atol=1e-12)
        cuts = ours if relu else [None] * len(parts)
        back = [
            ops.norm_back_parts(d, p, total, c) for d, p, c in zip(pulls, parts, cuts, strict=True)
        ]
        sums, d_weight, d_bias = ops.norm_back_total(back, total, x)
        count = x.numel() // channels
        dx = [
            ops.norm_back_apply(d, p, total, sums, weight, count, c)
            for d, p, c in zip(pulls, parts, cuts, strict=True)
        ]
    assert x.grad is not None
    assert torch.allclose(torch.cat(dx), x.grad, rtol=1e-9, atol=1e-10)
    if weight is not None and bias is not None:
        assert weight.grad is not None
        assert bias.grad is not None
        assert torch.allclose(d_weight, weight.grad, rtol=1e-10, atol=1e-10)
        assert torch.allclose(d_bias, bias.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_shortcut_is_added_before_the_rectifier(ops: Ops, layout: str) -> None:
    x, plus = _input((6, 5, 4, 4), layout), _input((6, 5, 4, 4), "contiguous").sin() * 2
    total = ops.norm_total([ops.norm_parts(x)], [96], None, None, MOMENTUM, EPS)
    expected = functional.batch_norm(x, None, None, training=True, eps=EPS) + plus
    for relu in (False, True):
        ours = ops.norm_apply(x, total, None, None, plus, relu)
        wanted = expected.clamp_min(0) if relu else expected
        assert torch.allclose(ours, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_large_mean_costs_no_more_digits_than_with_torch(ops: Ops, layout: str) -> None:
    exact = _input((64, 8, 16, 16), layout) * 0.01 + 100
    x = exact.float()
    truth = functional.batch_norm(x.double(), None, None, training=True, eps=EPS)
    plain = functional.batch_norm(x, None, None, training=True, eps=EPS)
    ours, total = _forward(ops, x.split([30, 34]), None, None)
    spread = x.double().var((0, 2, 3), unbiased=False)
    assert torch.allclose(total[1], (spread + EPS).rsqrt(), rtol=1e-5)
    error, usual = ((y.double() - truth).abs().max() for y in (torch.cat(ours), plain))
    assert error <= 3 * usual + 1e-6


def test_groups_do_not_change_the_statistics(ops: Ops) -> None:
    x = _input((30, 4, 5, 5), "contiguous")
    _, whole = _forward(ops, [x], None, None)
    for sizes in ([1] * 30, [29, 1], [7, 7, 16]):
        _, total = _forward(ops, x.split(sizes), None, None)
        assert torch.allclose(total, whole, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_inputs_keep_their_type(ops: Ops, dtype: torch.dtype) -> None:
    x = _input((8, 5, 4, 4), "channels_last", dtype)
    weight, bias = torch.ones(5), torch.zeros(5)
    (ours,), total = _forward(ops, [x], weight, bias)
    plain = functional.batch_norm(x.double(), None, None, training=True, eps=EPS)
    assert ours.dtype == dtype
    assert ours.is_contiguous(memory_format=torch.channels_last)
    assert (ours.double() - plain).abs().max() < (0.02 if dtype == torch.bfloat16 else 1e-5)
    sums, d_weight, d_bias = ops.norm_back_total(
        [ops.norm_back_parts(x, x, total, None)], total, weight
    )
    assert (d_weight.dtype, d_bias.dtype) == (torch.float32, torch.float32)
    assert ops.norm_back_apply(x, x, total, sums, weight, 128, None).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_parts_are_added_up_in_their_order(ops: Ops, dtype: torch.dtype) -> None:
    parts = [torch.full((3, 70), value, dtype=dtype) for value in (1.0, 2.0, 4.0)]
    parts[1] = parts[1].t().contiguous().t()  # lies in memory in another way
    out = torch.zeros(3, 70, dtype=dtype)
    ops.sum_parts(out, parts, 0)
    assert torch.equal(out, torch.full_like(out, 7.0))
    held = torch.zeros(9, 70, dtype=dtype)
    ops.sum_parts(held.narrow(0, 3, 3), parts, 0)
    assert torch.equal(held[3:6], out)
    assert int(held.count_nonzero()) == 210


def test_some_rows_of_parts_are_added_up(ops: Ops) -> None:
    rows = torch.arange(5.0)[:, None].expand(5, 4)
    parts = [rows.contiguous(), (10 * rows).t().contiguous().t()]
    out = torch.zeros(9, 4)
    ops.sum_parts(out.narrow(0, 6, 2), parts, 3)
    assert out[:, 0].tolist() == [0, 0, 0, 0, 0, 0, 33, 44, 0]


def test_numbers_alone_are_added_up(ops: Ops) -> None:
    out = torch.zeros(())
    ops.sum_parts(out, [torch.tensor(1.0), torch.tensor(2.0)], 0)
    assert float(out) == 3


@pytest.mark.parametrize("portable", [False, True])
def test_statistics_of_each_group_are_those_of_a_network_run_per_group(portable: bool) -> None:
    twins = make_twins(chain(), Grain(3, 2, norms="group"), portable=portable)
    batch = make_batch(0, 11)
    twins.tasks.gradients(batch, 11)
    expected: dict[str, Tensor] = {}
    start = 0
    for size in group_sizes(11, 3):
        span = slice(start, start + size)
        part = Batch(batch.images_NCHW[span], batch.labels[span])
        twins.plain.gradients(part, 11)
        for name, gradient in gradients_of(twins.plain.model).items():
            expected[name] = expected.get(name, torch.zeros_like(gradient)) + gradient
        start += size
    for name, gradient in gradients_of(twins.tasks.model).items():
        assert torch.allclose(gradient, expected[name], rtol=1e-10, atol=1e-12), name
    assert twins.told == []
    norm = twins.tasks.model.get_submodule("1")
    assert isinstance(norm, nn.BatchNorm2d)
    hidden = twins.tasks.model.get_submodule("0")(batch.images_NCHW)
    whole = nn.BatchNorm2d(5).double()
    whole(hidden)  # the running statistics are those of the whole batch
    assert torch.allclose(norm.running_mean, whole.running_mean)  # type: ignore[arg-type]
    assert torch.allclose(norm.running_var, whole.running_var)  # type: ignore[arg-type]
