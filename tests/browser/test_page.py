"""The page with runs that were written by hand: every panel, hostile names, very many events."""

import json
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from convoy.monitor.events import (
    EndEvent,
    Event,
    JoinEvent,
    NodesEvent,
    NoteEvent,
    RefusedEvent,
    StalenessEvent,
    TimelineEvent,
    as_record,
)
from tests.browser.chromium import Browser, chromium, needs_chromium
from tests.browser.watched import watch
from tests.monitor.test_view import T0, evaluation, nodes, start, step

pytestmark = needs_chromium

_HOSTILE = "<img src=x onerror='window.pwned=1'><script>window.pwned=1<\\script>"


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        found.size(1280, 1600)
        yield found


@pytest.fixture
def browser(window: Browser) -> Browser:
    """Return a browser that has forgotten the page of the test before."""
    window.open("about:blank")
    window.errors()
    return window


def _write(run: Path, events: Iterable[Event], *, first: int = 0) -> None:
    """Add events to a run's file, a second apart."""
    run.mkdir(exist_ok=True)
    lines = [json.dumps(as_record(event, T0 + first + n)) for n, event in enumerate(events)]
    with (run / "events.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n")


def _join(node: int, name: str) -> JoinEvent:
    return JoinEvent(node=node, name=name, pid=1, device="cpu", reason="in a probe")


def _timeline() -> TimelineEvent:
    spans: list[list[Any]] = [
        [0, 0.0, 0.004, "conv1, group 1", "forward", 1],
        [1, 0.0, 0.003, "conv1, group 2", "forward", 0],
        [0, 0.004, 0.009, "conv1, error", "error", 1],
        [1, 0.004, 0.008, "conv1, gradient", "gradient", 0],
    ]
    rows = ["thread 1", "thread 2"]
    return TimelineEvent(
        of="step", step=7, rows=rows, spans=spans, makespan_s=0.009, bound_s=0.008, balance=0.89
    )


def test_every_panel_of_a_service_run_shows_its_numbers(browser: Browser, tmp_path: Path) -> None:
    run = tmp_path / "service-run"
    _write(
        run,
        [
            start("server"),
            _join(0, "fast"),
            _join(1, "slow"),
            nodes([1.0, 2.0], [60, 40]),
            step(400),
            StalenessEvent(step=3, counts=[5, 3, 0, 2], nodes=[0, 1], latest=[0, 3]),
            RefusedEvent(cause="too stale", count=2, reason="2 submissions were refused"),
            _timeline(),
            evaluation(1, 0.75),
            EndEvent(state="finished", reason="all 4 epochs are done"),
        ],
    )
    with watch(run) as page:
        browser.open(page.link)
        browser.wait(lambda: browser.text("state") == "finished", "the run is shown")
        assert browser.cells('[data-test="staleness-bar"]', "data-count") == ["5", "3", "0", "2"]
        assert browser.cells('[data-test="refused-row"]', "data-count") == ["2"]
        stale = browser.cells('tr[data-node] [data-col="staleness"]', "data-value")
        assert stale == ["0", "3"]
        assert browser.cells('[data-test="span"]', "data-critical").count("1") == 2
        assert len(browser.find_all('[data-test="span"]')) == 4
        assert "75" in browser.text("test-accuracy")
        assert browser.errors() == []


def test_axes_themes_and_filters_are_reached_by_the_keyboard(
    browser: Browser, tmp_path: Path
) -> None:
    run = tmp_path / "keys"
    _write(run, [start(), _join(0, "one"), nodes([1.0], [5]), step(10), evaluation(1, 0.5)])
    with watch(run) as page:
        browser.open(page.link)
        browser.wait(lambda: browser.find_all("tr[data-node]"), "the node is there")
        reached = browser.run(
            "[...document.querySelectorAll('button, input, a[href], [tabindex=\"0\"]')]"
            ".filter(e => e.tabIndex >= 0 && !e.disabled).length"
        )
        assert reached >= 5  # theme, two switches, regions that scroll
        unnamed = browser.run(
            "[...document.querySelectorAll('button, input')].filter(e => !(e.textContent.trim() ||"
            " e.ariaLabel || (e.labels && e.labels.length))).length"
        )
        assert unnamed == 0
        before = browser.run("getComputedStyle(document.body).backgroundColor")
        browser.find('[data-test="theme"]').send_keys("\n")
        after = browser.run("getComputedStyle(document.body).backgroundColor")
        assert before != after
        browser.find('[data-test="theme"]').send_keys("\n")


def test_names_are_text_and_never_markup(browser: Browser, tmp_path: Path) -> None:
    run = tmp_path / _HOSTILE
    hostile = start(model=_HOSTILE, data=_HOSTILE, reason=_HOSTILE)
    _write(
        run,
        [
            hostile,
            _join(0, _HOSTILE),
            nodes([1.0], [5]),
            NoteEvent(text=_HOSTILE),
            RefusedEvent(cause=_HOSTILE, count=1, reason=_HOSTILE),
            EndEvent(state="failed", reason=_HOSTILE),
        ],
    )
    with watch(run) as page:
        browser.open(page.link)
        browser.wait(lambda: browser.text("state") == "failed", "the run is shown")
        assert browser.text("run-name") == _HOSTILE
        assert _HOSTILE in browser.text("reason")
        assert _HOSTILE in browser.find('tr[data-node="0"]').text
        assert browser.run("window.pwned === undefined")
        assert browser.find_all("img") == []
        assert browser.errors() == []


def _many(first: int, count: int) -> list[Event]:
    """Return the events of a long run: steps, nodes and a note in turn."""
    told: list[Event] = []
    for number in range(first, first + count):
        kind = number % 3
        if kind == 0:
            told.append(step(number, loss=1 / (1 + number)))
        elif kind == 1:
            told.append(nodes([1.0, 1.5], [60, 40]))
        else:
            told.append(NoteEvent(text=f"note {number}"))
    return told


def _wait_for_count(browser: Browser, count: str) -> None:
    shown = '[data-test="count-events"]'
    browser.wait(lambda: browser.cells(shown, "data-value") == [count], f"{count} events", 30.0)


@pytest.mark.timeout(180)
def test_a_page_left_open_for_100_000_events_stays_quick_and_small(
    browser: Browser, tmp_path: Path
) -> None:
    run, block, blocks = tmp_path / "long", 5_000, 20
    _write(run, [start(epochs=10_000), _join(0, "one"), _join(1, "two"), *_many(0, 300)])
    with watch(run) as page:
        browser.open(page.link)
        browser.wait(lambda: len(browser.find_all("tr[data-node]")) == 2, "the nodes are there")
        sizes, times = [], []
        for number in range(blocks):
            _write(run, _many(300 + number * block, block), first=300 + number * block)
            counted = str(303 + (number + 1) * block)
            _wait_for_count(browser, counted)
            started = time.monotonic()
            browser.run("new Promise(done => requestAnimationFrame(() => done(1)))")
            times.append(time.monotonic() - started)
            sizes.append(browser.run("document.querySelectorAll('*').length"))
        heap = browser.run("performance.memory.usedJSHeapSize / 2**20")
        # Not the slowest: that one tells of who else was busy on this machine.
        typical = statistics.median(times)
        assert typical < 0.5, "the page did not answer at once"
        assert max(sizes) - sizes[1] < 500, "the page grows"
        assert heap < 100
        points = browser.run(
            "Math.max(...Object.values(window.convoyState.series).map(s => s.columns.time.length))"
        )
        assert points <= 2000
        assert len(browser.find_all('[data-test="log-row"]')) <= 200
        assert browser.errors() == []
        print(f"typical answer {typical:.3f} s, heap {heap:.1f} MiB, {max(sizes)} elements")


def test_a_node_of_another_version_is_no_reason_to_show_nothing(
    browser: Browser, tmp_path: Path
) -> None:
    run = tmp_path / "odd"
    _write(run, [start(), _join(0, "one"), NodesEvent(**vars(nodes([1.0], [5]))), step(10)])
    with (run / "events.jsonl").open("a") as file:
        file.write('{"event": "of tomorrow", "time": 1}\nno json at all\n{"event": "step"')
    with watch(run) as page:
        browser.open(page.link)
        browser.wait(lambda: browser.find_all("tr[data-node]"), "the node is there")
        browser.wait(lambda: browser.text("state") == "gone", "nobody works on it")
        assert browser.errors() == []
