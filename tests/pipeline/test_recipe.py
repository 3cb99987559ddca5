"""Recipes: how they are written, and what they come to."""

import dataclasses
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.config import Config
from convoy.errors import ConfigError
from convoy.pipeline.recipe import (
    DEFAULT,
    RECIPES,
    Forward,
    Recipe,
    parse_recipe,
    rate_factor,
    reach,
    spelled,
    weights_of_update,
)


def test_the_named_recipes_are_what_they_are_called() -> None:
    assert RECIPES["published"] == Recipe("stale", "current", "current", False, 0.0, 1.0)
    assert RECIPES["pipedream"] == Recipe("1f1b", "current", "stashed")
    assert RECIPES["convoy"] == Recipe("1f1b", "coasting", "stashed")


def test_a_run_takes_the_default() -> None:
    assert Config().recipe == DEFAULT
    assert parse_recipe(Config().recipe) == RECIPES["convoy"]


def test_only_a_stash_needs_the_weights_of_the_forward_pass() -> None:
    assert [
        Recipe(backward="current").needs_own_weights,
        Recipe(backward="stashed").needs_own_weights,
        Recipe(backward="predicted").needs_own_weights,
    ] == [False, True, False]


# ---------------------------------------------------------------- how they are written


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("published", Recipe()),
        ("published:", Recipe()),
        ("published:forward=linear", Recipe(forward="linear")),
        ("published: forward=linear , order=1f1b", Recipe("1f1b", "linear")),
        ("published:compensated", Recipe(compensated=True)),
        ("published:compensated=yes", Recipe(compensated=True)),
        ("published:compensated=true,", Recipe(compensated=True)),
        ("published:compensated=no", Recipe(compensated=False)),
        ("published:compensated=false", Recipe(compensated=False)),
        ("published:annealed=10", Recipe(annealed=10.0)),
        ("published:annealed=0.5,damped=0.1", Recipe(annealed=0.5, damped=0.1)),
        ("published:damped=1", Recipe(damped=1.0)),
        ("published:damped=0.5,damped=0.25", Recipe(damped=0.25)),  # the last word counts
        ("pipedream:backward=predicted", Recipe("1f1b", backward="predicted")),
        ("convoy:forward=current", RECIPES["pipedream"]),
    ],
)
def test_a_recipe_is_a_name_and_what_is_changed(text: str, expected: Recipe) -> None:
    assert parse_recipe(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "publishd",
            "unknown recipe; got 'publishd'; allowed: published, pipedream, convoy. "
            "Did you mean 'published'?",
        ),
        ("", "unknown recipe; got ''; allowed: published, pipedream, convoy"),
        ("Convoy", "unknown recipe; got 'Convoy'"),
        (
            "published:foward=linear",
            "a recipe has no such choice; got 'foward'; "
            "allowed: order, forward, backward, compensated, annealed, damped. "
            "Did you mean 'forward'?",
        ),
        ("published:=1", "a recipe has no such choice; got ''"),
        (
            "published:forward=linaer",
            "'forward' has an unknown value; got 'linaer'; allowed: current, linear, coasting. "
            "Did you mean 'linear'?",
        ),
        ("published:forward", "'forward' has an unknown value; got True"),
        ("published:order=2", "'order' has an unknown value; got 2.0; allowed: stale, 1f1b"),
        ("published:annealed", "'annealed' must be a number; got True"),
        ("published:annealed=long", "'annealed' must be a number; got 'long'"),
        ("published:annealed=-1", "'annealed' is out of range; got -1.0; allowed: at least 0.0"),
        ("published:annealed=inf", "'annealed' is out of range; got inf"),
        ("published:damped=nan", "'damped' is out of range; got nan"),
        (
            "published:damped=0",
            "'damped' is out of range; got 0.0; allowed: above 0.0, at most 1.0",
        ),
        ("published:damped=1.5", "'damped' is out of range; got 1.5"),
        ("published:compensated=2", "'compensated' must be true or false; got 2.0"),
        ("published:compensated=maybe", "'compensated' must be true or false; got 'maybe'"),
    ],
)
def test_what_is_no_recipe_is_refused_with_what_is(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_recipe(text)
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


_CHOICES = {
    "order": ("stale", "1f1b"),
    "forward": get_args(Forward),
    "backward": ("current", "stashed", "predicted"),
}


@given(
    st.sampled_from(list(RECIPES)),
    st.fixed_dictionaries(
        {},
        optional={
            **{name: st.sampled_from(values) for name, values in _CHOICES.items()},
            "compensated": st.booleans(),
            "annealed": st.floats(0, 1e6),
            "damped": st.floats(0.001, 1),
        },
    ),
)
def test_whatever_is_allowed_is_read_as_it_was_written(
    name: str, changes: dict[str, object]
) -> None:
    text = ",".join(f"{key}={str(value).lower()}" for key, value in changes.items())
    expected = dataclasses.asdict(RECIPES[name]) | changes
    recipe = parse_recipe(f"{name}:{text}")
    assert dataclasses.asdict(recipe) == expected
    assert parse_recipe(spelled(recipe)) == recipe


# ---------------------------------------------------------------- what they come to


def test_a_prediction_reaches_as_far_as_the_papers_say() -> None:
    assert reach("linear", 2, 0.9) == 2.0
    assert reach("coasting", 2, 0.9) == pytest.approx(1.71)
    assert reach("coasting", 1, 0.9) == pytest.approx(0.9)


@given(st.sampled_from(get_args(Forward)), st.integers(0, 12), st.floats(0, 0.999))
def test_a_prediction_never_goes_further_than_steady_velocity(
    forward: Forward, updates: int, momentum: float
) -> None:
    found = reach(forward, updates, momentum)
    assert 0 <= found <= updates
    if forward == "current" or momentum == 0 or updates == 0:
        assert found == 0
    if forward == "coasting":
        closed = (momentum - momentum ** (updates + 1)) / (1 - momentum)
        assert found == pytest.approx(closed, abs=1e-9)


@pytest.mark.parametrize(
    ("lead", "momentum", "nesterov", "expected"),
    [
        (2, 0.9, False, (0.81, 1.9)),
        (0, 0.9, False, (1.0, 0.0)),  # plain SGD
        (0, 0.9, True, (0.9, 1.0)),  # Nesterov's
        (1, 0.9, True, (0.81, 1.9)),
        (4, 0.0, False, (0.0, 1.0)),
    ],
)
def test_a_compensated_update(
    lead: int, momentum: float, nesterov: bool, expected: tuple[float, float]
) -> None:
    assert weights_of_update(lead, momentum, nesterov=nesterov) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("recipe", "lead", "epochs", "expected"),
    [
        (Recipe(), 4, 0.0, 1.0),
        (Recipe(annealed=10), 2, 0.0, 0.5),
        (Recipe(annealed=10), 2, 5.0, 0.5**0.5),
        (Recipe(annealed=10), 2, 10.0, 1.0),
        (Recipe(annealed=10), 2, 99.0, 1.0),
        (Recipe(annealed=10), 4, 0.0, 0.25),
        (Recipe(annealed=10), 1, 0.0, 1.0),
        (Recipe(annealed=10, damped=0.1), 0, 0.0, 1.0),  # the last stage is never stale
        (Recipe(damped=0.1), 2, 0.0, 0.1),
        (Recipe(damped=0.1), 2, 99.0, 0.1),
        (Recipe(annealed=10, damped=0.1), 2, 5.0, 0.1 * 0.5**0.5),
    ],
)
def test_a_stages_rate(recipe: Recipe, lead: int, epochs: float, expected: float) -> None:
    assert rate_factor(recipe, lead, epochs) == pytest.approx(expected)


@given(st.integers(1, 12), st.floats(0.1, 50), st.floats(0.01, 1), st.floats(0, 99))
def test_a_stages_rate_only_grows_and_never_beyond_its_part(
    lead: int, annealed: float, damped: float, epochs: float
) -> None:
    recipe = Recipe(annealed=annealed, damped=damped)
    now, later = rate_factor(recipe, lead, epochs), rate_factor(recipe, lead, epochs + 1)
    assert damped / lead - 1e-12 <= now <= later <= damped
