"""How many nodes a machine gets: as asked, or as many as are done first."""

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.config import Config
from convoy.launch.choose import (
    Layout,
    choose_layout,
    config_of_nodes,
    config_of_others,
    planned_nodes,
    threads_per_node,
)

ONE = Layout(1, 4, 100.0)


@pytest.mark.parametrize(
    ("options", "nodes"),
    [
        ({}, 0),
        ({"nodes": "auto"}, 0),
        ({"nodes": 1}, 1),
        ({"nodes": 4}, 4),
        ({"speeds": "0.8,0.6,0.4,0.2"}, 4),
        ({"speeds": [0.5]}, 1),
        ({"devices": "cuda:0,cpu,cpu"}, 3),
        ({"devices": "cpu"}, 1),
        ({"nodes": 2, "speeds": "1,0.5", "devices": "cpu,cpu"}, 2),
    ],
)
def test_nodes_are_asked_for_by_number_speeds_or_devices(
    options: dict[str, Any], nodes: int
) -> None:
    assert planned_nodes(Config(**options)) == nodes


@pytest.mark.parametrize(
    ("cores", "nodes", "threads"),
    [(8, 1, 8), (8, 2, 4), (8, 3, 2), (8, 8, 1), (2, 4, 1), (1, 1, 1), (8, 0, 8)],
)
def test_cores_are_divided_among_nodes_and_each_has_one(
    monkeypatch: pytest.MonkeyPatch, cores: int, nodes: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert threads_per_node(Config(), nodes) == threads


@pytest.mark.parametrize("nodes", [0, 1, 4])
def test_threads_that_were_asked_for_are_given_to_each_node(nodes: int) -> None:
    assert threads_per_node(Config(threads=3), nodes) == 3


def test_nodes_that_are_not_like_the_lead_choose_their_arithmetic() -> None:
    lead = Config(precision="bf16", memory_format="channels_last", executor="tasks")
    found = config_of_others(lead, Config())
    assert (found.precision, found.memory_format, found.executor) == ("auto", "auto", "tasks")


@pytest.mark.parametrize(
    "config_of", [config_of_nodes, lambda asked: config_of_others(asked, asked)]
)
def test_nobody_rounds_weights_that_a_backward_pass_does_not_read(
    config_of: Callable[[Config], Config],
) -> None:
    stages: dict[str, Any] = {"strategy": "pipeline", "stages": 2}
    assert config_of(Config(**stages, recipe="published")).precision == "fp32"
    assert config_of(Config(**stages, recipe="convoy")).precision == "auto"


def test_several_nodes_are_chosen_for_a_long_run_they_clearly_shorten() -> None:
    two = Layout(2, 2, 150.0)
    assert choose_layout([ONE, two], 100_000) is two


def test_a_run_that_is_over_soon_starts_no_nodes() -> None:
    two = Layout(2, 2, 150.0)
    assert choose_layout([ONE, two], 1_000) is ONE
    assert choose_layout([ONE, two], 0) is ONE


def test_a_small_promise_is_not_believed() -> None:
    assert choose_layout([ONE, Layout(2, 2, 112.0)], 10**7) is ONE
    better = Layout(2, 2, 118.0)
    assert choose_layout([ONE, better], 10**7) is better


def test_the_fastest_of_several_is_chosen_whatever_their_order() -> None:
    layouts = [Layout(4, 1, 150.0), ONE, Layout(2, 2, 200.0)]
    assert choose_layout(layouts, 10**6).nodes == 2
    assert choose_layout(layouts[::-1], 10**6).nodes == 2


def test_one_layout_leaves_no_choice() -> None:
    assert choose_layout([ONE], 10**6) is ONE


@given(
    one=st.floats(1, 1e5),
    others=st.lists(st.tuples(st.integers(2, 64), st.floats(1, 1e5)), max_size=5),
    samples=st.integers(0, 10**8),
)
def test_a_choice_of_several_nodes_is_done_clearly_sooner_than_one(
    one: float, others: list[tuple[int, float]], samples: int
) -> None:
    alone = Layout(1, 8, one)
    chosen = choose_layout([alone, *(Layout(n, 1, rate) for n, rate in others)], samples)
    if chosen.nodes > 1:
        assert (samples / chosen.samples_per_s + 5) * 1.1 < samples / one
        assert chosen.samples_per_s == max(rate for _, rate in others)
