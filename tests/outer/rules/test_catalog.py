"""Rules by name: whatever is not one of them, or not one of its options, is refused with advice."""

import inspect
from typing import Literal, get_args, get_origin

import pytest

from convoy.errors import ConfigError
from convoy.outer.merger import Merger
from convoy.outer.rules.catalog import RULES, make_rule, parse_rule
from convoy.outer.rules.rule import Submission


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nope", ["unknown rule; got 'nope'", f"allowed: {', '.join(RULES)}"]),
        ("", ["unknown rule; got ''"]),
        ("baet", ["Did you mean 'beat'?"]),
        ("beat:powr=1", ["'beat' has no option 'powr'", "allowed: power", "Did you mean 'power'?"]),
        ("sgwu:power=1", ["'sgwu' has no option 'power'", "allowed: none"]),
        ("beat:", ["'beat' has no option ''", "allowed: power"]),
        ("agwu:scale=foo", ["'agwu:scale'", "got 'foo'", "allowed: version, nodes"]),
        ("agwu:scale=", ["got ''", "allowed: version, nodes"]),
        ("fedasync:part=x", ["'fedasync:part' must be a number", "got 'x'", "0 or more"]),
        ("fedasync:part", ["'fedasync:part' must be a number", "got ''"]),
        ("fedasync:part=-0.1", ["'fedasync:part'", "got '-0.1'", "0 or more"]),
        ("fedasync:part=nan", ["'fedasync:part'", "got 'nan'", "0 or more"]),
        ("delta-poly:rate=inf", ["'delta-poly:rate'", "got 'inf'", "0 or more"]),
        ("fedbuff:size=2.5", ["'fedbuff:size' must be a whole number", "got '2.5'"]),
        ("fedbuff:size=" + "9" * 400, ["'fedbuff:size'", "0 or more"]),
        ("beat:power=1,", ["'beat' has no option ''"]),
    ],
)
def test_a_bad_text_is_refused_and_told_what_is_allowed(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        make_rule(text, 4)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", RULES)
def test_every_rule_takes_each_of_its_options(name: str) -> None:
    parameters = dict(inspect.signature(RULES[name].make).parameters)
    del parameters["nodes"]
    for option, parameter in parameters.items():
        kind = parameter.annotation
        value = get_args(kind)[-1] if get_origin(kind) is Literal else kind(2)
        _, options = parse_rule(f"{name}:{option}={value}")
        assert options == {option: value}
        assert type(options[option]) is type(parameter.default)
        make_rule(f"{name}:{option}={value}", 4)


def one_merge(text: str, **values: float) -> float:
    """Return the weights after one of two nodes has handed in an increment of 1."""
    merger: Merger[float] = Merger(make_rule(text, 2), 0.0)
    merger.join(0)
    if not make_rule(text, 2).has_barrier:
        merger.join(1)
    merger.submit(Submission(0, 1, 1.0, **values))  # type: ignore[arg-type]
    return merger.weights


@pytest.mark.parametrize(
    ("text", "weights"),
    [
        ("beat", 1.0),
        ("beat:power=1", 1.0),
        ("agwu", 0.25),
        ("agwu:quality=off", 0.5),
        ("agwu:scale=nodes,quality=off", 0.5),
        ("fedasync:part=0.25", 0.25),
        ("delta-poly", 0.5),
        ("delta-poly:rate=0.5", 0.25),
        ("fedbuff", 0.0),
        ("fedbuff:size=1,rate=0.5", 0.5),
        ("dc-asgd", 0.5),
        ("diloco:rate=1,momentum=0", 1.0),
        ("delayed-nesterov:momentum=0", 0.5),
        ("delayed-nesterov:momentum=1,every=1", 1.0),
    ],
)
def test_options_reach_the_rule(text: str, weights: float) -> None:
    assert one_merge(text, quality=0.5) == pytest.approx(weights)


def test_a_constant_scale_takes_the_place_of_a_named_one() -> None:
    def stale(text: str) -> float:
        merger: Merger[float] = Merger(make_rule(text, 2), 0.0)
        merger.join(0)
        merger.join(1)
        merger.submit(Submission(0, 1, 0.0))
        merger.submit(Submission(1, 1, 1.0))
        return merger.weights

    assert stale("agwu:constant=2") == pytest.approx(stale("agwu"))  # it is version 2
    assert stale("agwu:constant=100") > stale("agwu:scale=nodes") > stale("agwu:constant=0.1")


def test_without_nodes_a_rule_is_made_for_one() -> None:
    assert one_merge("fedbuff") == 0.0
    merger: Merger[float] = Merger(make_rule("fedbuff", 0), 0.0)
    merger.join(0)
    merger.submit(Submission(0, 1, 1.0))
    assert merger.weights == 1.0
