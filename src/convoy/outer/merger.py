"""The parameter service without its wires: who trains from which version, and what merges when.

All decisions of the service are here, as a function of what happens, in which order and when.
The real service, the simulator, the replay of a run and the tests feed the same class.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

from convoy.outer.rules.bound import may_merge
from convoy.outer.rules.rule import Rule, Submission, Weights, World, add_scaled
from convoy.outer.rules.window import Window


@dataclass(frozen=True, slots=True)
class Reply(Generic[Weights]):
    """What a node is told: the weights to go on from, and their version.

    Attributes:
        staleness: of what it had handed in; None where it had handed in nothing.
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
        window: how long late nodes are waited for, where the rule has a window.
        add: how rules add up; see `World`.
        own: returns a copy of an increment that is kept after its node was answered.
    """

    def __init__(
        self,
        rule: Rule,
        weights: Weights,
        *,
        first_version: int = 1,
        bound: int | None = None,
        window: Window | None = None,
        add: Callable[[Weights, Weights, float], Weights] = add_scaled,
        own: Callable[[Weights], Weights] | None = None,
    ) -> None:
        self.weights = weights
        self._add, self._own = add, own
        self.version = first_version
        self.memory: Mapping[str, Any] = {}
        self._rule = rule
        self._bound = None if rule.has_barrier else bound
        self._window = (window or Window()) if rule.has_window else None
        self._bases: dict[int, int] = {}
        self._outstanding: dict[int, Weights] = {}
        self._qualities: dict[int, float] = {}
        self._held: list[Submission[Weights]] = []  # by the bound
        self._waiting: list[Submission[Weights]] = []  # at the barrier
        self._buffered: list[Submission[Weights]] = []  # answered, and part of the next merge

    @property
    def bases(self) -> Mapping[int, int]:
        """Return the version that each live node trains from."""
        return self._bases

    @property
    def deadline(self) -> float | None:
        """Return when to call `tick`, if nothing else happens before."""
        if self._window is None:
            return None
        return self._window.closes_at(len(self._waiting), len(self._bases))

    def join(self, node: int, now: float = 0.0) -> Reply[Weights]:
        """Let a node begin with the current weights; what it handed in before is void."""
        self._drop(node)
        if self._window is not None and not self._bases:
            self._window.begin(now)
        return self._grant(node)

    def leave(self, node: int, now: float = 0.0) -> list[Reply[Weights]]:
        """Take a node out; return what others are told who waited for it."""
        self._drop(node)
        self._bases.pop(node, None)
        self._qualities.pop(node, None)
        self._forget()
        return self._advance(now)

    def submit(self, submission: Submission[Weights], now: float = 0.0) -> list[Reply[Weights]]:
        """Take in a submission; return who is told what, now that it is there."""
        self._qualities[submission.node] = submission.quality
        if self._window is not None:
            if submission.base < self.version:  # its beat is over: it counts in the next
                self._window.miss(now)
                self._buffered.append(self._owned(submission))
                return [self._grant(submission.node, self.version - submission.base)]
            self._window.arrive(now)
        self._held.append(submission)
        return self._advance(now)

    def tick(self, now: float) -> list[Reply[Weights]]:
        """End a beat whose time is over; return who is told what."""
        if self.deadline is None or now < self.deadline:
            return []
        return self._merge([s.node for s in self._waiting], now)

    @property
    def buffered(self) -> Sequence[Submission[Weights]]:
        """Return what was answered and is part of the next merge."""
        return self._buffered

    def restore(
        self, version: int, memory: Mapping[str, Any], buffered: Sequence[Submission[Weights]]
    ) -> None:
        """Go on from an earlier moment; whoever trained then must ask for the weights again."""
        self.version, self.memory, self._buffered = version, memory, list(buffered)

    def flush(self, now: float = 0.0) -> None:
        """Merge what was answered and has not been merged yet: no more will come.

        Where somebody waits for an answer, the merge that it waits for takes in all of it.
        """
        if self._buffered and not self._waiting:
            self._merge([], now)

    def _advance(self, now: float) -> list[Reply[Weights]]:
        """Merge whatever may be merged."""
        replies: list[Reply[Weights]] = []
        while (submission := self._next_to_merge()) is not None:
            self._held.remove(submission)
            replies += self._take_in(submission, now)
        if self._waiting and self._rule.is_complete(self._waiting, list(self._bases)):
            replies += self._merge([s.node for s in self._waiting], now)
        return replies

    def _next_to_merge(self) -> Submission[Weights] | None:
        if self._bound is None:
            return self._held[0] if self._held else None
        for submission in sorted(self._held, key=lambda s: s.base):
            if may_merge(submission.node, self.version, self._bases, self._bound):
                return submission
        return None

    def _take_in(self, submission: Submission[Weights], now: float) -> list[Reply[Weights]]:
        if self._rule.has_barrier:
            self._waiting.append(submission)
            return []
        self._buffered.append(submission)
        if self._rule.is_complete(self._buffered, list(self._bases)):
            return self._merge([submission.node], now)
        # A buffer that is not full: the weights as they are.
        self._buffered[-1] = self._owned(submission)
        return [self._grant(submission.node, self.version - submission.base)]

    def _owned(self, submission: Submission[Weights]) -> Submission[Weights]:
        if self._own is None:
            return submission
        return replace(submission, increment=self._own(submission.increment))

    def _merge(self, tell: Iterable[int], now: float) -> list[Reply[Weights]]:
        world = World(
            self.weights,
            self.version,
            self._bases,
            self._outstanding,
            self._qualities,
            self.memory,
            self._add,
        )
        pending = [*self._buffered, *self._waiting]
        staleness = {s.node: world.staleness(s) for s in pending}
        merged = self._rule.merge(world, pending)
        self._buffered, self._waiting = [], []
        self.weights, self.memory = merged.weights, merged.memory
        self.version += 1
        if self._window is not None:
            self._window.begin(now)
        return [self._grant(node, staleness.get(node)) for node in tell]

    def _grant(self, node: int, staleness: int | None = None) -> Reply[Weights]:
        self._bases[node] = self.version
        if self._rule.needs_base:
            self._outstanding[self.version] = self.weights
        self._forget()
        return Reply(node, self.version, self.weights, staleness)

    def _drop(self, node: int) -> None:
        """Forget what a node handed in and was not answered: it will be told to do it again."""
        self._waiting = [s for s in self._waiting if s.node != node]
        self._held = [s for s in self._held if s.node != node]

    def _forget(self) -> None:
        """Keep the weights of those versions only that somebody still trains from."""
        pending = [*self._held, *self._waiting, *self._buffered]
        used = {*self._bases.values(), *(s.base for s in pending)}
        for version in [v for v in self._outstanding if v not in used]:
            del self._outstanding[version]
