"""Runs the page's server until it is asked to end."""

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Generator

import uvicorn
from starlette.types import ASGIApp

from convoy.monitor.dashboard.address import Tls
from convoy.monitor.dashboard.feed import Feed

_LAST_NEWS_S = 1.5  # for pages to hear how a run has ended
_LAST_WORDS_S = 1  # for answers that are under way when the server ends


class _Server(uvicorn.Server):
    """A server that leaves signals to us: Ctrl-C is how it is meant to end, not a fault."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture none."""
        yield


async def serve_until(
    stop: asyncio.Event, app: ASGIApp, feed: Feed, listener: socket.socket, tls: Tls | None = None
) -> None:
    """Answer requests and follow the run, until told to stop."""
    server = _Server(_config(app, tls))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    following = asyncio.create_task(feed.follow())
    stopping = asyncio.create_task(stop.wait())
    # Any of them ends all: a page that no longer follows its run would show a lie.
    await asyncio.wait([serving, following, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    feed.close()
    server.should_exit = True
    await asyncio.gather(serving, following)


def serve(
    app: ASGIApp,
    feed: Feed,
    listener: socket.socket,
    tls: Tls | None = None,
    *,
    is_beside: bool = False,
) -> None:
    """Serve until Ctrl-C or SIGTERM.

    Args:
        app: what answers.
        feed: the run.
        listener: where requests arrive.
        tls: what to encrypt with.
        is_beside: standard input is a pipe of the process that started this one; end with it.
    """

    async def run() -> None:
        stop = asyncio.Event()
        _stop_on_signals(stop.set)
        if is_beside:
            _stop_with_the_other(stop.set)
        await serve_until(stop, app, feed, listener, tls)

    asyncio.run(run())


def _stop_with_the_other(stop: Callable[[], None]) -> None:
    """Stop when the process at the other end of standard input is gone, after its last words."""
    loop, pipe = asyncio.get_running_loop(), sys.stdin.fileno()

    def note_end() -> None:
        loop.remove_reader(pipe)
        loop.call_later(_LAST_NEWS_S, stop)

    # Nothing is ever written there: it becomes readable when it is closed.
    loop.add_reader(pipe, note_end)


def _stop_on_signals(stop: Callable[[], None]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)


def _config(app: ASGIApp, tls: Tls | None) -> uvicorn.Config:
    """Return a server's settings: it says nothing, and believes no proxy."""
    return uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=_LAST_WORDS_S,
        ssl_certfile=tls.certificate if tls else None,
        ssl_keyfile=tls.key if tls else None,
    )
