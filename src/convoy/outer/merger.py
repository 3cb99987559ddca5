"""The parameter service without its wires: who trains from which version, and what merges when.

All decisions of the service are here, as a function of the order in which things happen. The
real service, the simulator, the replay of a run and the tests feed the same class.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic

from convoy.outer.rules.bound import may_merge
from convoy.outer.rules.rule import Rule, Submission, Weights, World


@dataclass(frozen=True, slots=True)
class Reply(Generic[Weights]):
    """What a node is told: the weights to go on from, and their version.

    Attributes:
        staleness: of what it had handed in, when that was merged; None where it was not yet.
    """

    node: int
    version: int
    weights: Weights
    staleness: int | None = None


class Merger(Generic[Weights]):
    """Holds the global weights and applies a rule to whatever comes in.

    Args:
        rule: how submissions become new weights.
        weights: to start from.
        first_version: their number.
        bound: no submission is merged that missed more versions; None: no bound.
    """

    def __init__(
        self, rule: Rule, weights: Weights, *, first_version: int = 1, bound: int | None = None
    ) -> None:
        self.weights = weights
        self.version = first_version
        self._rule = rule
        self._bound = None if rule.has_barrier else bound
        self._bases: dict[int, int] = {}
        self._outstanding: dict[int, Weights] = {}
        self._qualities: dict[int, float] = {}
        self._memory: Mapping[str, Any] = {}
        self._pending: list[Submission[Weights]] = []
        self._held: list[Submission[Weights]] = []

    @property
    def bases(self) -> Mapping[int, int]:
        """Return the version that each live node trains from."""
        return self._bases

    def join(self, node: int) -> Reply[Weights]:
        """Let a node begin with the current weights; what it handed in before is void."""
        self._drop(node)
        return self._grant(node)

    def leave(self, node: int) -> list[Reply[Weights]]:
        """Take a node out; return what others are told who waited for it."""
        self._drop(node)
        self._bases.pop(node, None)
        self._qualities.pop(node, None)
        self._forget()
        return self._advance()

    def submit(self, submission: Submission[Weights]) -> list[Reply[Weights]]:
        """Take in a submission; return who is told what, now that it is there."""
        self._qualities[submission.node] = submission.quality
        self._held.append(submission)
        return self._advance()

    def _advance(self) -> list[Reply[Weights]]:
        """Merge whatever may be merged."""
        replies: list[Reply[Weights]] = []
        while (submission := self._next_to_merge()) is not None:
            self._held.remove(submission)
            self._pending.append(submission)
            replies += self._take_in(submission)
        if self._pending and self._rule.has_barrier and self._is_complete():
            replies += self._merge(tell=[s.node for s in self._pending])  # somebody has left
        return replies

    def _next_to_merge(self) -> Submission[Weights] | None:
        if self._bound is None:
            return self._held[0] if self._held else None
        for submission in sorted(self._held, key=lambda s: s.base):
            if may_merge(submission.node, self.version, self._bases, self._bound):
                return submission
        return None

    def _take_in(self, submission: Submission[Weights]) -> list[Reply[Weights]]:
        if self._is_complete():
            waiting = [s.node for s in self._pending] if self._rule.has_barrier else []
            return self._merge(tell=waiting or [submission.node])
        if self._rule.has_barrier:
            return []
        return [self._grant(submission.node)]  # a buffer that is not full: the weights as they are

    def _is_complete(self) -> bool:
        return self._rule.is_complete(self._pending, list(self._bases))

    def _merge(self, tell: Iterable[int]) -> list[Reply[Weights]]:
        world = World(
            self.weights,
            self.version,
            self._bases,
            self._outstanding,
            self._qualities,
            self._memory,
        )
        staleness = {s.node: world.staleness(s) for s in self._pending}
        merged = self._rule.merge(world, self._pending)
        self._pending = []
        self.weights, self._memory = merged.weights, merged.memory
        self.version += 1
        return [self._grant(node, staleness.get(node)) for node in tell]

    def _grant(self, node: int, staleness: int | None = None) -> Reply[Weights]:
        self._bases[node] = self.version
        if self._rule.needs_base:
            self._outstanding[self.version] = self.weights
        self._forget()
        return Reply(node, self.version, self.weights, staleness)

    def _drop(self, node: int) -> None:
        self._pending = [s for s in self._pending if s.node != node]
        self._held = [s for s in self._held if s.node != node]

    def _forget(self) -> None:
        """Keep the weights of those versions only that somebody still trains from."""
        used = {*self._bases.values(), *(s.base for s in [*self._pending, *self._held])}
        for version in [v for v in self._outstanding if v not in used]:
            del self._outstanding[version]
