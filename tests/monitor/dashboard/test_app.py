"""The server's answers, over a real socket: what is sent, and what is on every answer."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoy.monitor.dashboard.assets import FOLDER, load_assets
from convoy.monitor.dashboard.guard import HEADERS
from tests.monitor.dashboard.browser import Answer, ask, ask_bytes, request
from tests.monitor.dashboard.lines import append, end, start, step
from tests.monitor.dashboard.served import KEY, Site, served

UP = "../../../../../../../../etc/passwd"
TRAVERSALS = [
    UP,
    f"/{UP}",
    f"./{UP}",
    "..",
    "../",
    "../app.py",
    "../__init__.py",
    "../../view.py",
    "/etc/passwd",
    "//etc/passwd",
    "///etc/passwd",
    "file:///etc/passwd",
    "vendor/../../app.py",
    "vendor/../main.js",
    "./main.js",
    "vendor//plot.js",
    "main.js/",
    "main.js/..",
    "main.js/../../app.py",
    "main.js%00",
    "main.js%00.html",
    "%00",
    "%2e%2e/app.py",
    "%2e%2e%2fapp.py",
    "..%2fapp.py",
    "..%2f..%2f..%2fetc%2fpasswd",
    "%252e%252e%252fapp.py",
    "%252e%252e/%252e%252e/etc/passwd",
    "%25252e%25252e%25252fapp.py",
    "..%c0%afapp.py",
    "%c0%ae%c0%ae%c0%afapp.py",
    "%e0%80%ae%e0%80%ae/app.py",
    "%uff0e%uff0e/app.py",
    "%ef%bc%8e%ef%bc%8e/app.py",
    "%ef%bc%8e%ef%bc%8e%ef%bc%8fapp.py",
    "%e2%80%a5/app.py",
    "..%5capp.py",
    "..\\app.py",
    "..\\..\\..\\windows\\win.ini",
    "%5c%5cserver%5cshare",
    "C:\\windows\\win.ini",
    "c:/windows/win.ini",
    "....//app.py",
    "..;/app.py",
    "..%3b/app.py",
    ".%2e/app.py",
    "..%0d%0aapp.py",
    "..%09/app.py",
    "~/.ssh/id_rsa",
    "~root/.bashrc",
    "$HOME/.bashrc",
    "proc/self/environ",
    "%2fproc%2fself%2fenviron",
    ".git/config",
    "index.html%20",
    "INDEX.HTML",
    "a" * 5000,
    "%ff%fe",
    "",
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    events = tmp_path_factory.mktemp("run") / "events.jsonl"
    append(events, start(), step(100, loss=float("nan")), step(200), end())
    with served(events) as site:
        yield site


def is_protected(answer: Answer) -> bool:
    found = dict(answer.headers)
    wanted = {name.lower(): value for name, value in HEADERS.items()}
    if found.get("cache-control") == "no-cache":
        wanted["cache-control"] = "no-cache"
    return len(found) == len(answer.headers) and wanted.items() <= found.items()


def test_there_are_at_least_forty_traversals() -> None:
    assert len(set(TRAVERSALS)) == len(TRAVERSALS) >= 40


@pytest.mark.parametrize("name", TRAVERSALS)
def test_no_path_of_a_client_reaches_the_disk(site: Site, name: str) -> None:
    for target in (f"/static/{name}", f"/{name}"):
        if target == "/":
            continue
        answer = ask_bytes(site.port, request(site.port, target, headers=site.cookie))
        assert answer.status in (400, 404), target
        for secret in (b"root:", b"import", b"PATH=", b"[core]", b"plot", b"strict"):
            assert secret not in answer.body


def test_a_target_with_a_foreign_server_is_not_followed(site: Site) -> None:
    assert ask(site.port, "http://evil.example/static/main.js", headers=site.cookie).status == 404


def test_the_page_and_its_files_are_sent(site: Site) -> None:
    page = ask(site.port, "/", headers=site.cookie)
    assert (page.status, page.body) == (200, b"<!doctype html><title>page</title>")
    assert page.header("content-type").startswith("text/html")
    assert ask(site.port, "/static/vendor/plot.js", headers=site.cookie).body == b"plot"


def test_a_file_is_not_sent_again_while_it_is_the_same(site: Site) -> None:
    tag = ask(site.port, "/static/main.js", headers=site.cookie).header("etag")
    again = ask(site.port, "/static/main.js", headers={**site.cookie, "If-None-Match": tag})
    assert (again.status, again.body) == (304, b"")
    assert again.header("cache-control") == "no-cache"
    other = ask(site.port, "/static/main.js", headers={**site.cookie, "If-None-Match": '"x"'})
    assert other.status == 200


def test_the_snapshot_is_json_that_browsers_read(site: Site) -> None:
    answer = ask(site.port, "/api/snapshot", headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status == 200
    assert answer.header("content-type") == "application/json"

    def refuse(word: str) -> None:
        raise AssertionError(word)

    snapshot = json.loads(answer.body, parse_constant=refuse)
    assert snapshot["run"]["state"] == "finished"
    assert snapshot["progress"]["samples"] == 200


def test_metrics_are_for_who_has_the_key(site: Site) -> None:
    answer = ask(site.port, "/metrics", headers={"Authorization": f"Bearer {KEY}"})
    assert b"convoy_samples_total 200.0" in answer.body
    assert answer.header("content-type") == "text/plain; version=0.0.4; charset=utf-8"
    assert ask(site.port, "/metrics").status == 401


def test_health_tells_nothing_but_that(site: Site) -> None:
    answer = ask(site.port, "/healthz")
    assert (answer.status, answer.body) == (200, b"ok\n")


@pytest.mark.parametrize("target", ["/", "/api/snapshot", "/api/stream", "/metrics", "/healthz"])
def test_head_sends_no_body_and_ends(site: Site, target: str) -> None:
    answer = ask(site.port, target, method="HEAD", headers=site.cookie)
    assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize(
    "method",
    ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "BREW", "get"],
)
def test_other_methods_are_405(site: Site, method: str) -> None:
    for target in ("/", "/api/snapshot", "/enter", "/nothing"):
        answer = ask(site.port, target, method=method, headers=site.cookie)
        assert answer.status == 405
        assert answer.header("allow") == "GET, HEAD"
        assert is_protected(answer)


def test_a_websocket_is_not_opened(site: Site) -> None:
    wish = {"Upgrade": "websocket", "Connection": "Upgrade, close", "Sec-WebSocket-Version": "13"}
    answer = ask(site.port, "/", headers={**site.cookie, **wish, "Sec-WebSocket-Key": "eA=="})
    assert answer.status == 200


@pytest.mark.parametrize(
    ("status", "target", "headers"),
    [
        (200, "/", {"let in": "yes"}),
        (200, "/static/main.js", {"let in": "yes"}),
        (200, "/api/snapshot", {"let in": "yes"}),
        (200, "/metrics", {"let in": "yes"}),
        (200, "/healthz", {}),
        (303, "/enter?token=wrong", {"let in": "yes"}),
        (400, "/", {"Host": "evil.example"}),
        (401, "/", {}),
        (401, "/enter", {}),
        (403, "/", {"Origin": "http://evil.example"}),
        (404, "/static/no.js", {"let in": "yes"}),
        (404, "/api/", {"let in": "yes"}),
        (404, "/api/snapshot/", {"let in": "yes"}),
    ],
)
def test_every_answer_is_protected(
    site: Site, status: int, target: str, headers: dict[str, str]
) -> None:
    given = dict(headers)
    if given.pop("let in", None):
        given |= site.cookie
    answer = ask(site.port, target, headers=given)
    assert answer.status == status
    assert is_protected(answer)


def test_a_failure_is_protected_too_and_the_server_lives_on(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr(site.feed.view, "snapshot", fail)
        answer = ask(site.port, "/api/snapshot", headers=site.cookie)
    assert answer.status == 500
    assert is_protected(answer)
    assert b"bug" not in answer.body
    assert "the page failed at /api/snapshot" in caplog.text
    assert ask(site.port, "/healthz").status == 200


def test_what_is_refused_tells_a_person_what_to_do(site: Site) -> None:
    answer = ask(site.port, "/")
    assert b"use the link that <code>convoy watch</code> printed" in answer.body
    assert b"refresh" not in answer.body


def test_a_link_from_elsewhere_is_followed_once_more_as_our_own(site: Site) -> None:
    elsewhere = {
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "navigate",
        "Sec-Fetch-Dest": "document",
    }
    answer = ask(site.port, "/", headers=elsewhere)
    assert answer.status == 401
    assert b'<meta http-equiv="refresh" content="0; url=/">' in answer.body


def test_only_files_that_a_page_can_use_are_taken_in(tmp_path: Path) -> None:
    for name in ("index.html", "a.js", "vendor/b.css", "notes.md", "x.py", ".hidden"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    assets = load_assets(tmp_path)
    assert set(assets) == {"index.html", "a.js", "vendor/b.css"}
    assert assets["a.js"].content == b"a.js"
    assert len({asset.tag for asset in assets.values()}) == 3


def test_the_real_page_is_there() -> None:
    assert b"<!doctype html>" in load_assets(FOLDER)["index.html"].content[:100].lower()
