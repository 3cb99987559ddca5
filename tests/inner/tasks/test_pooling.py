"""Our own max-pools are PyTorch's; memory for what tasks make is kept."""

import pytest
import torch
from torch import nn

from convoy.inner.tasks.engine import load_engine
from tests.inner.tasks.truth import BOTH_TYPES, LAST, NO_NORM, random

_OPS = torch.ops.convoy


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    load_engine()


@BOTH_TYPES
@pytest.mark.parametrize("size", [(2, 2), (3, 2), (1, 3)])
@pytest.mark.parametrize("shape", [(2, 6, 28, 28), (3, 16, 7, 9), (1, 20, 5, 6), (2, 1, 4, 3)])
def test_a_pool_is_torchs_also_where_numbers_are_equal(
    shape: tuple[int, ...], size: tuple[int, int], dtype: torch.dtype
) -> None:
    x = random(*shape, dtype=dtype).mul(2).round()  # many are equal: the first one wins
    x = x.contiguous(memory_format=LAST).requires_grad_()
    theirs = nn.functional.max_pool2d(x, size)
    dy = random(*theirs.shape, dtype=dtype, seed=1)
    theirs.backward(dy)
    y, places = _OPS.max_pool(x.detach(), size)
    assert torch.equal(y, theirs)
    assert x.grad is not None
    assert torch.equal(_OPS.max_pool_back(dy, places, x.detach(), size), x.grad)


def test_what_is_no_number_wins_a_pool() -> None:
    x = random(1, 3, 4, 4, dtype=torch.float32)
    x[0, 1, 0, 1] = float("nan")
    y, places = _OPS.max_pool(x, (2, 2))
    assert y[0, 1, 0, 0].isnan()
    assert places[0, 1, 0, 0] == 1
    assert y.isnan().sum() == 1


def test_memory_is_kept_for_the_next_step() -> None:
    x = random(4, 16, 8, 8, dtype=torch.float32)
    filters = _OPS.winograd_filters(random(16, 16, 3, 3, dtype=torch.float32, seed=1), False)
    first = _OPS.winograd(x, filters, None, *NO_NORM)
    address, kept = first.data_ptr(), first.clone()
    second = _OPS.winograd(x, filters, None, *NO_NORM)
    assert second.data_ptr() != address  # while the first one lives
    del first
    assert _OPS.winograd(x, filters, None, *NO_NORM).data_ptr() == address
    assert torch.equal(second, kept)
