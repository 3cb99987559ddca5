"""Who may ask for what: each rule alone, and the order in which they are asked."""

import pytest

from convoy.monitor.dashboard.address import Address
from convoy.monitor.dashboard.guard import LET_IN, Asked, judge, make_gate

KEY = "ab" * 32
GATE = make_gate(Address("10.1.2.3", "10.1.2.3", 8765), KEY)
COOKIE = ("Cookie", f"{GATE.cookie_name}={GATE.cookie}")
BEARER = ("Authorization", f"Bearer {KEY}")
HOST = ("Host", "127.0.0.1:8765")
Header = tuple[str, str]

FOREIGN_HOSTS = [
    "evil.example",
    "evil.example:8765",
    "127.0.0.1",
    "127.0.0.1:80",
    "127.0.0.1:8766",
    "127.0.0.1:08765",
    "127.0.0.1:8765:8765",
    "127.0.0.1:8765.evil.example",
    "127.0.0.1:8765@evil.example",
    "user@127.0.0.1:8765",
    "localhost.:8765",
    "localhost.evil.example:8765",
    "xlocalhost:8765",
    "127.1:8765",
    "2130706433:8765",
    "0.0.0.0:8765",
    "[::]:8765",
    "::1:8765",
    "[::ffff:127.0.0.1]:8765",
    "127.0.0.1:8765, evil.example",
    " 127.0.0.1:8765",
    "",
]
METHODS = [
    *("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "MKCOL"),
    *("get", "Get", "head", "GETT", "GET ", "", "BREW", "QUERY"),
]
FOREIGN_ORIGINS = [
    "http://evil.example",
    "https://127.0.0.1:8765",
    "http://127.0.0.1",
    "http://127.0.0.1:3000",
    "http://127.0.0.1:8765.evil.example",
    "http://127.0.0.1:8765/",
    "HTTP://127.0.0.1:8765",
    "null",
    "",
    "file://",
]


def status(path: str = "/", *headers: Header, method: str = "GET", host: Header = HOST) -> int:
    return judge(GATE, Asked(method, path, [host, *headers])).status


@pytest.mark.parametrize(
    "name", ["127.0.0.1:8765", "localhost:8765", "LocalHost:8765", "[::1]:8765", "10.1.2.3:8765"]
)
def test_its_own_names_are_let_in(name: str) -> None:
    assert status("/", COOKIE, host=("Host", name)) == 200


@pytest.mark.parametrize("name", FOREIGN_HOSTS)
@pytest.mark.parametrize("path", ["/", "/healthz", "/enter", "/api/snapshot"])
def test_a_foreign_host_is_400_whatever_else_is_right(name: str, path: str) -> None:
    assert status(path, COOKIE, BEARER, host=("Host", name)) == 400


def test_no_host_and_two_hosts_are_400() -> None:
    assert judge(GATE, Asked("GET", "/", [COOKIE])).status == 400
    assert status("/", COOKIE, HOST) == 400


def test_a_usual_port_may_be_left_out() -> None:
    for port, is_encrypted in ((80, False), (443, True)):
        gate = make_gate(Address("127.0.0.1", "127.0.0.1", port, is_encrypted), KEY)
        assert judge(gate, Asked("GET", "/healthz", [("Host", "localhost")])) is LET_IN
        assert judge(gate, Asked("GET", "/healthz", [("Host", f"localhost:{port}")])) is LET_IN


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("path", ["/", "/healthz", "/enter", "/api/stream", "/nothing"])
def test_every_method_but_get_and_head_is_405(method: str, path: str) -> None:
    assert status(path, COOKIE, BEARER, method=method) == 405


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_reading_is_let_in(method: str) -> None:
    assert status("/api/snapshot", COOKIE, method=method) == 200


@pytest.mark.parametrize("origin", FOREIGN_ORIGINS)
@pytest.mark.parametrize("path", ["/", "/healthz", "/enter", "/api/stream"])
def test_a_foreign_origin_is_403_even_with_the_cookie(origin: str, path: str) -> None:
    assert status(path, COOKIE, ("Origin", origin)) == 403


def test_its_own_origin_is_let_in_but_not_twice() -> None:
    own = ("Origin", "http://127.0.0.1:8765")
    assert status("/api/stream", COOKIE, own) == 200
    assert status("/api/stream", COOKIE, own, own) == 403
    assert status("/api/stream", COOKIE, own, ("Origin", "http://evil.example")) == 403


NAVIGATION = [("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document")]
FRAME = [("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "iframe")]
SCRIPT = [("Sec-Fetch-Mode", "no-cors"), ("Sec-Fetch-Dest", "script")]


@pytest.mark.parametrize("site", ["cross-site", "same-site", "made-up", ""])
@pytest.mark.parametrize(
    ("path", "how", "expected"),
    [
        ("/", NAVIGATION, 200),
        ("/enter", NAVIGATION, 200),
        ("/api/snapshot", NAVIGATION, 403),
        ("/metrics", NAVIGATION, 403),
        ("/static/main.js", NAVIGATION, 403),
        ("/healthz", SCRIPT, 403),
        ("/", FRAME, 403),
        ("/", SCRIPT, 403),
        ("/", [], 403),
        ("/enter", FRAME, 403),
        ("/api/snapshot", SCRIPT, 403),
    ],
)
def test_from_elsewhere_only_a_link_to_the_page_leads_in(
    site: str, path: str, how: list[Header], expected: int
) -> None:
    assert status(path, COOKIE, ("Sec-Fetch-Site", site), *how) == expected


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_its_own_page_may_fetch_all(site: str) -> None:
    for path in ("/", "/api/stream", "/static/main.js"):
        assert status(path, COOKIE, ("Sec-Fetch-Site", site), *SCRIPT) == 200


@pytest.mark.parametrize(
    "cookie",
    [
        [],
        [("Cookie", "")],
        [("Cookie", GATE.cookie)],
        [("Cookie", f"convoy-8766={GATE.cookie}")],
        [("Cookie", f"{GATE.cookie_name}=")],
        [("Cookie", f"{GATE.cookie_name}={GATE.cookie[:-1]}")],
        [("Cookie", f"{GATE.cookie_name}={GATE.cookie}x")],
        [("Cookie", f"{GATE.cookie_name}={GATE.cookie.upper()}")],
        [("Cookie", f"{GATE.cookie_name}={KEY}")],
        [("Cookie", f"x{GATE.cookie_name}={GATE.cookie}")],
        [("Cookie", f"{GATE.cookie_name}=\udcff\x00")],
        [("Authorization", f"Bearer {GATE.cookie}")],
        [("Authorization", KEY)],
        [("Authorization", f"Basic {KEY}")],
        [BEARER, BEARER],
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/snapshot", "/metrics", "/static/main.js", "/no"])
def test_without_the_secret_it_is_401(cookie: list[Header], path: str) -> None:
    assert status(path, *cookie) == 401


def test_the_cookie_is_found_among_others() -> None:
    crowd = ("Cookie", f"a=b; {GATE.cookie_name}=old; {COOKIE[1]} ;c")
    assert status("/", crowd) == 200
    assert status("/", ("Cookie", "a=b"), COOKIE) == 200


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/metrics", 200),
        ("/api/snapshot", 200),
        ("/api/stream", 200),
        ("/", 401),
        ("/static/main.js", 401),
        ("/API/snapshot", 401),
    ],
)
def test_the_key_is_for_programs(path: str, expected: int) -> None:
    assert status(path, BEARER) == expected


def test_health_and_entry_need_no_secret() -> None:
    assert status("/healthz") == status("/enter") == 200
    assert status("/healthz/") == status("/enter/") == 401


def test_a_page_without_its_cookie_asks_once_more_by_itself() -> None:
    elsewhere = Asked("GET", "/", [HOST, ("Sec-Fetch-Site", "cross-site"), *NAVIGATION])
    again = Asked("GET", "/", [HOST, ("Sec-Fetch-Site", "same-origin"), *NAVIGATION])
    assert judge(GATE, elsewhere).asks_again
    assert not judge(GATE, again).asks_again  # so it does not go on for ever


def test_rules_are_asked_in_order() -> None:
    worst = [("Host", "evil"), ("Origin", "http://evil"), ("Sec-Fetch-Site", "cross-site")]
    assert judge(GATE, Asked("DELETE", "/", worst)).status == 400
    assert judge(GATE, Asked("DELETE", "/", [HOST, *worst[1:]])).status == 405
    assert judge(GATE, Asked("GET", "/", [HOST, *worst[1:]])).status == 403
    assert judge(GATE, Asked("GET", "/", [HOST])).status == 401
