"""Who may ask for what: every request is judged here, before anything else sees it.

A page on loopback is open to all that run in the user's browser, and to all users of the machine.
So a request must name this server (or a foreign name was made to point here), must only read, must
not come from another site's page, and must show that its sender was let in.
"""

import hmac
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from convoy.monitor.dashboard.address import Address
from convoy.monitor.dashboard.key import cookie_value

_METHODS = ("GET", "HEAD")
_OPEN = ("/healthz", "/enter")  # the first tells nothing, the second asks for a token itself
_LANDINGS = ("/", "/enter")  # where links of other sites may lead
_FOR_SCRAPERS = ("/metrics", "/api/")
_OF_OURS = ("same-origin", "none")  # "none": typed, or a bookmark
_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; object-src 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "form-action 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Gate:
    """What a request is measured by.

    Attributes:
        hosts, origins: what browsers call this server.
        cookie_name, cookie: what a browser that was let in shows.
        key: what a scraper shows.
    """

    hosts: frozenset[str]
    origins: frozenset[str]
    cookie_name: str
    cookie: str
    key: str


def make_gate(address: Address, key: str) -> Gate:
    """Return the gate of a page at an address.

    Browsers keep cookies by host alone, so the port is in the name: pages of two runs do not
    take each other's away.
    """
    return Gate(
        hosts=address.hosts,
        origins=address.origins,
        cookie_name=f"convoy-{address.port}",
        cookie=cookie_value(key, address.port),
        key=key,
    )


@dataclass(frozen=True)
class Asked:
    """A request, as far as it is judged."""

    method: str
    path: str
    headers: Sequence[tuple[str, str]]

    def all(self, name: str) -> list[str]:
        """Return every value of a header."""
        return [value for header, value in self.headers if header.lower() == name]

    def has_only(self, name: str, allowed: Iterable[str]) -> bool:
        """Tell whether a header is there, once, with one of these values."""
        values = self.all(name)
        return len(values) == 1 and values[0] in allowed

    @property
    def is_navigation(self) -> bool:
        """Tell whether this would show the page in a tab of its own."""
        is_page = self.has_only("sec-fetch-dest", ["document"])
        return self.has_only("sec-fetch-mode", ["navigate"]) and is_page

    @property
    def is_from_elsewhere(self) -> bool:
        """Tell whether a browser says that something else than our page asks.

        "same-site" counts: other ports of this machine may be anybody's.
        """
        site = self.all("sec-fetch-site")
        return bool(site) and not self.has_only("sec-fetch-site", _OF_OURS)


@dataclass(frozen=True)
class Verdict:
    """What becomes of a request.

    Attributes:
        status: 200 lets it through; else it is refused with this status.
        reason: what a person is told.
        asks_again: the refusal's page loads itself anew, this time as our own.
    """

    status: int
    reason: str = ""
    asks_again: bool = False


LET_IN = Verdict(200)


def judge(gate: Gate, asked: Asked) -> Verdict:
    """Decide about a request."""
    for rule in (_check_host, _check_method, _check_origin, _check_site, _check_secret):
        verdict = rule(gate, asked)
        if verdict is not None:
            return verdict
    return LET_IN


def _check_host(gate: Gate, asked: Asked) -> Verdict | None:
    hosts = [host.lower() for host in asked.all("host")]
    if len(hosts) == 1 and hosts[0] in gate.hosts:
        return None
    return Verdict(400, "This server has another name or port: use the link that it printed.")


def _check_method(gate: Gate, asked: Asked) -> Verdict | None:
    del gate
    return None if asked.method in _METHODS else Verdict(405, "This page can only be read.")


def _check_origin(gate: Gate, asked: Asked) -> Verdict | None:
    if not asked.all("origin") or asked.has_only("origin", gate.origins):
        return None
    return Verdict(403, "Another site's page asked for this.")


def _check_site(gate: Gate, asked: Asked) -> Verdict | None:
    del gate
    is_landing = asked.is_navigation and asked.path in _LANDINGS
    if not asked.is_from_elsewhere or is_landing:
        return None
    return Verdict(403, "Another site's page asked for this.")


def _check_secret(gate: Gate, asked: Asked) -> Verdict | None:
    if asked.path in _OPEN or has_cookie(gate, asked) or _has_key(gate, asked):
        return None
    # A browser keeps our cookie back where another site's link led here, for instance that of a
    # terminal in a browser. The page then asks once more by itself, and the cookie comes with it.
    return Verdict(
        401,
        "You are not let in yet: use the link that <code>convoy watch</code> printed last. "
        "Each works once.",
        asks_again=asked.is_from_elsewhere,
    )


def has_cookie(gate: Gate, asked: Asked) -> bool:
    """Tell whether a browser was let in before."""
    pairs = (pair.strip() for value in asked.all("cookie") for pair in value.split(";"))
    wanted = f"{gate.cookie_name}={gate.cookie}"
    return any(_is_same(pair, wanted) for pair in pairs)


def _has_key(gate: Gate, asked: Asked) -> bool:
    shown = asked.all("authorization")
    is_for_it = asked.path.startswith(_FOR_SCRAPERS)
    return is_for_it and len(shown) == 1 and _is_same(shown[0], f"Bearer {gate.key}")


def _is_same(shown: str, wanted: str) -> bool:
    """Compare in a time that does not tell how much was right."""
    return hmac.compare_digest(shown.encode(errors="replace"), wanted.encode())


# ---------------------------------------------------------------- the shell around it


def asked_by(scope: Scope) -> Asked:
    """Return what a request asks."""
    headers = [
        (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
    ]
    return Asked(scope["method"], scope["path"], headers)


class Guard:
    """Stands before the whole application, and puts the protective headers on every answer."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            return  # nothing else is served
        verdict = judge(self._gate, asked_by(scope))
        app = self._app if verdict is LET_IN else refusal(verdict)
        try:
            await app(scope, receive, _protected(send))
        except Exception:  # the browser was told 500; the server must not end for it
            _log.exception("the page failed at %s", scope["path"])


def refusal(verdict: Verdict) -> HTMLResponse:
    """Return the page that tells a person why."""
    again = '<meta http-equiv="refresh" content="0; url=/">' if verdict.asks_again else ""
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8">{again}'
        f"<title>Convoy</title><p>{verdict.reason}</p></html>\n"
    )
    headers = {405: {"Allow": ", ".join(_METHODS)}, 401: {"WWW-Authenticate": "Bearer"}}
    return HTMLResponse(page, verdict.status, headers.get(verdict.status))


def _protected(send: Send) -> Send:
    async def send_protected(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name.lower() for name, _ in message["headers"]}
            added = [(n.lower().encode(), v.encode()) for n, v in HEADERS.items()]
            message["headers"] = [
                *message["headers"],
                *((name, value) for name, value in added if name not in own),
            ]
        await send(message)

    return send_protected
