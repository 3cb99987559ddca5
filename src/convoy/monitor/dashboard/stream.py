"""Server-sent events: what has changed in a run, told to each page when it is ready for it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from convoy.monitor.dashboard.feed import Feed
from convoy.monitor.sync import Cursor, changes


@dataclass(frozen=True)
class Pace:
    """How often a page is told something.

    Attributes:
        pause_s: between two messages, at least.
        heartbeat_s: after so long without news a page is told that the server lives.
        patience_s: a reader that takes nothing for so long is given up.
    """

    pause_s: float = 0.4
    heartbeat_s: float = 15.0
    patience_s: float = 60.0


class Seats:
    """How many pages may listen at the same time."""

    def __init__(self, count: int = 32) -> None:
        self._free = count

    def take(self) -> bool:
        """Take a seat, if one is free."""
        if self._free == 0:
            return False
        self._free -= 1
        return True

    def give_back(self) -> None:
        """Make room for another page."""
        self._free += 1


async def messages(feed: Feed, pace: Pace) -> AsyncIterator[str]:
    """Yield what one page is to be told, until the feed closes.

    There is no queue: the difference is worked out when the page has taken the last message. So a
    page that reads slowly gets fewer, larger steps, and one that never reads costs one message.
    """
    view, cursor = feed.view, Cursor()
    while not feed.is_closed:
        if feed.view is not view:  # the file was begun anew, so what the page knows is void
            view, cursor = feed.view, Cursor()
        delta = changes(view, cursor)
        yield f"data: {json.dumps(delta)}\n\n" if delta is not None else ": nothing new\n\n"
        await asyncio.sleep(pace.pause_s)
        await feed.news(view, cursor.number, pace.heartbeat_s)


class EventStream(StreamingResponse):
    """An answer that goes on until the page leaves, is given up, or the feed closes."""

    media_type = "text/event-stream"

    def __init__(self, feed: Feed, seats: Seats, pace: Pace) -> None:
        """Prepare the answer to a page that has taken a seat."""
        super().__init__(messages(feed, pace), headers={"X-Accel-Buffering": "no"})
        self._seats = seats
        self._pace = pace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell the page all it wants to know, then give its seat back."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._pace.patience_s):
                await send(message)

        try:
            with suppress(TimeoutError, ClientDisconnect):
                await super().__call__(scope, receive, send_in_time)
        finally:
            self._seats.give_back()
