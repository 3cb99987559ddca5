"""Neurons by speed and memory, and the order in which samples cross."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.hybrid.allot import allot, bounds_of, samples_within
from convoy.hybrid.passes import Scheme, make_passes
from convoy.hybrid.runner import Hybrid
from convoy.outer.allocation.plan import Rules, make_plan


@given(
    st.lists(st.tuples(st.floats(0.01, 100), st.integers(1, 10**6)), min_size=1, max_size=8),
    st.integers(8, 5000),
)
def test_all_neurons_are_given_away_within_everyones_memory(
    nodes: list[tuple[float, int]], outputs: int
) -> None:
    speeds, memory = zip(*nodes, strict=True)
    room = [max(1, int(free * 0.8 / 30)) for free in memory]
    if sum(room) < outputs:
        with pytest.raises(MemoryError):
            allot(outputs, speeds, 10, memory)
        return
    found = allot(outputs, speeds, 10, memory)
    assert sum(found) == outputs
    assert all(0 < part <= most for part, most in zip(found, room, strict=True))


def test_neurons_follow_speed_where_memory_allows() -> None:
    assert allot(4096, [1.0, 0.5, 0.5], 4096, [1e12] * 3) == (2048, 1024, 1024)
    assert allot(10, [100, 1, 1], 4, [1e9] * 3) == (8, 1, 1)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.sampled_from(["all", "turns", "slices"]),
)
def test_every_sample_crosses_once_and_in_order(shares: list[int], scheme: Scheme) -> None:
    passes = make_passes(scheme, shares)
    for node, share in enumerate(shares):
        crossed = [n for one in passes for n in range(*one[node])]
        assert crossed == list(range(share))
    assert all(any(stop > start for start, stop in one) for one in passes)
    if scheme == "turns":
        assert all(sum(stop > start for start, stop in one) == 1 for one in passes)


def test_slices_take_a_part_of_every_node() -> None:
    passes = make_passes("slices", [128, 64])
    assert [bounds_of([b - a for a, b in one]) for one in passes] == [(0, 64, 96)] * 2


def test_samples_too_go_by_speed_as_far_as_memory_goes() -> None:
    node = object.__new__(Hybrid)
    node._rules, node._sample_bytes, node._memory = Rules(64, 1), 1000, [1e9, 1e9]
    assert make_plan([3.0, 1.0], node._group_rules()).shares == (48, 16)
    node._memory = [100_000, 1e9]  # room for 20 samples beside the neurons
    assert samples_within(1000, node._memory)[0] == 20
    assert make_plan([3.0, 1.0], node._group_rules()).shares == (20, 44)
