"""What a submission must be like to be taken in; who hands in nonsense again and again is shut out.

A single bad vector would spoil the weights of all, so it is looked at before it is merged:
every number finite, and the whole not far longer than what nodes hand in otherwise. What is
handed in grows with the learning rate and the local steps, by hundreds in a warm-up, so it is
also measured by the sum of the rates it was trained with: only what is too long by both is refused.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable

_REMEMBERED = 64  # lengths of what was taken in
_TRUSTED = 4  # so many must be known before they are a measure
_LONGER = 100.0  # times the usual norm
_LONGER_THAN_WEIGHTS = 10.0  # times the norm of the weights, while nothing else is known
_STRIKES = 3  # in a row


class Gate:
    """Refuses submissions, and counts what it refused."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=_REMEMBERED)
        self._paces: deque[float] = deque(maxlen=_REMEMBERED)  # norm over learning rates
        self._strikes: Counter[int] = Counter()
        self.refused: Counter[str] = Counter()

    def is_shut(self, node: int) -> bool:
        """Tell whether nothing is taken from a node any more."""
        return self._strikes[node] >= _STRIKES

    def problem_with(
        self, node: int, norm: float, rate: float, weights_norm: Callable[[], float]
    ) -> str | None:
        """Say why a submission is refused, or None if it is taken in.

        Args:
            node: whose it is.
            norm: its length.
            rate: the learning rates of its steps, summed.
            weights_norm: returns the length of the weights.
        """
        pace = norm / rate if rate > 0 else math.inf
        problem = self._problem(norm, pace, weights_norm)
        if problem is not None:
            return self.refuse(node, problem)
        self._norms.append(norm)
        self._paces.append(pace)
        self._strikes[node] = 0
        return None

    def refuse(self, node: int, problem: str) -> str:
        """Count a refusal against a node; return why."""
        self.count(problem)
        self._strikes[node] += 1
        return problem

    def count(self, problem: str) -> None:
        """Count a refusal."""
        self.refused[problem] += 1

    def _problem(self, norm: float, pace: float, weights_norm: Callable[[], float]) -> str | None:
        if not math.isfinite(norm):
            return "not finite"
        if len(self._norms) < _TRUSTED:
            is_long = norm > _LONGER_THAN_WEIGHTS * (1 + weights_norm())
        else:
            is_long = _is_far_beyond(norm, self._norms) and _is_far_beyond(pace, self._paces)
        return "far too long" if is_long else None


def _is_far_beyond(value: float, usual: Iterable[float]) -> bool:
    return value > _LONGER * statistics.median(usual) > 0
