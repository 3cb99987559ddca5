"""The words that all rules share, and the contract that each keeps.

A node pulls the global weights of some version, trains on its own samples and submits what has
changed. A rule says what the global weights become. Weights may be anything that adds up and
scales: a tensor in a run, an array or a number in a test. No rule knows which.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

Weights = TypeVar("Weights", bound=Any)


@dataclass(frozen=True, slots=True)
class Submission(Generic[Weights]):
    """What a node hands in.

    Attributes:
        node: who.
        base: the version it trained from.
        increment: its weights now minus the weights of that version.
        samples: how many it has trained for it.
        quality: accuracy of its weights, as a fraction.
        rate: learning rate times steps, which turns the increment into a mean gradient.
    """

    node: int
    base: int
    increment: Weights
    samples: int = 1
    quality: float = 1.0
    rate: float = 1.0


def add_scaled(weights: Weights, increment: Weights, factor: float) -> Weights:
    """Return weights with some of an increment."""
    return weights + increment * factor  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class World(Generic[Weights]):
    """What the service knows when a rule is asked.

    Attributes:
        weights: the global weights.
        version: their number; every merge makes one more.
        bases: the version that each live node trains from.
        outstanding: the weights of those versions, where a rule needs them.
        qualities: the last accuracy each live node has reported.
        memory: what the rule itself wants to remember, by name.
        add: `add_scaled`, or what gives the same and knows better where to put it.
    """

    weights: Weights
    version: int
    bases: Mapping[int, int]
    outstanding: Mapping[int, Weights] = field(default_factory=dict)
    qualities: Mapping[int, float] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)
    add: Callable[[Weights, Weights, float], Weights] = add_scaled

    def staleness(self, submission: Submission[Weights]) -> int:
        """Return how many versions a submission has missed."""
        return self.version - submission.base


@dataclass(frozen=True, slots=True)
class Merged(Generic[Weights]):
    """What a rule makes of the world: new weights, and what it wants to remember."""

    weights: Weights
    memory: Mapping[str, Any] = field(default_factory=dict)


class Rule(Protocol):
    """How submissions become new weights.

    Attributes:
        has_barrier: nodes wait for each other; all of them get the merged weights.
        has_window: those who are late are not waited for without end, but count later.
        needs_base: it reads the weights that a submission was trained from.
    """

    has_barrier: bool
    has_window: bool
    needs_base: bool

    def is_complete(self, pending: Sequence[Submission[Any]], live: Sequence[int]) -> bool:
        """Tell whether these submissions are enough for a new version."""
        ...

    def merge(
        self, world: World[Weights], pending: Sequence[Submission[Weights]]
    ) -> Merged[Weights]:
        """Return the weights of the next version."""
        ...


class AtOnce:
    """Half of an asynchronous rule: each submission makes a version by itself."""

    has_barrier = False
    has_window = False
    needs_base = False

    def is_complete(self, pending: Sequence[Submission[Any]], live: Sequence[int]) -> bool:
        """One is enough."""
        del live
        return len(pending) > 0


class Together:
    """Half of a synchronous rule: a version needs a submission of every live node."""

    has_barrier = True
    has_window = False
    needs_base = True

    def is_complete(self, pending: Sequence[Submission[Any]], live: Sequence[int]) -> bool:
        """Everybody who lives must have handed in."""
        return bool(pending) and {s.node for s in pending} >= set(live)


def weighted_mean(
    world: World[Weights], pending: Sequence[Submission[Weights]], parts: Sequence[float]
) -> Weights:
    """Return the mean of the nodes' own weights; all parts zero: the plain mean."""
    whole = sum(parts)
    if whole <= 0:
        parts, whole = [1.0] * len(pending), float(len(pending))
    total: Any = None
    for submission, part in zip(pending, parts, strict=True):
        local = world.outstanding[submission.base] + submission.increment
        scaled = local * (part / whole)
        total = scaled if total is None else total + scaled
    return total  # type: ignore[no-any-return]
