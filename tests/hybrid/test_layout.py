"""Which layers are cut: the cheapest of all layouts, and what each costs."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.hybrid.layout import (
    MESSAGE_WORTH,
    Block,
    Dense,
    Kind,
    Other,
    Setting,
    all_columns,
    choose_kinds,
    received,
    total_received,
    ways_between,
)

KINDS: tuple[Kind, ...] = ("copy", "columns", "rows")
RELU, NORM = Other("relu", each=True), Other("norm", each=False)
ALEXNET: list[Block] = [
    Dense("fc1", 1024, 4096),
    RELU,
    Dense("fc2", 4096, 4096),
    RELU,
    Dense("fc3", 4096, 10),
]
BLOCKS = st.one_of(
    st.builds(
        Dense,
        st.just("fc"),
        st.sampled_from([1, 8, 300, 5000]),
        st.sampled_from([2, 10, 400, 6000]),
        st.booleans(),
    ),
    st.sampled_from([RELU, NORM]),
)


def cost(blocks: list[Block], kinds: tuple[Kind, ...], setting: Setting) -> float:
    begins = sum(kind != "copy" for kind in kinds) * 2 * (setting.nodes - 1)
    return total_received(blocks, kinds, setting) + begins * MESSAGE_WORTH


@given(st.lists(BLOCKS, max_size=6), st.integers(2, 6), st.sampled_from([4, 64, 1024]))
def test_no_other_layout_is_cheaper(blocks: list[Block], nodes: int, batch: int) -> None:
    setting = Setting(nodes, batch)
    layers = sum(isinstance(block, Dense) for block in blocks)
    possible = [
        kinds
        for kinds in itertools.product(KINDS, repeat=layers)
        if set(kinds) - {"copy"} and ways_between(blocks, kinds, nodes) is not None
    ]
    found = choose_kinds(blocks, setting)
    if not possible:
        assert found == ()
        return
    assert found in possible
    least = min(cost(blocks, kinds, setting) for kinds in possible)
    assert cost(blocks, found, setting) == pytest.approx(least)


def test_what_alexnet_receives_is_a_quarter_of_what_data_parallel_training_does() -> None:
    """The reckoning of docs/hybrid.md: convolutions of 2,249,088 weights, batch 128 a node."""
    for nodes in (2, 4):
        setting = Setting(nodes, 128 * nodes)
        kinds = choose_kinds(ALEXNET, setting)
        assert kinds == ("columns", "rows", "copy")
        shared = 2 * (nodes - 1) / nodes * 4 * 2_249_088
        ours = shared + total_received(ALEXNET, kinds, setting)
        alone = shared + total_received(ALEXNET, ("copy",) * 3, setting)
        assert ours <= 0.25 * alone


def test_krizhevskys_condition() -> None:
    """Cutting beats copying where batch times features are fewer than the weights (2.2)."""
    layer = Dense("fc", 100, 399)
    weights = layer.weights
    for batch in (weights // 100 - 1, weights // 100 + 1):
        setting = Setting(4, batch)
        is_cheaper = received(layer, "columns", setting) < received(layer, "copy", setting)
        assert is_cheaper == (batch * 100 < weights)


def test_the_published_layout_cuts_all_by_output_neurons_or_says_that_it_cannot() -> None:
    assert all_columns(ALEXNET, Setting(4, 64)) == ("columns",) * 3
    assert all_columns(ALEXNET, Setting(11, 64)) == ()  # ten classes
    assert all_columns([ALEXNET[0], NORM, ALEXNET[2]], Setting(2, 64)) == ()
    assert all_columns([ALEXNET[0], NORM], Setting(2, 64)) == ()


def test_a_layer_that_needs_whole_samples_gets_them() -> None:
    blocks: list[Block] = [Dense("a", 9000, 9000), NORM, Dense("b", 9000, 9000)]
    assert choose_kinds(blocks, Setting(4, 8)) == ("copy", "columns")
    rows: tuple[Kind, ...] = ("columns", "rows", "copy")
    ways = ways_between([blocks[0], blocks[2], NORM, blocks[2]], rows, 2)
    assert ways == ("neurons", "samples", "samples", "samples")
