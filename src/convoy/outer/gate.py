"""What a submission must be like to be taken in; who hands in nonsense again and again is shut out.

A single bad vector would spoil the weights of all, so it is looked at before it is merged:
every number finite, and the whole not far longer than what nodes hand in otherwise.
"""

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable

_REMEMBERED = 64  # norms of what was taken in
_TRUSTED = 4  # so many must be known before they are a measure
_LONGER = 100.0  # times the usual norm
_LONGER_THAN_WEIGHTS = 10.0  # times the norm of the weights, while nothing else is known
_STRIKES = 3  # in a row


class Gate:
    """Refuses submissions, and counts what it refused."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=_REMEMBERED)
        self._strikes: Counter[int] = Counter()
        self.refused: Counter[str] = Counter()

    def is_shut(self, node: int) -> bool:
        """Tell whether nothing is taken from a node any more."""
        return self._strikes[node] >= _STRIKES

    def problem_with(self, node: int, norm: float, weights_norm: Callable[[], float]) -> str | None:
        """Say why a submission of such a length is refused, or None if it is taken in."""
        problem = self._problem(norm, weights_norm)
        if problem is not None:
            return self.refuse(node, problem)
        self._norms.append(norm)
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

    def _problem(self, norm: float, weights_norm: Callable[[], float]) -> str | None:
        if not math.isfinite(norm):
            return "not finite"
        if len(self._norms) >= _TRUSTED:
            limit = _LONGER * statistics.median(self._norms)
        else:
            limit = _LONGER_THAN_WEIGHTS * (1 + weights_norm())
        return "far too long" if norm > limit > 0 else None
