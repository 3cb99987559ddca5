"""Errors: what a message holds, in which order, and the exit code it ends the program with."""

import pytest

from convoy.errors import (
    BadSampleError,
    CheckpointError,
    ConfigError,
    ConvoyError,
    DataError,
    EnvironmentProblem,
    Interrupted,
    StorageError,
    did_you_mean,
    unknown_name,
)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (ConvoyError, 1),
        (BadSampleError, 1),
        (StorageError, 1),
        (ConfigError, 2),
        (DataError, 2),
        (CheckpointError, 2),
        (EnvironmentProblem, 3),
        (Interrupted, 130),
    ],
)
def test_each_error_is_a_convoy_error_with_its_exit_code(
    kind: type[ConvoyError], code: int
) -> None:
    assert issubclass(kind, ConvoyError)
    assert kind("x").exit_code == code


def test_message_says_what_got_allowed_and_hint_in_that_order() -> None:
    error = ConvoyError("'lr' is wrong", got="fast", allowed="a number", hint="Give --lr 0.1.")
    assert str(error) == "'lr' is wrong; got 'fast'; allowed: a number. Give --lr 0.1."


def test_message_without_facts_is_the_statement_alone() -> None:
    assert str(ConvoyError("it failed")) == "it failed"


@pytest.mark.parametrize("got", [0, "", False, 0.0, ()])
def test_what_was_given_is_shown_even_if_it_is_empty_or_zero(got: object) -> None:
    assert str(ConvoyError("wrong", got=got)) == f"wrong; got {got!r}"


def test_a_given_text_with_line_breaks_stays_on_one_line() -> None:
    assert "\n" not in str(ConvoyError("wrong", got="a\nb"))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("epoch", "Did you mean 'epochs'?"),
        ("bacth", "Did you mean 'batch'?"),
        ("zzzzzz", None),
        ("", None),
    ],
)
def test_suggestion_is_the_closest_name_or_none(given: str, expected: str | None) -> None:
    assert did_you_mean(given, ["epochs", "batch", "lr"]) == expected


def test_unknown_name_lists_the_known_ones_and_suggests_the_closest() -> None:
    error = unknown_name("model", "lenet", iter(["lenet5", "vgg16"]), or_else="MODULE:CALLABLE")
    assert isinstance(error, ConfigError)
    assert str(error) == (
        "unknown model; got 'lenet'; allowed: lenet5, vgg16, MODULE:CALLABLE. "
        "Did you mean 'lenet5'?"
    )


def test_unknown_name_far_from_all_has_no_suggestion() -> None:
    assert str(unknown_name("model", "qqq", ["lenet5"])) == (
        "unknown model; got 'qqq'; allowed: lenet5"
    )
