"""How fast each node is: from the times that travel with the gradients."""

import statistics
from collections import deque
from collections.abc import Sequence

_REMEMBERED = 5  # steps: the median of five forgets one outlier, and follows a change after three


class SpeedBook:
    """Remembers each node's last times per sample.

    All nodes of a group feed their books with the same reduced numbers, so that all of them
    read the same speeds without asking anyone.

    Args:
        guesses: samples per second of each node, from a probe or from an earlier group; they
            count until a node's first step has been measured.
    """

    def __init__(self, guesses: Sequence[float]) -> None:
        self._guesses = tuple(guesses)
        self._times: list[deque[float]] = [deque(maxlen=_REMEMBERED) for _ in guesses]
        self._exchanges: deque[float] = deque(maxlen=_REMEMBERED)

    def observe(self, shares: Sequence[int], times_s: Sequence[float]) -> None:
        """Take in how long each node was busy with its share of one step."""
        for remembered, share, time_s in zip(self._times, shares, times_s, strict=True):
            if share > 0 and time_s > 0:
                remembered.append(time_s / share)

    def observe_waits(self, waits_s: Sequence[float]) -> None:
        """Take in how long each node waited: the last to arrive waited for the exchange alone."""
        self._exchanges.append(max(0.0, min(waits_s)))

    @property
    def speeds(self) -> tuple[float, ...]:
        """Return each node's samples per second: the median of what is remembered."""
        return tuple(
            1 / statistics.median(times) if times else guess
            for times, guess in zip(self._times, self._guesses, strict=True)
        )

    @property
    def exchange_s(self) -> float:
        """Return what the exchange of gradients costs a step, besides waiting for others."""
        return statistics.median(self._exchanges) if self._exchanges else 0.0
