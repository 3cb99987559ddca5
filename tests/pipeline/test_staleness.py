"""The part of stale weights, as computed for the paper's networks and cuts."""

import pytest

from convoy.models.blocks import count_weight_layers, walk_units
from convoy.models.zoo import ZOO
from convoy.pipeline.partition import cut_by_hand
from convoy.pipeline.staleness import layer_weights, stale_part

CASES = [
    ("resnet20", {(7,): 5.31, (7, 13): 24.20, (7, 13, 19): 99.76}),
    ("resnet56", {(19,): 4.94}),
    ("resnet110", {(37,): 4.85}),
    ("resnet224", {(75,): 4.80}),
    ("resnet362", {(121,): 4.79}),
    ("vgg16", {(2,): 0.25, (2, 4): 1.71, (2, 4, 7): 11.38, (2, 4, 7, 10): 50.08}),
    ("lenet5", {(1,): 0.25, (2,): 4.17, (3,): 82.15, (4,): 98.62}),
    ("alexnet", {(1,): 0.01, (2,): 0.48, (3,): 3.34, (4,): 7.14, (5,): 9.67}),
]


@pytest.mark.parametrize(("name", "expected"), CASES, ids=[name for name, _ in CASES])
def test_the_papers_networks(name: str, expected: dict[tuple[int, ...], float]) -> None:
    model = ZOO[name]((1, 28, 28) if name == "lenet5" else (3, 32, 32), 10)
    weights = layer_weights(model)
    layers = [count_weight_layers(block) for _, block in walk_units(model)]
    for cuts, percent in expected.items():
        assert round(100 * stale_part(weights, cut_by_hand(layers, cuts)), 2) == percent


def test_one_stage_is_never_stale() -> None:
    assert stale_part([3, 4], (0, 2)) == 0.0
