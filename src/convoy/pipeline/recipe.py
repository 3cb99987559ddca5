"""How a pipeline keeps its accuracy although its stages read weights of some updates ago.

order       how far a stage's forward passes are ahead of its backward passes (schedule.py)
forward     weights that a forward pass reads: as they are, or where they will be by the time of the
            update, `lead` updates later (v the momentum's velocity, r the rate):
              linear    w - r * lead * v
              coasting  w - r * (m + m^2 + ... + m^lead) * v    as if no gradient came meanwhile
backward    weights that a backward pass reads: those of the moment (the paper's); those that its
            forward pass read (stashed); or an estimate of these that needs no copy (predicted):
              w + r * lead * v
compensated a stage's update makes up for gradients that come `lead` updates late:
              w - r * (m^lead * v + (1 - m^lead) / (1 - m) * g)
annealed    epochs over which a stage's rate grows from r / lead to r (PipeMare)
damped      a stale stage's rate is so much of r, all the time (the paper's own)
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_type_hints

from convoy.errors import ConfigError, did_you_mean, unknown_name
from convoy.options import coerce, option

Forward = Literal["current", "linear", "coasting"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The choices; as they stand, what the paper published."""

    order: Literal["stale", "1f1b"] = option("stale", "how far forwards run ahead", group="Recipe")
    forward: Literal["current", "linear", "coasting"] = option(
        "current", "weights that a forward pass reads", group="Recipe"
    )
    backward: Literal["current", "stashed", "predicted"] = option(
        "current", "weights that a backward pass reads", group="Recipe"
    )
    compensated: bool = option(False, "make up for late gradients in the update", group="Recipe")
    annealed: float = option(
        0.0, "epochs until a stage has its whole rate", group="Recipe", at_least=0.0
    )
    damped: float = option(
        1.0, "part of the rate in stale stages", group="Recipe", above=0.0, at_most=1.0
    )

    @property
    def needs_own_weights(self) -> bool:
        """Tell whether a backward pass must read the weights that its forward pass read."""
        return self.backward == "stashed"


RECIPES = {
    "published": Recipe(),
    "pipedream": Recipe(order="1f1b", backward="stashed"),
    "convoy": Recipe(order="1f1b", forward="coasting", backward="stashed"),
}
DEFAULT = "convoy"


def parse_recipe(text: str) -> Recipe:
    """Read NAME, or NAME:choice=value,...

    >>> parse_recipe("published:forward=linear").forward
    'linear'

    Raises:
        ConfigError: there is no such recipe or choice; says which there are.
    """
    name, _, more = text.partition(":")
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    return dataclasses.replace(RECIPES[name], **_changes(more))


def spelled(recipe: Recipe) -> str:
    """Return a recipe choice by choice, so that it means the same whatever names come to mean.

    >>> spelled(RECIPES["pipedream"])
    'published:order=1f1b,backward=stashed'
    """
    published = dataclasses.asdict(RECIPES["published"])
    choices = dataclasses.asdict(recipe).items()
    changes = [f"{n}={str(value).lower()}" for n, value in choices if value != published[n]]
    return f"published:{','.join(changes)}".rstrip(":")


def _changes(text: str) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(Recipe)}
    hints: Mapping[str, Any] = get_type_hints(Recipe)
    changes: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = part.partition("=")
        if name not in fields:
            raise ConfigError(
                "a recipe has no such choice",
                got=name,
                allowed=", ".join(fields),
                hint=did_you_mean(name, fields),
            )
        changes[name] = coerce(name, _value(value), hints[name], fields[name].metadata)
    return changes


def _value(text: str) -> object:
    """Read a value: a number, yes or no, or a word; a choice that stands alone means yes."""
    words: dict[str, object] = {"": True, "yes": True, "true": True, "no": False, "false": False}
    if text in words:
        return words[text]
    try:
        return float(text)
    except ValueError:
        return text


def reach(forward: Forward, updates: int, momentum: float) -> float:
    """Return how much of rate * velocity a prediction goes ahead, over some updates.

    >>> reach("linear", 2, 0.9), round(reach("coasting", 2, 0.9), 6), reach("current", 2, 0.9)
    (2.0, 1.71, 0.0)
    """
    if forward == "current" or momentum == 0:
        return 0.0
    if forward == "linear":
        return float(updates)
    return sum(momentum**step for step in range(1, updates + 1))


def weights_of_update(lead: int, momentum: float, *, nesterov: bool) -> tuple[float, float]:
    """Return how much of velocity and gradient a compensated update takes.

    Nesterov's momentum looks one update ahead: it is the compensation of a lead of one more.

    >>> [round(part, 6) for part in weights_of_update(2, 0.9, nesterov=False)]
    [0.81, 1.9]
    >>> weights_of_update(0, 0.9, nesterov=False), weights_of_update(0, 0.5, nesterov=True)
    ((1.0, 0.0), (0.5, 1.0))
    """
    late = lead + nesterov
    kept = momentum**late
    return kept, (1 - kept) / (1 - momentum)


def rate_factor(recipe: Recipe, lead: int, epochs_done: float) -> float:
    """Return what a stage's rate is multiplied by, so many epochs into the run.

    >>> recipe = Recipe(annealed=10)
    >>> [round(rate_factor(recipe, 2, epochs), 4) for epochs in (0, 5, 10, 99)]
    [0.5, 0.7071, 1.0, 1.0]
    >>> rate_factor(recipe, 0, 0), rate_factor(Recipe(damped=0.1), 2, 0)
    (1.0, 0.1)
    """
    if lead == 0:
        return 1.0
    left = 1 - min(epochs_done / recipe.annealed, 1.0) if recipe.annealed else 0.0
    return cast(float, recipe.damped * lead**-left)
