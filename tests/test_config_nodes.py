"""The options that say who takes part: each by itself, and what must hold between them."""

from pathlib import Path
from typing import Any

import pytest

from convoy.config import Config, changed_on_resume, load_config
from convoy.errors import ConfigError


def make(**values: Any) -> Config:
    """Return a config from values of any type, as files and command lines give them."""
    return Config(**values)


# ---------------------------------------------------------------- words for numbers


@pytest.mark.parametrize(
    ("value", "nodes"),
    [
        ("auto", 0),
        (0, 0),
        ("0", 0),
        ("none", -1),
        (-1, -1),
        ("-1", -1),
        (4, 4),
        ("4", 4),
        (64, 64),
        ("64", 64),
    ],
)
def test_nodes_are_a_number_or_a_word_for_one(value: object, nodes: int) -> None:
    config = make(nodes=value)
    assert config.nodes == nodes
    assert type(config.nodes) is int


@pytest.mark.parametrize(
    "value", ["", "Auto", "all", "four", "1.5", "1e1", "0x4", "4,4", "9" * 5000]
)
def test_another_word_is_refused_with_the_words_there_are(value: str) -> None:
    with pytest.raises(
        ConfigError, match=r"'nodes' must be a number; .*whole number or auto, none"
    ):
        make(nodes=value)


@pytest.mark.parametrize("value", [-2, "-2", 65, "65", 10**30, "1" + "0" * 30])
def test_numbers_out_of_range_are_refused_in_every_form(value: object) -> None:
    with pytest.raises(ConfigError, match=r"'nodes' is out of range; .*at least -1, at most 64"):
        make(nodes=value)


@pytest.mark.parametrize("value", [True, None, 1.0, [1], {"auto": 1}])
def test_what_is_neither_number_nor_word_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="'nodes' must be a whole number"):
        make(nodes=value)


@pytest.mark.parametrize("name", ["epochs", "threads", "min_nodes", "min_share", "restarts"])
def test_where_no_words_are_declared_a_text_is_no_number(name: str) -> None:
    for value in ("1", "auto"):
        with pytest.raises(ConfigError, match=f"'{name}' must be a whole number"):
            make(**{name: value})


@pytest.mark.parametrize(("text", "nodes"), [('"auto"', 0), ('"none"', -1), ("3", 3), ('"3"', 3)])
def test_words_stand_in_run_files_too(tmp_path: Path, text: str, nodes: int) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"nodes = {text}\n", encoding="utf-8")
    assert load_config(path, {}).nodes == nodes


# ---------------------------------------------------------------- laws


@pytest.mark.parametrize(
    "values",
    [
        {"nodes": 4, "speeds": "0.8,0.6,0.4,0.2"},
        {"nodes": "auto", "speeds": "0.8,0.6"},
        {"nodes": 2, "devices": "cuda:0,cpu"},
        {"nodes": 2, "shares": "3,1", "allocation": "fixed"},
        {"speeds": "1,1", "devices": "cpu,cpu", "shares": "1,0", "allocation": "fixed"},
        {"shares": [0, 5], "allocation": "fixed"},
        {"allocation": "uniform"},
        {"speeds": "0.5,1", "speed_changes": "1:0.2@30"},
        {"strategy": "single"},
        {"strategy": "single", "nodes": 1},
        {"strategy": "single", "devices": "cpu"},
        {"strategy": "single", "speeds": "0.5"},
        {"strategy": "lockstep", "nodes": 4},
        {"strategy": "lockstep", "nodes": 1},
        {"devices": None, "nodes": 3},
        {"devices": "", "nodes": 3},
    ],
)
def test_what_keeps_the_laws_is_taken(values: dict[str, Any]) -> None:
    config = make(**values)
    assert config.replaced(config.as_dict()) == config


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"nodes": 3, "speeds": "1,1"}, "nodes: 3, speeds: 2"),
        ({"nodes": 2, "devices": "cpu"}, "nodes: 2, devices: 1"),
        ({"speeds": "1,1", "devices": "cpu,cpu,cpu"}, "speeds: 2, devices: 3"),
        ({"nodes": 2, "shares": "1", "allocation": "fixed"}, "nodes: 2, shares: 1"),
        (
            {"nodes": 1, "speeds": "1", "devices": "cpu", "shares": "1,2", "allocation": "fixed"},
            "nodes: 1, speeds: 1, devices: 1, shares: 2",
        ),
    ],
)
def test_options_that_disagree_on_the_number_of_nodes_are_all_named(
    values: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**values)
    expected = f"these options disagree on the number of nodes; got '{told}'"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    "values",
    [
        {"allocation": "fixed"},
        {"shares": "1,2"},
        {"shares": "1,2", "allocation": "speed"},
        {"shares": "1,2", "allocation": "uniform"},
    ],
)
def test_fixed_allocation_and_shares_belong_together(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="'shares' and '--allocation fixed' belong together"):
        make(**values)


@pytest.mark.parametrize("shares", ["0", "0,0,0", [0.0, 0]])
def test_someone_must_have_a_share(shares: object) -> None:
    with pytest.raises(ConfigError, match="'shares' must not all be 0"):
        make(shares=shares, allocation="fixed")


@pytest.mark.parametrize("name", ["shares", "speeds"])
@pytest.mark.parametrize("value", ["-1,2", [1, float("nan")], [float("inf"), 1]])
def test_a_share_or_speed_is_a_finite_number_from_zero(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is out of range"):
        make(**{name: value, "allocation": "fixed" if name == "shares" else "speed"})


@pytest.mark.parametrize("name", ["shares", "speeds"])
@pytest.mark.parametrize("value", ["a,b", 7, [None], "1;2"])
def test_shares_and_speeds_are_lists_of_numbers(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' must be a list of numbers"):
        make(**{name: value, "allocation": "fixed" if name == "shares" else "speed"})


@pytest.mark.parametrize("others", [{}, {"nodes": 2}, {"devices": "cpu,cpu"}])
def test_only_emulated_nodes_can_change_their_speed(others: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"'speed_changes' needs emulated nodes.*--speeds"):
        make(speed_changes="1:0.2@30", **others)


@pytest.mark.parametrize("values", [{"nodes": 2}, {"speeds": "1,1"}, {"devices": "cpu,cpu"}])
def test_a_single_node_is_one(values: dict[str, Any]) -> None:
    words = "the strategy 'single' has one node; got 2.*--strategy lockstep"
    with pytest.raises(ConfigError, match=words):
        make(strategy="single", **values)


def test_a_misspelt_allocation_lists_the_choices_and_suggests_one() -> None:
    with pytest.raises(ConfigError, match=r"allowed: speed, uniform, fixed\. .*'uniform'"):
        make(allocation="unifrom")


# ---------------------------------------------------------------- resuming


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nodes", "auto"),
        ("nodes", "3"),
        ("strategy", "lockstep"),
        ("devices", "cpu,cpu"),
        ("speeds", "0.5,0.5"),
        ("min_nodes", 2),
        ("restarts", 0),
        ("node_timeout_s", 9.0),
        ("quorum_timeout_s", 9.0),
        ("overlap", False),
    ],
)
def test_a_resumed_run_may_have_other_nodes(name: str, value: object) -> None:
    assert changed_on_resume(Config(), {name: value}) == Config().replaced({name: value})


@pytest.mark.parametrize("changes", [{"allocation": "uniform"}, {"wire": "bf16"}, {"min_share": 4}])
def test_a_resumed_run_keeps_how_batches_are_shared(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a resumed run cannot change"):
        changed_on_resume(Config(), changes)


def test_a_resumed_run_is_checked_for_the_laws_again() -> None:
    saved = make(speeds="1,1", nodes=2)
    with pytest.raises(ConfigError, match="disagree on the number of nodes"):
        changed_on_resume(saved, {"nodes": 3})


def test_a_resumed_run_may_repeat_its_nodes_in_any_form() -> None:
    saved = make(shares="3,1", allocation="fixed", nodes=2)
    assert changed_on_resume(saved, {"nodes": "2", "shares": [3, 1]}) == saved
