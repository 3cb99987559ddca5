"""The rules by name, with their options: "fedasync:part=0.5,power=1".

Each entry makes a rule for so many nodes. Options are its keyword arguments; whatever is not
one of them, or not of its type, is refused before anything is trained.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from convoy.errors import ConfigError, did_you_mean, unknown_name
from convoy.outer.rules.agwu import Agwu
from convoy.outer.rules.beat import Beat
from convoy.outer.rules.dcasgd import DcAsgd
from convoy.outer.rules.delta import Delta, FedBuff
from convoy.outer.rules.discount import polynomial
from convoy.outer.rules.fedasync import FedAsync
from convoy.outer.rules.nesterov import DelayedNesterov, Nesterov
from convoy.outer.rules.rule import Rule
from convoy.outer.rules.sgwu import fedavg, plain_mean, sgwu


@dataclass(frozen=True, slots=True)
class Choice:
    """A rule that can be chosen.

    Attributes:
        make: makes it for so many nodes, with its options.
        description: a line on what it does.
        by_speed: nodes get work by speed, so that all hand in at the same moment; otherwise
            all of them do equal local steps, the fast ones more often.
    """

    make: Callable[..., Rule]
    description: str
    by_speed: bool


def _agwu(
    nodes: int,
    scale: Literal["version", "nodes"] = "version",
    constant: float = 0.0,
    quality: Literal["raw", "relative", "off"] = "raw",
) -> Rule:
    del nodes
    return Agwu(constant or scale, quality)


def _beat(nodes: int, power: float = 0.5) -> Rule:
    del nodes
    return Beat(polynomial(power))


def _delta(nodes: int, power: float = 0.5, rate: float = 1.0) -> Rule:
    del nodes
    return Delta(polynomial(power), rate)


def _fedasync(nodes: int, part: float = 0.6, power: float = 0.5) -> Rule:
    del nodes
    return FedAsync(part, polynomial(power))


def _fedbuff(nodes: int, size: int = 0, power: float = 0.5, rate: float = 1.0) -> Rule:
    return FedBuff(size or nodes, polynomial(power), rate)


def _dcasgd(nodes: int, strength: float = 0.04) -> Rule:
    del nodes
    return DcAsgd(strength)


def _diloco(nodes: int, rate: float = 0.7, momentum: float = 0.9) -> Rule:
    del nodes
    return Nesterov(fedavg(), rate, momentum)


def _delayed(nodes: int, rate: float = 1.0, momentum: float = 0.9, every: int = 0) -> Rule:
    return DelayedNesterov(Delta(), every or nodes, rate, momentum)


RULES: dict[str, Choice] = {
    "beat": Choice(_beat, "the mean over samples, once a beat; late ones count in the next", True),
    "agwu": Choice(_agwu, "BPT-CNN's asynchronous rule, as reconstructed", False),
    "sgwu": Choice(lambda nodes: sgwu(), "BPT-CNN's synchronous rule, as reconstructed", True),
    "mean": Choice(lambda nodes: plain_mean(), "the plain mean of all nodes' weights", True),
    "fedavg": Choice(lambda nodes: fedavg(), "the mean over samples of all nodes' weights", True),
    "delta-poly": Choice(_delta, "every increment at once, discounted for its age", False),
    "fedasync": Choice(_fedasync, "the weights move towards each node's own", False),
    "fedbuff": Choice(_fedbuff, "increments are collected and added together", False),
    "dc-asgd": Choice(_dcasgd, "increments corrected for what has changed since", False),
    "diloco": Choice(_diloco, "fedavg's change as a gradient for Nesterov momentum", True),
    "delayed-nesterov": Choice(_delayed, "delta-poly, and momentum once in a while", False),
}


def make_rule(text: str, nodes: int) -> Rule:
    """Return the rule that a text names, for so many nodes.

    Raises:
        ConfigError: there is no such rule, or it has no such option.
    """
    choice, options = parse_rule(text)
    return choice.make(max(1, nodes), **options)


def parse_rule(text: str) -> tuple[Choice, dict[str, Any]]:
    """Read "NAME" or "NAME:option=value,..."."""
    name, colon, rest = text.partition(":")
    if name not in RULES:
        raise unknown_name("rule", name, RULES)
    choice = RULES[name]
    known = dict(inspect.signature(choice.make).parameters)
    del known["nodes"]
    options = {}
    for item in rest.split(",") if colon else ():
        key, _, value = item.partition("=")
        if key not in known:
            raise ConfigError(
                f"the rule '{name}' has no option '{key}'",
                allowed=", ".join(known) or "none",
                hint=did_you_mean(key, known),
            )
        options[key] = _value(f"{name}:{key}", value, known[key].annotation)
    return choice, options


def _value(name: str, text: str, hint: Any) -> Any:  # noqa: ANN401 - of the option's own type
    if get_origin(hint) is Literal:
        if text not in get_args(hint):
            raise ConfigError(
                f"'{name}' is not one of its values", got=text, allowed=", ".join(get_args(hint))
            )
        return text
    try:
        value = hint(text)
        is_usable = math.isfinite(value) and value >= 0
    except (ValueError, OverflowError):
        is_usable = False
    if not is_usable:
        kind = "a whole number" if hint is int else "a number"
        raise ConfigError(f"'{name}' must be {kind}", got=text, allowed="0 or more")
    return value
