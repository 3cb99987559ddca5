"""A server in a thread of the test's own process, on a real socket."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from starlette.types import ASGIApp

from convoy.monitor.dashboard.address import Address, listen
from convoy.monitor.dashboard.app import Pages, make_app
from convoy.monitor.dashboard.assets import Asset
from convoy.monitor.dashboard.entry import Entry
from convoy.monitor.dashboard.feed import Feed
from convoy.monitor.dashboard.guard import Gate, make_gate
from convoy.monitor.dashboard.serve import serve_until
from convoy.monitor.dashboard.stream import Pace

KEY = "ab" * 32
ASSETS = {
    "index.html": Asset(b"<!doctype html><title>page</title>", "text/html", '"1"'),
    "main.js": Asset(b"'use strict';", "text/javascript", '"2"'),
    "vendor/plot.js": Asset(b"plot", "text/javascript", '"3"'),
}
SWIFT = Pace(pause_s=0.01, heartbeat_s=0.05)


@dataclass
class Site:
    """All that a page is made of."""

    port: int
    gate: Gate
    entry: Entry
    feed: Feed
    app: ASGIApp
    told: list[str] = field(default_factory=list)

    @property
    def cookie(self) -> dict[str, str]:
        return {"Cookie": f"{self.gate.cookie_name}={self.gate.cookie}"}


def make_site(events: Path, port: int = 8765, pace: Pace = SWIFT, *, key: str = KEY) -> Site:
    """Put a page together as `convoy watch` does."""
    address = Address("127.0.0.1", "127.0.0.1", port)
    told: list[str] = []
    gate, entry = make_gate(address, key), Entry(address.base, told.append)
    feed = Feed(events, "a run", lambda: True)
    app = make_app(Pages(feed, ASSETS, gate, entry, pace=pace), gate)
    return Site(port, gate, entry, feed, app, told)


@contextmanager
def served(events: Path, pace: Pace = SWIFT) -> Iterator[Site]:
    """Serve a page while the block runs."""
    listener = listen("127.0.0.1", 0)
    site = make_site(events, listener.getsockname()[1], pace)
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    run = serve_until(stop, site.app, site.feed, listener)
    thread = threading.Thread(target=lambda: loop.run_until_complete(run), name="served")
    thread.start()
    try:
        yield site
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
        assert not thread.is_alive()
        loop.close()
