"""How a browser is let in: once by a link, then by a cookie that outlives the server."""

from pathlib import Path

from convoy.monitor.dashboard.entry import Entry
from convoy.monitor.dashboard.key import cookie_value, key_path, read_or_make_key
from tests.monitor.dashboard.browser import ask
from tests.monitor.dashboard.served import make_site, served


def target(link: str) -> str:
    return link.partition("127.0.0.1")[2].partition("/")[2].join(["/", ""])


def test_a_token_is_good_once_and_then_another_is_told() -> None:
    told: list[str] = []
    entry = Entry("http://127.0.0.1:1", told.append)
    first = entry.link.partition("=")[2]
    assert len(first) >= 43
    assert not entry.spend("")
    assert not entry.spend(first[:-1])
    assert not entry.spend(first + "\udcff")
    assert told == []
    assert entry.spend(first)
    assert not entry.spend(first)
    assert told == [entry.link]
    assert entry.spend(told[0].partition("=")[2])


def test_a_link_becomes_a_cookie(tmp_path: Path) -> None:
    with served(tmp_path / "events.jsonl") as site:
        link = target(site.entry.link)
        assert ask(site.port, link, method="HEAD").status == 200  # which does not use it up
        answer = ask(site.port, link)
        assert (answer.status, answer.header("location")) == (303, "/")
        value, *rules = answer.header("set-cookie").split("; ")
        assert value == f"convoy-{site.port}={site.gate.cookie}"
        assert {rule.lower() for rule in rules} == {"httponly", "path=/", "samesite=strict"}
        assert ask(site.port, "/", headers={"Cookie": value}).status == 200
        assert len(site.told) == 1


def test_a_used_link_lets_nobody_else_in(tmp_path: Path) -> None:
    with served(tmp_path / "events.jsonl") as site:
        link = target(site.entry.link)
        ask(site.port, link)
        again = ask(site.port, link)
        assert again.status == 401
        assert b"used before" in again.body
        assert not any(name == "set-cookie" for name, _ in again.headers)
        # Who was let in comes to the page by the old link as well.
        assert ask(site.port, link, headers=site.cookie).status == 303
        (fresh,) = site.told
        assert ask(site.port, target(fresh)).status == 303


def test_the_key_is_never_sent(tmp_path: Path) -> None:
    with served(tmp_path / "events.jsonl") as site:
        answer = ask(site.port, target(site.entry.link))
        assert site.gate.key not in str(answer)


def test_the_cookie_outlives_the_server(tmp_path: Path) -> None:
    path = key_path(tmp_path / "keys", tmp_path / "run")
    events = tmp_path / "events.jsonl"
    first = make_site(events, 8765, key=read_or_make_key(path))
    second = make_site(events, 8765, key=read_or_make_key(path))
    assert first.cookie == second.cookie
    assert first.entry.link != second.entry.link
    other_run = read_or_make_key(key_path(tmp_path / "keys", tmp_path / "other"))
    assert make_site(events, 8765, key=other_run).cookie != first.cookie
    assert make_site(events, 8766, key=read_or_make_key(path)).cookie != first.cookie


def test_the_cookie_does_not_tell_the_key() -> None:
    assert cookie_value("ab" * 32, 1) != cookie_value("ab" * 32, 2)
    assert len(cookie_value("ab" * 32, 1)) == 64
