"""A real run of four unequal nodes in the browser: one is killed, one joins, the server dies."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from convoy.monitor.view import RunView
from tests.browser.chromium import Browser, chromium, needs_chromium
from tests.browser.watched import watch
from tests.faults.team import Team, free_port, start_program

pytestmark = needs_chromium

_MARKED_WITHIN_S = 3.0
_PICTURES = os.environ.get("CONVOY_PICTURES")  # a folder for the pictures of the documentation


def _view(run: Path) -> dict[str, Any]:
    """Return what the run's file of events says."""
    view = RunView(run.name)
    for line in (run / "events.jsonl").read_text().splitlines():
        view.take(json.loads(line))
    return view.snapshot()


def _node(browser: Browser, number: int, column: str) -> str:
    """Return the number behind a cell of the table of nodes, or its words."""
    values = browser.cells(f'tr[data-node="{number}"] [data-col="{column}"]', "data-value")
    return values[0] if values else ""


def _counted(browser: Browser) -> int:
    """Return how many events the page knows of."""
    return int(browser.cells('[data-test="count-events"]', "data-value")[0])


def _assert_page_shows(browser: Browser, expected: dict[str, Any]) -> None:
    """Compare every panel with what the file of events says."""
    run, progress = expected["run"], expected["progress"]
    assert browser.text("run-name") == run["name"]
    assert browser.text("state") == run["state"]
    assert run["reason"] in browser.text("reason")
    accuracy = f"{progress['test_accuracy']:.2%}"
    assert browser.text("test-accuracy").replace("\u202f", "") == accuracy
    _assert_nodes(browser, expected)
    for name, count in expected["counts"].items():
        assert browser.cells(f'[data-test="count-{name}"]', "data-value") == [str(count)], name
    newest = [entry["text"] for entry in reversed(expected["log"])]
    shown = browser.find_all('[data-test="log-row"]')
    assert len(shown) == min(200, len(newest))
    assert all(text in row.text for text, row in zip(newest, shown[:20], strict=False))
    assert browser.find_all('[data-test="staleness-bar"]') == []
    for name, series in expected["series"].items():
        columns = browser.run(f"window.convoyState.series['{name}'].columns")
        assert columns == series["columns"], name


def _assert_nodes(browser: Browser, expected: dict[str, Any]) -> None:
    for node in expected["nodes"]:
        number = node["node"]
        assert _node(browser, number, "state") == node["state"]
        for column, name in (
            ("speed", "speed"),
            ("share", "share"),
            ("waiting", "waiting"),
            ("samples", "samples"),
            ("faults", "faults"),
            ("costs", "costs_s"),
            ("last-seen", "last_seen"),
        ):
            assert float(_node(browser, number, column)) == pytest.approx(node[name]), (
                column,
                node,
            )
    for wait in expected["waits"]:
        cell = f'[data-test="waits"][data-node="{wait["node"]}"][data-for="{wait["for"]}"]'
        (seconds,) = browser.cells(cell, "data-seconds")
        assert float(seconds) == pytest.approx(wait["seconds"])


@contextmanager
def _joining(port: int, token: Path) -> Iterator[None]:
    """Have a node of elsewhere take part."""
    node = start_program("join", f"127.0.0.1:{port}", "--token-file", token)
    try:
        yield
    finally:
        node.kill()
        node.communicate()


@pytest.mark.timeout(240)
def test_a_run_with_a_kill_and_a_join_is_shown_as_it_is(tmp_path: Path) -> None:
    port = free_port()
    lead = ("lead", "--token-file", tmp_path / "token", "--port", port)
    options: dict[str, Any] = {
        "nodes": 3,
        "speeds": "0.35,0.3,0.2",
        "restarts": 0,
        "strategy": "lockstep",
    }
    options |= {"epochs": 400, "min_nodes": 2, "allocation": "speed"}
    with (
        ExitStack() as others,
        chromium(tmp_path / "profile") as browser,
        Team(*lead, pace_s=0.0, **options) as team,
    ):
        team.wait_for_group(0, 1, 2)
        with watch(team.out) as page:
            browser.size(1280, 1600)
            browser.open(page.link)
            browser.wait(lambda: browser.text("state") == "running", "the page shows the run")
            assert "token" not in browser.driver.current_url
            others.enter_context(_joining(port, tmp_path / "token"))
            browser.wait(lambda: _node(browser, 3, "state") == "training", "node 4 trains", 40.0)
            team.wait_for_steps(3)
            killed = team.kill(1)
            browser.wait(lambda: _node(browser, 1, "state") == "lost", "node 2 is marked", 10.0)
            marked_s = time.time() - killed
            assert marked_s < _MARKED_WITHIN_S
            assert "lost" in browser.find('tr[data-node="1"]').text
            team.wait_for_steps(3)
            assert browser.errors() == []
            _take_pictures(browser, page.base)
        used = page.port
        browser.wait(lambda: browser.find('[data-test="banner"]').is_displayed(), "it is told", 20)
        with watch(team.out, used):
            gone = '[data-test="banner"]'
            took_s = browser.wait(lambda: not browser.find(gone).is_displayed(), "it is back", 20)
            browser.errors()  # those of the time without a server
            told = len(team.events(since=0))
            browser.wait(lambda: _counted(browser) >= told, "the page knows all again", 2.0)
            team.lead.send_signal(2)
            team.lead.wait(60)
            browser.wait(lambda: browser.text("state") == "interrupted", "the end is shown")
            expected = _view(team.out)
            time.sleep(1.0)
            _assert_page_shows(browser, expected)
            assert [node["state"] for node in expected["nodes"]].count("lost") == 1
            assert browser.errors() == []
        print(f"killed node marked after {marked_s:.2f} s, page back after {took_s:.2f} s")


def _take_pictures(browser: Browser, base: str) -> None:
    """Look at the page as people do; the pictures are kept where that was asked for."""
    folder = Path(_PICTURES) if _PICTURES else Path("pictures")
    folder.mkdir(exist_ok=True)
    for name, width in (("desktop", 1280), ("phone", 390)):
        for scheme in ("light", "dark"):
            browser.size(width, 900)
            browser.prefer(scheme)
            browser.picture(folder / f"watch-{name}-{scheme}.png")
            wide = browser.run("document.documentElement.scrollWidth")
            assert wide <= width, f"{base} scrolls sideways at {width} pixels"
    browser.prefer("light")
    browser.size(1280, 1600)
