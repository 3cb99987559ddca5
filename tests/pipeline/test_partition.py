"""Cuts: by hand as the paper names them, and by cost for unequal workers."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.errors import ConfigError
from convoy.models.blocks import count_weight_layers, walk_blocks
from convoy.models.zoo import build_model
from convoy.pipeline.partition import (
    Block,
    Worker,
    cut_by_cost,
    cut_by_hand,
    legal_cuts,
    stage_bytes,
    stage_seconds,
)


def _layers(model: str) -> list[int]:
    shape = (1, 28, 28) if model == "lenet5" else (3, 32, 32)
    return [
        count_weight_layers(block) for _, block in walk_blocks(build_model(model, shape, 10, 0))
    ]


@pytest.mark.parametrize(
    ("model", "cuts"),
    [
        ("resnet20", (7, 13, 19)),
        ("resnet56", (19,)),
        ("vgg16", (2, 4, 7, 10)),
        ("lenet5", (1, 2, 3, 4)),
        ("alexnet", (1, 2, 3)),
    ],
)
def test_the_papers_cuts_are_legal(model: str, cuts: tuple[int, ...]) -> None:
    layers = _layers(model)
    bounds = cut_by_hand(layers, cuts)
    before = [sum(layers[:bound]) for bound in bounds[1:-1]]
    assert tuple(before) == cuts


def test_a_residual_block_is_never_cut() -> None:
    assert list(legal_cuts(_layers("resnet20"))) == [1, 3, 5, 7, 9, 11, 13, 15, 17, 19]


@pytest.mark.parametrize("cuts", [(2,), (0,), (20,), (-1,), (7, 6), (7, 7)])
def test_a_cut_that_is_not_legal_is_told_with_those_that_are(cuts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        cut_by_hand(_layers("resnet20"), cuts)
    assert "1, 3, 5, 7, 9, 11, 13, 15, 17, 19" in str(caught.value)


def _worker(blocks: list[Block], speed: float = 1.0, **more: float) -> Worker:
    return Worker((1 / speed,) * len(blocks), **more)  # type: ignore[arg-type]


def test_equal_workers_get_equal_work() -> None:
    blocks = [Block(str(n), 1) for n in range(8)]
    assert cut_by_cost(blocks, [_worker(blocks)] * 4, in_flight=2) == (0, 2, 4, 6, 8)


def test_a_slow_worker_gets_less() -> None:
    blocks = [Block(str(n), 1) for n in range(9)]
    assert cut_by_cost(blocks, [_worker(blocks), _worker(blocks, 0.5)], in_flight=2) == (0, 6, 9)
    assert cut_by_cost(blocks, [_worker(blocks, 0.5), _worker(blocks)], in_flight=2) == (0, 3, 9)


def test_a_slow_link_moves_the_cut_to_where_less_is_sent() -> None:
    sizes = [400, 400, 400, 100, 100, 100]
    blocks = [Block(str(n), 1, out_bytes=size) for n, size in enumerate(sizes)]
    assert cut_by_cost(blocks, [_worker(blocks)] * 2, 2) == (0, 3, 6)
    assert cut_by_cost(blocks, [_worker(blocks, bytes_per_s=80), _worker(blocks)], 2) == (0, 4, 6)


def test_memory_counts_the_batches_that_are_on_their_way() -> None:
    blocks = [Block(str(n), 1, kept_bytes=10, weight_bytes=1) for n in range(4)]
    assert stage_bytes(blocks[:2], 3) == 2 * (3 * 10 + 3)
    small = [_worker(blocks, memory_bytes=40), _worker(blocks)]
    assert cut_by_cost(blocks, small, in_flight=2) == (0, 1, 4)
    with pytest.raises(ConfigError, match="memory"):
        cut_by_cost(blocks, [_worker(blocks, memory_bytes=10), _worker(blocks)], in_flight=2)


def test_more_stages_than_cuts_are_refused_with_the_list() -> None:
    blocks = [Block("a", 1), Block("b", 0), Block("c", 1)]
    with pytest.raises(ConfigError) as caught:
        cut_by_cost(blocks, [_worker(blocks)] * 3, in_flight=2)
    assert "at most 2" in str(caught.value)
    assert "after 1 weight layers" in str(caught.value)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=1, max_size=8),
    st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=1, max_size=4),
)
def test_no_other_cut_is_better(costs: list[tuple[int, int]], speeds: list[float]) -> None:
    blocks = [Block(str(n), layers) for n, (layers, _) in enumerate(costs)]
    workers = [Worker(tuple(seconds / speed for _, seconds in costs)) for speed in speeds]
    starts = list(legal_cuts([block.layers for block in blocks]).values())
    if len(workers) - 1 > len(starts):
        with pytest.raises(ConfigError):
            cut_by_cost(blocks, workers, in_flight=2)
        return

    def slowest(bounds: tuple[int, ...]) -> float:
        parts = zip(workers, itertools.pairwise(bounds), strict=True)
        return max(stage_seconds(blocks, who, start, stop) for who, (start, stop) in parts)

    others = [
        slowest((0, *cuts, len(blocks)))
        for cuts in itertools.combinations(starts, len(workers) - 1)
    ]
    assert slowest(cut_by_cost(blocks, workers, in_flight=2)) == pytest.approx(min(others))
