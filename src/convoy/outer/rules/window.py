"""A grace window: those who are there wait for those who are late, but not for ever.

A beat ends when every live node has handed in. Where some are late, it ends without them once

    at least `quorum` of the live nodes are there, and
    the first of them has waited for the grace:  2 x the median lateness of the last beats

so that a node that is always a little late is waited for, and one that stumbles is not. Grace is
kept between a tenth of a beat, which costs little, and a whole one, after which it is cheaper to
let the late one's work count in the next beat.
"""

import statistics
from collections import deque
from dataclasses import dataclass, field

_REMEMBERED = 16  # beats


@dataclass(eq=False)
class Window:
    """When a beat ends although somebody is missing.

    Attributes:
        quorum: the part of the live nodes without which no beat ends.
        least, most: grace as parts of a beat.
    """

    quorum: float = 0.5
    least: float = 0.1
    most: float = 1.0
    _lateness: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    _began: float = 0.0
    _first: float | None = None
    _last: float = 0.0
    _first_before: float = 0.0

    def begin(self, now: float) -> None:
        """Note that a beat begins; whoever was there last in the one before was so late."""
        if self._first is not None:
            self._lateness.append(self._last - self._first)
            self._first_before = self._first
        self._began, self._first = now, None

    def arrive(self, now: float) -> None:
        """Note that somebody is there in time."""
        self._first = now if self._first is None else self._first
        self._last = now

    def miss(self, now: float) -> None:
        """Note that somebody came only after its beat."""
        self._lateness.append(now - self._first_before)

    @property
    def grace(self) -> float:
        """Return how long the first one waits for the others."""
        beat = (self._first if self._first is not None else self._began) - self._began
        typical = 2 * statistics.median(self._lateness) if self._lateness else beat
        return min(max(typical, self.least * beat), self.most * beat)

    def closes_at(self, present: int, live: int) -> float | None:
        """Return when the beat ends without the others; None while too few are there."""
        if self._first is None or present < max(1.0, self.quorum * live):
            return None
        return self._first + self.grace
