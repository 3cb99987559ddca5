"""The options of the commands, derived from the config so that they are declared once."""

import dataclasses
import types
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from cyclopts import Group, Parameter, Token

from convoy.config import FIELDS, HINTS

_GROUPS = {
    name: Group(name, sort_key=number)
    for number, name in enumerate(
        ("Data", "Model", "Nodes", "Server", "Pipeline", "Hybrid", "Training", "Machine", "Output"),
        start=1,
    )
}


def _optional(name: str) -> Any:  # noqa: ANN401 - a type made at run time
    """Return a field's type for the command line: None means that it was not given there."""
    field, hint = FIELDS[name], HINTS[name]
    if get_origin(hint) is tuple:
        hint = str  # "60,80"; the config splits it
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(arm for arm in get_args(hint) if arm is not type(None))
    default, words = field.default, field.metadata["words"]
    if words:
        hint = str  # "4" or "auto"; the config turns it into a number
    shown = "" if default in (None, ()) else _shown(default, words)
    parameter = Parameter(
        help=field.metadata["help"],
        group=_GROUPS[field.metadata["group"]],
        env_var=f"CONVOY_{name.upper()}",
        show_env_var=False,
        show_default=(lambda _: shown) if shown else False,
        converter=whole_number if hint is int else None,
    )
    return Annotated[hint | None, parameter]


def _shown(default: object, words: dict[str, int]) -> str:
    return next((word for word, value in words.items() if value == default), str(default))


def whole_number(kind: type, tokens: Sequence[Token]) -> int:
    """Take whole numbers only: left to itself the parser rounds 1.5 to 2."""
    del kind
    text = tokens[0].value
    try:
        return int(text)
    except ValueError:
        raise ValueError(f'a whole number is needed, got "{text}"') from None


def _make_options_class(title: str, names: Iterable[str]) -> type:
    """Build a dataclass with some fields of the config, each optional."""
    fields = [(name, _optional(name), None) for name in names]
    made = dataclasses.make_dataclass(title, fields, frozen=True, kw_only=True)
    made.__module__ = __name__  # cyclopts looks annotations up there
    return Parameter(name="*")(made)


def _decides_a_step(name: str) -> bool:
    """Tell whether a field matters for a single step on one node, by any executor."""
    of_training = ("batch", "momentum", "nesterov", "weight_decay", "label_smoothing", "seed")
    group = FIELDS[name].metadata["group"]
    return name in of_training or (group in ("Data", "Model", "Machine") and name != "executor")


Options = _make_options_class("Options", FIELDS)
StepOptions = _make_options_class("StepOptions", filter(_decides_a_step, FIELDS))


def given_values(options: object) -> dict[str, Any]:
    """Return the options that were given, by flag or by environment."""
    values = {name: getattr(options, name, None) for name in FIELDS}
    return {name: value for name, value in values.items() if value is not None}
