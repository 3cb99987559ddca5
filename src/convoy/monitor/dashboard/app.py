"""What the page's server answers."""

from collections.abc import Mapping

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from convoy.monitor.dashboard.assets import PAGE, Asset
from convoy.monitor.dashboard.entry import Entry
from convoy.monitor.dashboard.feed import Feed
from convoy.monitor.dashboard.guard import Gate, Guard, Verdict, asked_by, has_cookie, refusal
from convoy.monitor.dashboard.stream import EventStream, Pace, Seats
from convoy.monitor.metrics import metrics_text

_CATCH_UP_S = 10.0  # a long run's events are all read before a program is told of them
_USED = (
    "This link was used before: each works once. "
    "Use the one that <code>convoy watch</code> printed last."
)


class Pages:
    """The answers, each a method."""

    def __init__(
        self,
        feed: Feed,
        assets: Mapping[str, Asset],
        gate: Gate,
        entry: Entry,
        *,
        is_encrypted: bool = False,
        pace: Pace | None = None,
    ) -> None:
        """Prepare to answer.

        Args:
            feed: the run.
            assets: the page's own files, by name.
            gate: who is let in.
            entry: the link that lets a browser in.
            is_encrypted: the page is reached by https, so its cookie goes nowhere else.
            pace: how often a page is told something.
        """
        self._feed = feed
        self._assets = assets
        self._gate = gate
        self._entry = entry
        self._is_encrypted = is_encrypted
        self._pace = pace or Pace()
        self._seats = Seats()

    async def enter(self, request: Request) -> Response:
        """Exchange a token for a cookie."""
        if request.method == "HEAD":
            return Response()  # whoever only looks at a link does not use it up
        home = RedirectResponse("/", 303)
        if self._entry.spend(request.query_params.get("token", "")):
            home.set_cookie(
                self._gate.cookie_name,
                self._gate.cookie,
                path="/",
                httponly=True,
                samesite="strict",
                secure=self._is_encrypted,
            )
            return home
        if has_cookie(self._gate, asked_by(request.scope)):
            return home
        return refusal(Verdict(401, _USED))

    async def page(self, request: Request) -> Response:
        """Show the page."""
        return self._asset(request, PAGE)

    async def static(self, request: Request) -> Response:
        """Send one of the page's own files."""
        return self._asset(request, request.path_params["name"])

    def _asset(self, request: Request, name: str) -> Response:
        """Send a file by its name, which is looked up in memory: no disk is asked."""
        asset = self._assets.get(name)
        if asset is None:
            return PlainTextResponse("no such file\n", 404)
        headers = {"ETag": asset.tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == asset.tag:
            return Response(status_code=304, headers=headers)
        return Response(asset.content, headers=headers, media_type=asset.media_type)

    async def snapshot(self, request: Request) -> Response:
        """Tell all there is to know about the run."""
        del request
        await self._feed.caught_up(_CATCH_UP_S)
        return JSONResponse(self._feed.view.snapshot())

    async def stream(self, request: Request) -> Response:
        """Tell all there is to know, and then what changes."""
        if request.method == "HEAD":
            return Response(media_type=EventStream.media_type)
        if not self._seats.take():
            headers = {"Retry-After": "10"}
            return PlainTextResponse("too many pages are open\n", 503, headers)
        return EventStream(self._feed, self._seats, self._pace)

    async def metrics(self, request: Request) -> Response:
        """Tell Prometheus how the run stands."""
        del request
        await self._feed.caught_up(_CATCH_UP_S)
        text = metrics_text(self._feed.view.snapshot())
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def health(self, request: Request) -> Response:
        """Tell that the server lives, and nothing else."""
        del request
        return PlainTextResponse("ok\n")


def make_app(pages: Pages, gate: Gate) -> ASGIApp:
    """Return the application, behind its guard."""
    app = Starlette(
        routes=[
            Route("/", pages.page),
            Route("/enter", pages.enter),
            Route("/static/{name:path}", pages.static),
            Route("/api/snapshot", pages.snapshot),
            Route("/api/stream", pages.stream),
            Route("/metrics", pages.metrics),
            Route("/healthz", pages.health),
        ]
    )
    app.router.redirect_slashes = False
    return Guard(app, gate)
