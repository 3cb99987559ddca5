"""A node's own account of the updates in its weights, in case it has to report for the others."""

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

from convoy.outer.ledger import Update

_KEPT = 512  # updates; more than a group does between two reports


class Account:
    """The last updates that are in this node's weights, and how far the lead knows of them.

    Args:
        steps: updates of an epoch.
        batch: samples of an update.
        samples: samples of an epoch.
    """

    def __init__(self, steps: int, batch: int, samples: int) -> None:
        self._steps, self._batch, self._samples = steps, batch, samples
        self._updates: deque[Update] = deque(maxlen=_KEPT)
        self._told = 0  # updates before this step are known to the lead

    def note(
        self, step: int, quorum: int, numbers: Sequence[int], shares: Sequence[int] = ()
    ) -> None:
        """Write an update down; no shares: one node did it alone."""
        epoch, within = divmod(step, self._steps)
        start = within * self._batch
        stop = min(start + self._batch, self._samples)
        given = shares or (stop - start,)
        by_node = tuple((n, s) for n, s in zip(numbers, given, strict=True) if s)
        self._updates.append(Update(step, epoch, start, stop, quorum, by_node))

    def take_news(self) -> list[list[Any]]:
        """Return what the lead does not know yet, as lines of the ledger."""
        news = [update for update in self._updates if update.step >= self._told]
        if news:
            self._told = news[-1].step + 1
        return [update.as_line() for update in news]

    def go_back(self, step: int) -> None:
        """Forget the updates from a step on: they are in the weights no more."""
        kept = [update for update in self._updates if update.step < step]
        self._updates.clear()
        self._updates.extend(kept)
        self._told = min(self._told, step)

    def pack(self) -> bytes:
        """Return the updates that a state contains, for whoever is left to tell of them."""
        return json.dumps([update.as_line() for update in self._updates]).encode()

    def unpack(self, block: bytes) -> None:
        """Take over the account that came with a state: what we did since is not in it."""
        self._updates.clear()
        self._updates.extend(Update.from_line(line) for line in json.loads(block))
        self._told = 0
