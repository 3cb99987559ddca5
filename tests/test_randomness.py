"""Random numbers belong to (seed, epoch, sample) and to nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from convoy.randomness import (
    draw_below,
    draw_uniform,
    epoch_order,
    fold,
    sample_keys,
    seed_torch,
)

_DRAWS = 50_000
_numbers = st.integers(min_value=0, max_value=2**63 - 1)
_small = st.integers(min_value=0, max_value=2**31)


def _keys(seed: int = 0, epoch: int = 0, count: int = _DRAWS) -> Tensor:
    return sample_keys(seed, epoch, torch.arange(count))


def _correlation(a: Tensor, b: Tensor) -> float:
    return float(
        torch.corrcoef(torch.stack([a.double().reshape(-1), b.double().reshape(-1)]))[0, 1]
    )


@given(st.lists(_numbers, max_size=5))
def test_fold_stays_within_63_bits_and_repeats(numbers: list[int]) -> None:
    assert 0 <= fold(*numbers) < 2**63
    assert fold(*numbers) == fold(*numbers)


@given(_small, _small)
def test_fold_depends_on_the_order(a: int, b: int) -> None:
    assert (fold(a, b) == fold(b, a)) == (a == b)


def test_fold_depends_on_how_many_numbers_there_are() -> None:
    assert len({fold(), fold(0), fold(0, 0), fold(0, 0, 0)}) == 4


def test_fold_uses_all_of_its_63_bits() -> None:
    seen = 0
    for number in range(200):
        seen |= fold(number)
    assert seen == 2**63 - 1


@given(_small, _small, st.lists(_small, min_size=1, max_size=20))
@settings(max_examples=50)
def test_a_key_depends_on_seed_epoch_and_index_only(
    seed: int, epoch: int, indices: list[int]
) -> None:
    together = sample_keys(seed, epoch, torch.tensor(indices))
    alone = [sample_keys(seed, epoch, torch.tensor([index])) for index in indices]
    assert torch.equal(together, torch.cat(alone))


def test_a_key_does_not_depend_on_the_position_in_the_batch() -> None:
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample_keys(3, 4, order), _keys(3, 4, 1000)[order])


def test_a_key_does_not_depend_on_the_type_of_the_index() -> None:
    assert torch.equal(sample_keys(0, 0, torch.arange(9, dtype=torch.int32)), _keys(count=9))


def test_keys_of_an_epoch_are_all_different() -> None:
    assert len(torch.unique(_keys())) == _DRAWS


@pytest.mark.parametrize(("seed", "epoch"), [(1, 0), (0, 1)])
def test_another_seed_or_epoch_gives_other_keys(seed: int, epoch: int) -> None:
    assert not (_keys() == _keys(seed, epoch)).any()


@given(st.integers(1, 2**31 - 1), st.integers(0, 1000))
@settings(max_examples=50)
def test_draws_below_a_bound_are_whole_and_within_it(bound: int, stream: int) -> None:
    drawn = draw_below(_keys(count=200), stream, bound)
    assert drawn.dtype == torch.int64
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < bound


@pytest.mark.parametrize("bound", [2, 5, 9, 100])
@pytest.mark.parametrize("stream", [0, 4])
def test_draws_below_a_bound_are_uniform(bound: int, stream: int) -> None:
    counts = torch.bincount(draw_below(_keys(), stream, bound), minlength=bound).double()
    expected = _DRAWS / bound
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = bound - 1
    assert chi_square < freedom + 6 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(("a", "b"), [(0, 1), (0, 2), (1, 2), (3, 4), (2, 16)])
def test_streams_of_whole_numbers_are_uncorrelated(a: int, b: int) -> None:
    keys = _keys()
    assert abs(_correlation(draw_below(keys, a, 9), draw_below(keys, b, 9))) < 0.025


def test_epochs_are_uncorrelated() -> None:
    first, second = (draw_below(_keys(epoch=epoch), 0, 9) for epoch in (0, 1))
    assert abs(_correlation(first, second)) < 0.025


def test_neighbouring_samples_are_uncorrelated() -> None:
    drawn = draw_below(_keys(), 0, 9)
    assert abs(_correlation(drawn[1:], drawn[:-1])) < 0.025


def test_uniform_draws_lie_in_the_half_open_unit_interval() -> None:
    drawn = draw_uniform(_keys(count=1000), 0, 50)
    assert drawn.shape == (1000, 50)
    assert drawn.dtype == torch.float32
    assert float(drawn.min()) >= 0.0
    assert float(drawn.max()) < 1.0


def test_uniform_draws_have_the_mean_and_variance_of_the_uniform_law() -> None:
    drawn = draw_uniform(_keys(count=1000), 0, 50).double()
    assert float(drawn.mean()) == pytest.approx(1 / 2, abs=0.007)
    assert float(drawn.var()) == pytest.approx(1 / 12, abs=0.003)


def test_uniform_draws_of_two_streams_are_uncorrelated() -> None:
    keys = _keys(count=1000)
    assert abs(_correlation(draw_uniform(keys, 16, 50), draw_uniform(keys, 17, 50))) < 0.025


def test_uniform_draws_of_neighbouring_places_are_uncorrelated() -> None:
    drawn = draw_uniform(_keys(count=1000), 0, 51)
    assert abs(_correlation(drawn[:, 1:], drawn[:, :-1])) < 0.025


@given(st.lists(st.integers(0, 99), min_size=1, max_size=30), st.integers(0, 40))
@settings(max_examples=50)
def test_a_row_of_uniform_draws_does_not_depend_on_its_batch(rows: list[int], stream: int) -> None:
    keys = _keys(count=100)
    assert torch.equal(draw_uniform(keys[rows], stream, 7), draw_uniform(keys, stream, 7)[rows])


def test_more_uniform_draws_begin_with_the_same_ones() -> None:
    keys = _keys(count=10)
    assert torch.equal(draw_uniform(keys, 0, 20)[:, :5], draw_uniform(keys, 0, 5))


@given(_small, _small, st.integers(0, 300))
@settings(max_examples=50)
def test_an_epoch_visits_every_sample_once(seed: int, epoch: int, count: int) -> None:
    order = epoch_order(seed, epoch, count)
    assert torch.equal(order.sort().values, torch.arange(count))


def test_the_same_epoch_has_the_same_order() -> None:
    first = epoch_order(1, 2, 500)
    torch.rand(3)
    assert torch.equal(first, epoch_order(1, 2, 500))


@pytest.mark.parametrize(("seed", "epoch"), [(1, 3), (2, 2), (2, 1)])
def test_another_seed_or_epoch_has_another_order(seed: int, epoch: int) -> None:
    assert not torch.equal(epoch_order(1, 2, 500), epoch_order(seed, epoch, 500))


def test_drawing_an_order_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    epoch_order(0, 0, 100)
    assert torch.equal(torch.rand(4), expected)


def test_seeding_torch_makes_its_draws_repeat() -> None:
    device = torch.device("cpu")
    seed_torch(fold(1, 2), device)
    first = torch.rand(8)
    seed_torch(fold(1, 2), device)
    second = torch.rand(8)
    seed_torch(fold(1, 3), device)
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.rand(8))
