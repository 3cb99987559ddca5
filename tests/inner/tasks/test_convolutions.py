"""Our own convolutions are PyTorch's: as short products, as pairs of bf16, and row by row."""

import pytest
import torch

from convoy.inner.tasks.convolutions import neighbours
from convoy.inner.tasks.engine import load_engine
from convoy.inner.tasks.norms import norm_back_parts, norm_parts
from tests.inner.tasks.truth import (
    BOTH_TYPES,
    LAST,
    NO_NORM,
    Normed,
    Truth,
    assert_close,
    random,
)

_OPS = torch.ops.convoy


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    load_engine()


# ---------------------------------------------------------------- Winograd's

_WINOGRAD = pytest.mark.parametrize(
    ("samples", "inputs", "outputs", "height", "width"),
    [
        (8, 16, 16, 32, 32),
        (3, 32, 32, 16, 16),
        (5, 64, 64, 8, 8),
        (1, 16, 48, 2, 2),
        (2, 48, 16, 6, 10),
        (2, 80, 64, 4, 38),  # wider than a block, a number of inputs that is not a common one
        (2, 16, 128, 2, 130),
        (3, 272, 144, 2, 4),  # gradients in parts, the last of them smaller
    ],
)


@BOTH_TYPES
@_WINOGRAD
def test_short_products_give_a_convolution_and_its_ways_back(
    samples: int, inputs: int, outputs: int, height: int, width: int, dtype: torch.dtype
) -> None:
    x = random(samples, inputs, height, width, dtype=dtype)
    weight = random(outputs, inputs, 3, 3, dtype=dtype, seed=1)
    bias = random(outputs, dtype=dtype, seed=2)
    dy = random(samples, outputs, height, width, dtype=dtype, seed=3)
    truth = Truth(x, weight, bias, (1, 1), (1, 1))
    dx, dw, _ = truth.back(dy)
    forth, back = (_OPS.winograd_filters(weight, error) for error in (False, True))
    assert_close(_OPS.winograd(x, forth, bias, *NO_NORM), truth.y, dtype)
    assert_close(_OPS.winograd_error(dy, back), dx, dtype)
    assert_close(_OPS.winograd_gradient(dy, x, *NO_NORM), dw, dtype)
    y, parts = _OPS.winograd_parts(x, forth, bias, *NO_NORM)
    assert_close(y, truth.y, dtype)
    for ours, exact in zip(parts, norm_parts(y.double()), strict=True):
        assert_close(ours, exact, dtype)


@pytest.mark.parametrize("affine", [True, False])
@BOTH_TYPES
def test_a_norm_and_a_rectifier_before_a_convolution(dtype: torch.dtype, affine: bool) -> None:
    """Read through, counted on the way back: as if the norm's output had been kept."""
    x = random(4, 16, 6, 8, dtype=dtype)
    weight = random(32, 16, 3, 3, dtype=dtype, seed=1)
    dy = random(4, 32, 6, 8, dtype=dtype, seed=2)
    normed = Normed(x, affine=affine)
    norm, total, made = normed.norm, normed.total, normed.made
    truth = Truth(made, weight, None, (1, 1), (1, 1))
    dx, dw, _ = truth.back(dy)
    forth, back = (_OPS.winograd_filters(weight, error) for error in (False, True))
    assert_close(_OPS.winograd(x, forth, None, *norm), truth.y, dtype)
    assert_close(_OPS.winograd_parts(x, forth, None, *norm)[0], truth.y, dtype)
    assert_close(_OPS.winograd_gradient(dy, x, *norm), dw, dtype)
    flow, parts = _OPS.winograd_back(dy, back, x, *norm)
    assert_close(flow, torch.where(made > 0, dx, 0.0), dtype)
    exact = norm_back_parts(dx, x.double(), total, made)
    for ours, sums in zip(parts, exact, strict=True):
        assert_close(ours, sums, dtype)


@pytest.mark.parametrize("way", ["winograd", "pairs", "direct"])
@BOTH_TYPES
def test_statistics_are_of_what_is_stored_also_far_from_zero(way: str, dtype: torch.dtype) -> None:
    if way == "pairs":
        dtype = torch.bfloat16
    x = random(4, 16, 8, 8, dtype=dtype)
    weight = random(16, 16, 3, 3, dtype=dtype, seed=1) * 0.01
    bias = torch.full((16,), 1000.0)
    window = [3, 3, 1, 1, 1, 1, 1]
    how, more = {
        "winograd": ((), NO_NORM),
        "pairs": ((), (*NO_NORM, 1)),
        "direct": ((window,), (16, window)),
    }[way]
    filters = getattr(_OPS, f"{way}_filters")(weight, *how, False)
    y, parts = getattr(_OPS, f"{way}_parts")(x, filters, bias, *more)
    for ours, exact in zip(parts, norm_parts(y.double()), strict=True):
        assert torch.allclose(ours, exact, rtol=1e-4)


@BOTH_TYPES
def test_what_is_no_number_gets_through_norms_and_rectifiers(dtype: torch.dtype) -> None:
    """A run that has diverged must show it: PyTorch's rectifiers keep what is no number, too."""
    nan = float("nan")
    x = torch.full((1, 16, 4, 4), nan, dtype=dtype).contiguous(memory_format=LAST)
    one = torch.ones_like(x)
    total = torch.stack([torch.zeros(16), torch.ones(16)]).double()
    norm = (total, None, None)
    assert _OPS.norm_apply(x, *norm, None, True).isnan().all()
    assert not _OPS.norm_apply(one, *norm, None, True).isnan().any()
    flow, parts = _OPS.rectified_parts(one, None, x, x, total)
    assert torch.equal(flow, one)
    assert parts[1].isnan().all()
    weight = random(16, 16, 3, 3, dtype=dtype, seed=1)
    ways = [("winograd", ())] + ([("pairs", (1,))] if dtype == torch.bfloat16 else [])
    for way, more in ways:
        forth, back = (getattr(_OPS, f"{way}_filters")(weight, error) for error in (False, True))
        assert getattr(_OPS, way)(x, forth, None, *norm, *more).isnan().all()
        assert getattr(_OPS, f"{way}_gradient")(one, x, *norm, *more).isnan().all()
        flow, parts = getattr(_OPS, f"{way}_back")(one, back, x, *norm, *more)
        assert not (flow == 0).any()
        assert parts[1].isnan().all()


def test_what_is_no_number_stays_none_in_bf16() -> None:
    x = torch.full((1, 16, 2, 2), float("nan"), dtype=torch.bfloat16).contiguous(memory_format=LAST)
    filters = _OPS.winograd_filters(random(16, 16, 3, 3, dtype=torch.bfloat16), False)
    assert _OPS.winograd(x, filters, None, *NO_NORM).isnan().all()


# ---------------------------------------------------------------- pairs of bf16

_PAIRS = pytest.mark.parametrize(
    ("samples", "inputs", "outputs", "height", "width"),
    [
        (8, 16, 16, 32, 32),
        (3, 32, 32, 16, 16),
        (5, 64, 64, 8, 8),
        (3, 16, 48, 7, 5),
        (2, 48, 16, 3, 9),
        (2, 80, 112, 13, 6),  # more rows than are made together
        (1, 16, 16, 1, 1),
    ],
)


@pytest.mark.parametrize("stride", [1, 2])
@_PAIRS
def test_pairs_give_a_convolution_and_its_ways_back(
    samples: int, inputs: int, outputs: int, height: int, width: int, stride: int
) -> None:
    dtype = torch.bfloat16
    x = random(samples, inputs, height, width, dtype=dtype)
    weight = random(outputs, inputs, 3, 3, dtype=dtype, seed=1)
    bias = random(outputs, dtype=dtype, seed=2)
    truth = Truth(x, weight, bias, (stride, stride), (1, 1))
    dy = random(*truth.y.shape, dtype=dtype, seed=3)
    dx, dw, _ = truth.back(dy)
    forth, back = (_OPS.pairs_filters(weight, error) for error in (False, True))
    assert_close(_OPS.pairs(x, forth, bias, *NO_NORM, stride), truth.y, dtype)
    assert_close(_OPS.pairs_error(dy, back, [height, width], stride), dx, dtype)
    assert_close(_OPS.pairs_gradient(dy, x, *NO_NORM, stride), dw, dtype)
    y, parts = _OPS.pairs_parts(x, forth, bias, *NO_NORM, stride)
    assert_close(y, truth.y, dtype)
    for ours, exact in zip(parts, norm_parts(y.double()), strict=True):
        assert_close(ours, exact, dtype)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("affine", [True, False])
def test_a_norm_and_a_rectifier_before_pairs(affine: bool, stride: int) -> None:
    dtype = torch.bfloat16
    x = random(4, 16, 6, 8, dtype=dtype)
    weight = random(32, 16, 3, 3, dtype=dtype, seed=1)
    normed = Normed(x, affine=affine)
    norm, made = normed.norm, normed.made
    truth = Truth(made, weight, None, (stride, stride), (1, 1))
    dy = random(*truth.y.shape, dtype=dtype, seed=2)
    dx, dw, _ = truth.back(dy)
    forth, back = (_OPS.pairs_filters(weight, error) for error in (False, True))
    assert_close(_OPS.pairs(x, forth, None, *norm, stride), truth.y, dtype)
    assert_close(_OPS.pairs_parts(x, forth, None, *norm, stride)[0], truth.y, dtype)
    assert_close(_OPS.pairs_gradient(dy, x, *norm, stride), dw, dtype)
    flow, parts = _OPS.pairs_back(dy, back, x, *norm, stride)
    assert_close(flow, torch.where(made > 0, dx, 0.0), dtype)
    for ours, sums in zip(parts, norm_back_parts(dx, x.double(), normed.total, made), strict=True):
        assert_close(ours, sums, dtype)


def test_pairs_leave_no_trace_of_what_was_there_before() -> None:
    """Frames and what lies behind them are used again: no number of another image may stay."""
    dtype = torch.bfloat16
    weight = random(16, 16, 3, 3, dtype=dtype, seed=1)
    filters = _OPS.pairs_filters(weight, False)
    small = random(1, 16, 5, 5, dtype=dtype)
    dy = random(1, 16, 5, 5, dtype=dtype, seed=2)
    first = _OPS.pairs(small, filters, None, *NO_NORM, 1)
    gradient = _OPS.pairs_gradient(dy, small, *NO_NORM, 1)
    large = torch.full((1, 16, 20, 20), float("nan"), dtype=dtype).contiguous(memory_format=LAST)
    assert _OPS.pairs(large, filters, None, *NO_NORM, 1).isnan().all()
    assert _OPS.pairs_gradient(large, large, *NO_NORM, 1).isnan().all()
    assert torch.equal(_OPS.pairs(small, filters, None, *NO_NORM, 1), first)
    assert torch.equal(_OPS.pairs_gradient(dy, small, *NO_NORM, 1), gradient)


# ---------------------------------------------------------------- few channels, any stride

_DIRECT = pytest.mark.parametrize(
    ("shape", "outputs", "size", "stride", "padding"),
    [
        ((3, 3, 32, 32), 16, (3, 3), (1, 1), (1, 1)),
        ((2, 16, 32, 32), 32, (3, 3), (2, 2), (1, 1)),
        ((2, 32, 16, 16), 64, (3, 3), (2, 2), (1, 1)),
        ((3, 1, 28, 28), 6, (5, 5), (1, 1), (2, 2)),  # two neighbours make a vector
        ((3, 6, 14, 14), 16, (5, 5), (1, 1), (0, 0)),
        ((2, 5, 13, 11), 20, (4, 3), (3, 2), (2, 1)),
        ((2, 16, 9, 9), 32, (1, 1), (2, 2), (0, 0)),  # a stride that skips numbers
        ((2, 48, 7, 8), 10, (3, 3), (1, 1), (1, 1)),
        ((2, 3, 32, 32), 4, (11, 11), (4, 4), (5, 5)),
        ((2, 2, 5, 6), 3, (2, 2), (1, 2), (0, 1)),
        ((2, 4, 4, 4), 1, (4, 4), (1, 1), (0, 0)),
        ((1, 2, 3, 3), 2, (2, 3), (2, 3), (1, 2)),
    ],
)


@BOTH_TYPES
@_DIRECT
def test_row_by_row_gives_a_convolution_and_its_ways_back(
    shape: tuple[int, int, int, int],
    outputs: int,
    size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    _, inputs, height, width = shape
    x = random(*shape, dtype=dtype)
    weight = random(outputs, inputs, *size, dtype=dtype, seed=1)
    bias = random(outputs, dtype=dtype, seed=2)
    truth = Truth(x, weight, bias, stride, padding)
    across = truth.y.shape[3]
    dy = random(*truth.y.shape, dtype=dtype, seed=3)
    dx, dw, db = truth.back(dy)
    window = [*size, *stride, *padding]
    for many in {1, neighbours(outputs, across, 16)}:
        filters = _OPS.direct_filters(weight, [*window, many], False)
        y = _OPS.direct(x, filters, bias, outputs, [*window, many])
        assert_close(y, truth.y, dtype)
        assert_close(_OPS.direct_gradient(dy, x, [*window, many]), dw, dtype)
    for many in {1, neighbours(inputs, width, 16) if stride == (1, 1) else 1}:
        filters = _OPS.direct_filters(weight, [*window, many], True)
        found = _OPS.direct_error(dy, filters, inputs, [height, width], [*window, many])
        assert_close(found, dx, dtype)
    filters = _OPS.direct_filters(weight, [*window, 1], False)
    y, parts = _OPS.direct_parts(x, filters, bias, outputs, [*window, 1])
    assert_close(y, truth.y, dtype)
    for ours, exact in zip(parts, norm_parts(y.double()), strict=True):
        assert_close(ours, exact, dtype)
    assert_close(_OPS.bias_gradient(dy), db, dtype)
