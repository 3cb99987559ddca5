"""Cores of a measurement: whole ones first, and given back afterwards."""

import os

import pytest

from convoy.bench.cores import Pins, choose_cores, held_to, read_list, whole_first


def test_no_two_halves_of_a_core_are_taken_while_there_are_whole_ones() -> None:
    neighbours = {core: {core & ~1, core | 1} for core in range(8)}
    assert whole_first(neighbours) == [0, 2, 4, 6, 1, 3, 5, 7]
    apart = {core: {core % 4, core % 4 + 4} for core in range(8)}
    assert whole_first(apart) == list(range(8))


def test_a_half_whose_other_half_is_out_of_reach_is_a_whole_one() -> None:
    assert whole_first({1: {0, 1}, 2: {2, 3}, 3: {2, 3}}) == [1, 2, 3]


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0\n", {0}), ("0-1\n", {0, 1}), ("3,67", {3, 67}), ("0-1,4-5", {0, 1, 4, 5})],
)
def test_the_kernels_lists_are_read(text: str, cores: set[int]) -> None:
    assert read_list(text) == cores


def test_only_usable_cores_are_chosen() -> None:
    usable = os.sched_getaffinity(0)
    assert set(choose_cores(len(usable))) == usable
    assert len(choose_cores(1)) == 1


def test_a_process_is_held_to_its_cores_for_a_while() -> None:
    before = os.sched_getaffinity(0)
    (core,) = choose_cores(1)
    with held_to([core]):
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == before


def test_a_pinned_node_has_the_core_of_its_number() -> None:
    before = os.sched_getaffinity(0)
    (core,) = choose_cores(1)
    with held_to(before):
        Pins([-1, core]).place(1, os.getpid())
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == before
