"""One option: its default, help, type and range, declared once and checked everywhere alike."""

import dataclasses
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from convoy.errors import ConfigError, did_you_mean

T = TypeVar("T")

_LARGEST = 2**62  # whole numbers beyond do not fit into a tensor


def option(
    default: T,
    help_text: str,
    *,
    group: str,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    on_resume: bool = False,
    kept: bool = True,
    words: Mapping[str, int] | None = None,
) -> T:
    """Declare an option.

    Args:
        default: its value where none is given.
        help_text: what it means.
        group: the heading it stands under.
        at_least: the lowest value allowed.
        at_most: the highest value allowed.
        above: a bound that the value must exceed.
        on_resume: a resumed run may change it.
        kept: it belongs to the run, not to this one start of it, and is saved with the run.
        words: names for some values of a number, such as "auto" for 0.
    """
    facts = {
        "help": help_text,
        "group": group,
        "at_least": at_least,
        "at_most": at_most,
        "above": above,
        "on_resume": on_resume,
        "kept": kept,
        "words": dict(words or {}),
    }
    # Typed as the value it holds once the record is made, as dataclasses.field itself is.
    return dataclasses.field(default=default, metadata=facts)


def coerce(name: str, value: object, hint: Any, facts: Mapping[str, Any]) -> object:  # noqa: ANN401
    """Return a value in its declared type and range, or say what is wrong with it."""
    if facts["words"] and isinstance(value, str):
        value = _from_words(name, value, facts["words"])
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        hint = next(arm for arm in get_args(hint) if arm is not type(None))
    if get_origin(hint) is Literal:
        return _coerce_choice(name, value, get_args(hint))
    if get_origin(hint) is tuple:
        return _coerce_numbers(name, value)
    return _check_range(name, _coerce_scalar(name, value, hint), facts)


def _from_words(name: str, value: str, words: Mapping[str, int]) -> int:
    """Take a number by its name, or as the command line gives it."""
    if value in words:
        return words[value]
    try:
        return int(value)
    except ValueError:
        allowed = f"a whole number or {', '.join(words)}"
        raise ConfigError(f"'{name}' must be a number", got=value, allowed=allowed) from None


def _coerce_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    if value not in choices:
        suggestion = did_you_mean(value, choices) if isinstance(value, str) else None
        raise ConfigError(
            f"'{name}' has an unknown value",
            got=value,
            allowed=", ".join(choices),
            hint=suggestion,
        )
    return str(value)


def _coerce_numbers(name: str, value: object) -> tuple[float, ...]:
    """Take a list of numbers, or the command line's "60,80"."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise ConfigError(f"'{name}' must be a list of numbers", got=value)
    try:
        numbers = tuple(float(item) for item in items if item != "")
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"'{name}' must be a list of numbers", got=value) from None
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ConfigError(f"'{name}' is out of range", got=value, allowed="at least 0, finite")
    return numbers


def _coerce_scalar(name: str, value: object, kind: type) -> object:
    # bool is a subclass of int, so `epochs = true` must be refused by hand.
    fits = isinstance(value, kind) and not (isinstance(value, bool) and kind is not bool)
    if kind is str and isinstance(value, str | Path):
        return _check_text(name, str(value))
    if fits:
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) <= _LARGEST else math.inf
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    raise ConfigError(f"'{name}' must be {words[kind]}", got=value)


def _check_text(name: str, value: str) -> str:
    """Refuse what no file name or file of ours could hold."""
    if "\0" in value or not value.isprintable():
        raise ConfigError(f"'{name}' holds characters that cannot be printed", got=value)
    return value


def _check_range(name: str, value: object, facts: Mapping[str, Any]) -> object:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return value
    low, high, above = facts["at_least"], facts["at_most"], facts["above"]
    holdable = math.isfinite(value) if isinstance(value, float) else abs(value) <= _LARGEST
    good = (
        holdable
        and (low is None or value >= low)
        and (high is None or value <= high)
        and (above is None or value > above)
    )
    if not good:
        bounds = [(f"at least {low}", low), (f"above {above}", above), (f"at most {high}", high)]
        allowed = [text for text, bound in bounds if bound is not None]
        raise ConfigError(
            f"'{name}' is out of range", got=value, allowed=", ".join([*allowed, "finite"])
        )
    return value
