"""What the nodes of a group did: samples, time at work and time spent waiting."""

from collections.abc import Sequence


class Tally:
    """What the nodes of a group did since it was last asked."""

    def __init__(self, size: int) -> None:
        self.steps = 0
        self._size = size
        self._clear()

    def _clear(self) -> None:
        self._samples = [0] * self._size
        self._busy = [0.0] * self._size
        self._waiting = [0.0] * self._size

    def add(self, samples: Sequence[int], busy: Sequence[float], waiting: Sequence[float]) -> None:
        """Count one step."""
        self.steps += 1
        for j in range(self._size):
            self._samples[j] += samples[j]
            self._busy[j] += busy[j]
            self._waiting[j] += waiting[j]

    def take(self) -> tuple[list[int], list[float], list[float]]:
        """Return samples, busy and waiting seconds of each node, and start anew."""
        found = self._samples, self._busy, self._waiting
        self._clear()
        return found
