"""The configuration: types, ranges, laws, files, and what a resume may change."""

import dataclasses
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.config import (
    FIELDS,
    HINTS,
    Config,
    changed_on_resume,
    load_config,
    read_toml,
)
from convoy.errors import ConfigError
from convoy.storage.runfolder import config_text

_GROUPS = (
    "Data",
    "Model",
    "Nodes",
    "Server",
    "Pipeline",
    "Hybrid",
    "Training",
    "Machine",
    "Output",
)


def make(**values: Any) -> Config:
    """Return a config in which ranges can be tried without meeting the laws between fields."""
    lawful = {"epochs": 1, "warmup_epochs": 0.0, "nesterov": False, "strategy": "pipeline"}
    return Config(**{**lawful, **values})


def _bounded(bound: str) -> list[str]:
    return [name for name, field in FIELDS.items() if field.metadata[bound] is not None]


def _numeric() -> list[str]:
    return [name for name, hint in HINTS.items() if hint in (int, float)]


def _step(name: str) -> float:
    return 1 if HINTS[name] is int else 1e-6


def _edge(name: str, bound: str) -> Any:
    return HINTS[name](FIELDS[name].metadata[bound])


def test_defaults_are_valid_and_of_their_declared_types() -> None:
    config = Config()
    assert config.replaced(config.as_dict()) == config


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().lr = 1.0  # type: ignore[misc]


def test_every_field_has_help_and_a_group() -> None:
    for field in FIELDS.values():
        assert field.metadata["help"].endswith(".")
        assert field.metadata["group"] in _GROUPS


@pytest.mark.parametrize("name", _bounded("at_least"))
def test_lowest_value_is_taken_and_the_next_below_refused(name: str) -> None:
    low = _edge(name, "at_least")
    assert getattr(make(**{name: low}), name) == low
    with pytest.raises(ConfigError, match=f"'{name}' is out of range; got .*allowed: at least"):
        make(**{name: low - _step(name)})


@pytest.mark.parametrize("name", _bounded("at_most"))
def test_highest_value_is_taken_and_the_next_above_refused(name: str) -> None:
    high = _edge(name, "at_most")
    assert getattr(make(**{name: high}), name) == high
    with pytest.raises(ConfigError, match=f"'{name}' is out of range; got .*at most"):
        make(**{name: high + _step(name)})


@pytest.mark.parametrize("name", _bounded("above"))
def test_open_bound_itself_is_refused_and_the_next_above_taken(name: str) -> None:
    bound = _edge(name, "above")
    assert getattr(make(**{name: bound + 1e-6}), name) == bound + 1e-6
    with pytest.raises(ConfigError, match=f"'{name}' is out of range; got .*above"):
        make(**{name: bound})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [name for name in _numeric() if HINTS[name] is float])
def test_no_number_may_be_infinite_or_nan(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is out of range"):
        make(**{name: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_milestones_are_epochs_so_none_is_nan_infinite_or_negative(value: float) -> None:
    with pytest.raises(ConfigError, match="'milestones'"):
        make(schedule="step", milestones=(value,))


@pytest.mark.parametrize("name", ["threads", "lr"])
def test_a_number_of_400_digits_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'"):
        make(**{name: 10**400})


@pytest.mark.parametrize("name", _numeric())
def test_true_is_no_number(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' must be a .*number; got True"):
        make(**{name: True})


@pytest.mark.parametrize("value", ["one", None, [1], {"a": 1}, 1j])
@pytest.mark.parametrize("name", _numeric())
def test_only_a_number_is_a_number(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' must be"):
        make(**{name: value})


@pytest.mark.parametrize("value", ["1", "auto", "none"])
@pytest.mark.parametrize("name", [n for n in _numeric() if not FIELDS[n].metadata["words"]])
def test_a_text_is_no_number_where_no_words_are_declared(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' must be"):
        make(**{name: value})


@pytest.mark.parametrize("name", [name for name in HINTS if HINTS[name] is int])
def test_a_fraction_is_no_whole_number(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' must be a whole number; got 1.5"):
        make(**{name: 1.5})


@pytest.mark.parametrize("name", [name for name in HINTS if HINTS[name] is bool])
@pytest.mark.parametrize("value", [1, 0, "true", None, 1.0])
def test_only_true_and_false_are_switches(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' must be true or false"):
        make(**{name: value})


@pytest.mark.parametrize("name", ["data", "model", "strategy", "executor", "device"])
@pytest.mark.parametrize("value", [1, None, True, ["x"]])
def test_only_a_text_is_a_name(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' must be a text"):
        make(**{name: value})


@pytest.mark.parametrize("name", ["data_dir", "cache_dir", "out"])
def test_a_folder_may_be_a_text_a_path_or_nothing_but_no_number(name: str) -> None:
    assert getattr(make(**{name: None}), name) is None
    assert getattr(make(**{name: Path("a/b")}), name) == "a/b"
    with pytest.raises(ConfigError, match=f"'{name}' must be a text; got 7"):
        make(**{name: 7})


@pytest.mark.parametrize("name", [name for name in HINTS if HINTS[name] is float])
def test_a_whole_number_is_taken_where_a_number_is_due(name: str) -> None:
    facts = FIELDS[name].metadata
    low = math.ceil(facts["at_least"]) if facts["above"] is None else math.floor(facts["above"]) + 1
    if facts["at_most"] is not None and low > facts["at_most"]:  # there is no whole number in it
        with pytest.raises(ConfigError, match="out of range"):
            make(**{name: 1})
        return
    value = getattr(make(**{name: low}), name)
    assert value == low
    assert type(value) is float


@pytest.mark.parametrize("name", [n for n in HINTS if isinstance(FIELDS[n].default, str)])
def test_a_misspelt_choice_lists_the_choices_and_suggests_one(name: str) -> None:
    if get_origin(HINTS[name]) is None:
        return  # a free text: registries and catalogues check it
    choice = HINTS[name].__args__[-1]
    with pytest.raises(ConfigError) as caught:
        make(**{name: choice[:-1]})
    assert f"'{name}' has an unknown value; got '{choice[:-1]}'; allowed: " in str(caught.value)
    assert f"Did you mean '{choice}'?" in str(caught.value)


@pytest.mark.parametrize("value", [1, None, True, ["cosine"], {"a": 1}])
def test_a_choice_of_another_type_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"'schedule' has an unknown value; .*cosine, step"):
        make(schedule=value)


@pytest.mark.parametrize("value", ["1,2", "1, 2.0", [1, 2], (1.0, 2.0), ["1", "2"]])
def test_milestones_come_from_text_or_lists(value: object) -> None:
    assert make(schedule="step", milestones=value).milestones == (1.0, 2.0)


@pytest.mark.parametrize("value", ["", [], ()])
def test_no_milestones_is_an_empty_tuple(value: object) -> None:
    assert make(schedule="step", milestones=value).milestones == ()


@pytest.mark.parametrize("value", ["x", "1;2", 3, None, [None], [[1]], {"a": 1}])
def test_milestones_of_no_numbers_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="'milestones' must be a list of numbers"):
        make(schedule="step", milestones=value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nesterov": True, "momentum": 0.0}, "'nesterov' needs momentum.*--no-nesterov"),
        ({"warmup_epochs": 2, "epochs": 1}, "'warmup_epochs' is longer.*at most epochs = 1"),
        ({"milestones": "1"}, "'milestones' belong to the step schedule.*--schedule step"),
        ({"schedule": "step", "milestones": "2,1"}, "'milestones' must rise"),
        ({"schedule": "step", "milestones": "1,1"}, "'milestones' must rise"),
    ],
)
def test_laws_between_fields(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"nesterov": True, "momentum": 0.1},
        {"warmup_epochs": 1, "epochs": 1},
        {"schedule": "step", "milestones": "1,2"},
        {"crop_padding": 2, "augment": "crop"},
        {"crop_padding": 2, "augment": "auto"},
    ],
)
def test_what_keeps_the_laws_is_taken(values: dict[str, Any]) -> None:
    for name in values:
        assert getattr(make(**values), name) is not None


def test_replaced_checks_names_and_values_again() -> None:
    assert Config().replaced({"lr": 1}).lr == 1.0
    with pytest.raises(ConfigError, match="unknown option 'learning'"):
        Config().replaced({"learning": 1})
    with pytest.raises(ConfigError, match="out of range"):
        Config().replaced({"lr": -1.0})


def test_unknown_name_far_from_all_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown option 'qqqq'\. Known: data, data_dir, "):
        Config().replaced({"qqqq": 1})


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_toml_with_an_unknown_key_names_file_key_and_suggestion(tmp_path: Path) -> None:
    path = _write(tmp_path / "run.toml", "epoch = 3")
    with pytest.raises(ConfigError) as caught:
        read_toml(path)
    assert str(caught.value) == f"unknown option 'epoch' in {path}. Did you mean 'epochs'?"


def test_toml_table_is_an_unknown_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown option 'train'"):
        read_toml(_write(tmp_path / "run.toml", "[train]\nepochs = 3"))


def _invalid(path: Path) -> Path:
    return _write(path / "run.toml", "epochs = = 1")


def _not_utf8(path: Path) -> Path:
    (path / "run.toml").write_bytes(b'data = "caf\xe9"')
    return path / "run.toml"


def _below_a_file(path: Path) -> Path:
    return _write(path / "file", "") / "run.toml"


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda path: path / "none.toml", "the run file does not exist; got .*none.toml"),
        (lambda path: path, "the run file is a folder; got .*--resume FOLDER"),
        (_invalid, "run.toml is not valid TOML: .*line 1"),
        (_not_utf8, "the run file cannot be read: .*utf-8.*; got .*run.toml"),
        (_below_a_file, "the run file cannot be read: .*; got .*run.toml"),
    ],
)
def test_unreadable_toml_is_named(
    tmp_path: Path, prepare: Callable[[Path], Path], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_toml(prepare(tmp_path))


def test_file_is_over_defaults_and_given_values_are_over_the_file(tmp_path: Path) -> None:
    path = _write(tmp_path / "run.toml", "epochs = 7\nbatch = 8\nmilestones = [1, 2.5]")
    config = load_config(path, {"batch": 9, "schedule": "step"})
    assert (config.epochs, config.batch, config.lr) == (7, 9, Config().lr)
    assert config.milestones == (1.0, 2.5)


def test_without_a_file_the_given_values_are_over_the_defaults() -> None:
    assert load_config(None, {"batch": 9}) == Config(batch=9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 30),
        ("target_accuracy", 0.9),
        ("stop_after", 2),
        ("threads", 2),
        ("device", "cpu"),
        ("data_dir", "elsewhere"),
        ("cache_dir", "elsewhere"),
        ("checkpoint_steps", 5),
        ("log_interval_s", 2.0),
    ],
)
def test_resume_may_change_what_falsifies_nothing(name: str, value: object) -> None:
    assert changed_on_resume(Config(), {name: value}) == Config().replaced({name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", 0.2),
        ("batch", 65),
        ("seed", 1),
        ("model", "resnet20"),
        ("data", "mnist"),
        ("precision", "bf16"),
        ("schedule", "constant"),
        ("nesterov", False),
        ("augment", "none"),
        ("label_smoothing", 0.1),
    ],
)
def test_resume_may_not_change_what_decides_the_result(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        changed_on_resume(Config(), {name: value})
    text = str(caught.value)
    assert text.startswith(f"a resumed run cannot change '{name}'; got {value!r}; allowed: ")
    assert "epochs" in text
    assert text.endswith("Start a new run instead.")


def test_resume_may_repeat_the_saved_value_in_any_form() -> None:
    saved = make(schedule="step", milestones="1,2", lr=1)
    assert changed_on_resume(saved, {"milestones": [1, 2], "lr": 1, "seed": 0}) == saved


def test_resume_checks_names_and_values() -> None:
    with pytest.raises(ConfigError, match="unknown option 'epoch'"):
        changed_on_resume(Config(), {"epoch": 1})
    with pytest.raises(ConfigError, match="'epochs' must be a whole number"):
        changed_on_resume(Config(), {"epochs": "3"})


PRINTABLE = st.characters(codec="utf-8").filter(str.isprintable)


@given(
    values=st.fixed_dictionaries(
        {},
        optional={
            "data": st.text(PRINTABLE),
            "model": st.text(PRINTABLE),
            "data_dir": st.none() | st.text(PRINTABLE),
            "epochs": st.integers(1, 10**12),
            "batch": st.integers(1, 10**12),
            "lr": st.floats(0, 1e300),
            "weight_decay": st.floats(0, 1, allow_subnormal=True),
            "test_fraction": st.floats(1e-9, 0.9),
            "mirrored_test": st.booleans(),
            "augment": st.sampled_from(["auto", "none", "crop", "flip", "crop+flip"]),
            "seed": st.integers(0, 2**62),
            "log_interval_s": st.floats(0.1, 1e9),
        },
    ),
    milestones=st.lists(st.floats(0, 1e6), unique=True).map(sorted),
)
def test_saved_text_gives_the_same_config_back(
    values: dict[str, Any], milestones: list[float]
) -> None:
    config = make(schedule="step", milestones=milestones, **values)
    assert Config(**tomllib.loads(config_text(config))) == config
