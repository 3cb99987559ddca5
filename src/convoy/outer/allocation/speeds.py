"""How fast each node is: from the times that travel with the gradients."""

import statistics
from collections import deque
from collections.abc import Sequence

_STEPS = 5  # of so many, one outlier changes nothing
_STEPS_KEPT = 10  # so many are remembered
_SECONDS = 1.0  # steps of a few milliseconds jump about: so much of them is remembered
_STEPS_AT_MOST = 64
_CHANGE = 1.4  # two long steps in a row so far off are no outliers


class SpeedBook:
    """Remembers each node's last times per sample.

    A node's first step with a share that it never had is slow, because kernels are made for the
    new shape: it says nothing of the steps to come and does not count.

    All nodes of a group feed their books with the same reduced numbers, so that all of them
    read the same speeds without asking anyone.

    Args:
        guesses: samples per second of each node, from a probe or from an earlier group; they
            count until a node's first step has been measured.
    """

    def __init__(self, guesses: Sequence[float]) -> None:
        self._guesses = tuple(guesses)
        self._times: list[deque[float]] = [deque() for _ in guesses]
        self._seen: list[set[int]] = [set() for _ in guesses]
        self._exchanges: deque[float] = deque()
        self._keep = _STEPS_KEPT

    def observe(self, shares: Sequence[int], times_s: Sequence[float]) -> None:
        """Take in how long each node was busy with its share of one step."""
        step_s = max(times_s, default=0.0)
        if step_s > 0:
            self._keep = min(max(_STEPS_KEPT, round(_SECONDS / step_s)), _STEPS_AT_MOST)
        measured = zip(self._times, self._seen, shares, times_s, strict=True)
        for remembered, seen, share, time_s in measured:
            if share > 0 and time_s > 0:
                if share in seen or not remembered:
                    self._remember(remembered, time_s / share)
                seen.add(share)
        if self._keep == _STEPS_KEPT and any(has_changed(times) for times in self._times):
            self._forget()

    def _forget(self) -> None:
        """Keep the last time only: it changed somewhere in the one before, for all perhaps."""
        for remembered in self._times:
            while len(remembered) > 1:
                remembered.popleft()

    def _remember(self, values: deque[float], value: float) -> None:
        values.append(value)
        while len(values) > self._keep:
            values.popleft()

    def observe_waits(self, waits_s: Sequence[float]) -> None:
        """Take in how long each node waited: the last to arrive waited for the exchange alone."""
        self._remember(self._exchanges, max(0.0, min(waits_s)))

    @property
    def speeds(self) -> tuple[float, ...]:
        """Return each node's samples per second, without the outliers."""
        return tuple(
            1 / middle(times) if times else guess
            for times, guess in zip(self._times, self._guesses, strict=True)
        )

    @property
    def exchange_s(self) -> float:
        """Return what the exchange of gradients costs a step, besides waiting for others."""
        return statistics.median(self._exchanges) if self._exchanges else 0.0


def has_changed(values: Sequence[float]) -> bool:
    """Tell whether the last two of some times are both far off those before, on the same side.

    >>> has_changed([1.0, 1.0, 1.1, 4.0]), has_changed([1.0, 1.1, 4.0, 4.1])
    (False, True)
    """
    if len(values) < 4:
        return False
    *before, last_but_one, last = list(values)[-_STEPS:]
    usual = statistics.median(before)
    slower = min(last_but_one, last) > usual * _CHANGE
    faster = max(last_but_one, last) < usual / _CHANGE
    return slower or faster


def middle(values: Sequence[float]) -> float:
    """Return the mean of the middle half, or the median of few values.

    >>> middle([1.0, 1.0, 1.2, 1.1, 9.0]) == (1.0 + 1.1 + 1.2) / 3
    True
    """
    if len(values) < _STEPS:
        return statistics.median(values)
    ends = len(values) // 4
    return statistics.fmean(sorted(values)[ends : len(values) - ends])
