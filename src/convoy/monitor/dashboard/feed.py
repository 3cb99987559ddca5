"""Follows a run by its events, and wakes whoever waits for news of it."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from convoy.monitor.dashboard.tail import Tail
from convoy.monitor.view import RunView

GONE = "no process works on this run: it was killed or the machine was restarted"
_POLL_S = 0.2
_PROBE_S = 2.0  # between two looks at whether the run's process lives


class Feed:
    """The view of a run that is kept up to date while `follow` runs.

    Attributes:
        view: the run as it stands. Another one takes its place if the file is begun anew.
        is_closed: nothing more will come.
    """

    def __init__(self, events: Path, name: str, is_held: Callable[[], bool]) -> None:
        """Prepare to follow a run.

        Args:
            events: the run's `events.jsonl`, which need not be there yet.
            name: what the run is called.
            is_held: tells whether a process works on the run.
        """
        self.view = RunView(name)
        self.is_closed = False
        self._name = name
        self._tail = Tail(events)
        self._is_held = is_held
        self._next_probe = 0.0
        self._news = asyncio.Event()
        self._caught_up = asyncio.Event()

    async def follow(self) -> None:
        """Take in what is written, until closed; others get their turn after every piece."""
        try:
            while not self.is_closed:
                if self._take_in():
                    await asyncio.sleep(0)
                    continue
                self._notice_death(time.monotonic())
                self._caught_up.set()
                await asyncio.sleep(_POLL_S)
        finally:
            self._tail.close()

    def close(self) -> None:
        """Stop following, and wake all who wait."""
        self.is_closed = True
        self._caught_up.set()
        self._wake()

    async def news(self, view: RunView, number: int, within_s: float) -> None:
        """Wait until there is more than this number of this view, but not longer than allowed."""
        if not self.is_closed and self.view is view and view.number == number:
            await _wait(self._news, within_s)

    async def caught_up(self, within_s: float) -> None:
        """Wait until all that was written before has been taken in, if that is soon."""
        await _wait(self._caught_up, within_s)

    def _take_in(self) -> bool:
        """Fold the next lines in; tell whether there were any bytes to read."""
        piece = self._tail.read()
        before = self.view.number
        if piece.is_anew:
            self.view = RunView(self._name)
        for line in piece.lines:
            self.view.take_line(line)
        if piece.is_anew or self.view.number != before:
            self._wake()
        return not piece.is_end

    def _notice_death(self, now: float) -> None:
        """Mark a run whose process is gone without having told of an end."""
        if self.view.is_over or now < self._next_probe:
            return
        self._next_probe = now + _PROBE_S
        # The end is written before the hold is given up. So what is read now, after the look at
        # the hold, has it; else it never came.
        if not self._is_held() and not self._take_in() and not self.view.is_over:
            self.view.mark_gone(GONE)
            self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


async def _wait(event: asyncio.Event, within_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await event.wait()
