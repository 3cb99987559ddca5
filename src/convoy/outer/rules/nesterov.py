"""An outer optimizer over any rule: what the rule would change is taken for a gradient.

    diloco   M <- beta M + G;  W <- W + rate (G + beta M)     at every version
    delayed  W <- W + rate G / N  at every version; at every N-th also
             M <- beta M + mean G;  W <- W + rate beta M

The second is for asynchronous rules, where momentum at every version would count stale
directions many times over.
"""

from collections.abc import Sequence
from typing import Any

from convoy.outer.rules.rule import Merged, Rule, Submission, Weights, World


class _Wrapped:
    """A rule inside another."""

    def __init__(self, inner: Rule, rate: float, momentum: float) -> None:
        self._inner = inner
        self._rate = rate
        self._momentum = momentum
        self.has_barrier = inner.has_barrier
        self.has_window = inner.has_window
        self.needs_base = inner.needs_base

    def is_complete(self, pending: Sequence[Submission[Any]], live: Sequence[int]) -> bool:
        """Leave it to the rule inside."""
        return self._inner.is_complete(pending, live)


class Nesterov(_Wrapped):
    """DiLoCo's outer step: Nesterov momentum at every version."""

    def __init__(self, inner: Rule, rate: float = 0.7, momentum: float = 0.9) -> None:
        super().__init__(inner, rate, momentum)

    def merge(
        self, world: World[Weights], pending: Sequence[Submission[Weights]]
    ) -> Merged[Weights]:
        """Take the rule's change for a gradient."""
        change = self._inner.merge(world, pending).weights - world.weights
        before = world.memory.get("momentum")
        momentum = change if before is None else before * self._momentum + change
        step = change + momentum * self._momentum
        return Merged(world.weights + step * self._rate, {"momentum": momentum})


class DelayedNesterov(_Wrapped):
    """Momentum once in a while only, from the mean of what came meanwhile.

    Args:
        every: versions between two uses of the momentum; the number of nodes is a good choice.
    """

    def __init__(self, inner: Rule, every: int, rate: float = 1.0, momentum: float = 0.9) -> None:
        super().__init__(inner, rate, momentum)
        self._every = every

    def merge(
        self, world: World[Weights], pending: Sequence[Submission[Weights]]
    ) -> Merged[Weights]:
        """Step by the rule's change; at every so-manieth version, by the momentum too."""
        change = self._inner.merge(world, pending).weights - world.weights
        collected, count = change, 1
        if "collected" in world.memory:
            collected, count = world.memory["collected"] + change, world.memory["count"] + 1
        memory: dict[str, Any] = {"collected": collected, "count": count}
        if "momentum" in world.memory:
            memory["momentum"] = world.memory["momentum"]
        weights = world.weights + change * self._rate
        if count >= self._every:
            mean = collected * (1 / count)
            before = memory.get("momentum")
            momentum = mean if before is None else before * self._momentum + mean
            weights = weights + momentum * (self._rate * self._momentum)
            memory = {"momentum": momentum}
        return Merged(weights, memory)
