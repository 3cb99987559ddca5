"""A run is followed to its end, also to one that nobody tells of."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from convoy.monitor.dashboard import feed as module
from convoy.monitor.dashboard.feed import GONE, Feed
from tests.monitor.dashboard.lines import append, end, line, start, step


@pytest.fixture(autouse=True)
def _swift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_S", 0.005)
    monkeypatch.setattr(module, "_PROBE_S", 0.0)


def follow(feed: Feed, check: Callable[[], Awaitable[None]]) -> None:
    """Follow a run while a check goes on."""

    async def run() -> None:
        following = asyncio.create_task(feed.follow())
        try:
            async with asyncio.timeout(20):
                await feed.caught_up(20)
                await check()
        finally:
            feed.close()
            await following

    asyncio.run(run())


async def until(feed: Feed, condition: Callable[[], bool]) -> None:
    while not condition():
        await feed.news(feed.view, feed.view.number, 20)


def state(feed: Feed) -> str:
    return str(feed.view.snapshot()["run"]["state"])


def held() -> bool:
    return True


def free() -> bool:
    return False


def test_what_is_appended_is_taken_in(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    feed = Feed(path, "a", held)

    async def check() -> None:
        assert state(feed) == "waiting"
        append(path, start())
        await until(feed, lambda: state(feed) == "running")
        append(path, step(100))
        await until(feed, lambda: feed.view.snapshot()["progress"]["samples"] == 100)
        append(path, end())
        await until(feed, lambda: state(feed) == "finished")

    follow(feed, check)


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    damaged = ["{", "[]", "1", "null", '""', "\0\0", "[" * 100_000, '{"event": 1}', '{"event": []}']
    path.write_text(line(start()) + "\n".join(damaged) + "\n" + line(step(7)))
    feed = Feed(path, "a", held)

    async def check() -> None:
        assert feed.view.snapshot()["progress"]["samples"] == 7

    follow(feed, check)


def test_a_file_begun_anew_gives_another_view(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path, start(), step(100))
    feed = Feed(path, "a", held)

    async def check() -> None:
        former = feed.view
        path.write_text(line(start(model="other")))
        await until(feed, lambda: feed.view is not former)
        snapshot = feed.view.snapshot()
        assert snapshot["run"]["model"] == "other"
        assert snapshot["progress"]["samples"] is None

    follow(feed, check)


def test_a_run_whose_process_is_gone_is_marked(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path, start(), step(100))
    feed = Feed(path, "a", free)

    async def check() -> None:
        await until(feed, lambda: state(feed) == "gone")
        assert feed.view.snapshot()["run"]["reason"] == GONE

    follow(feed, check)


def test_a_run_that_ended_is_not_gone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path, start(), end())
    feed = Feed(path, "a", free)

    async def check() -> None:
        await asyncio.sleep(0.05)
        assert state(feed) == "finished"

    follow(feed, check)


def test_an_end_just_before_the_hold_was_given_up_counts(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path, start())
    states: list[str] = []

    def is_held() -> bool:
        append(path, end())  # the run ends just when we look
        return False

    feed = Feed(path, "a", is_held)
    feed.view.mark_gone = lambda reason: states.append(reason)  # type: ignore[method-assign]

    async def check() -> None:
        await until(feed, lambda: state(feed) == "finished")

    follow(feed, check)
    assert states == []


def test_a_dead_run_is_looked_at_once_only(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path, start())
    looks: list[bool] = []

    def is_held() -> bool:
        looks.append(True)
        return False

    feed = Feed(path, "a", is_held)

    async def check() -> None:
        await until(feed, lambda: state(feed) == "gone")
        await asyncio.sleep(0.05)
        assert len(looks) == 1  # each look could be in the way of who wants to go on with it

    follow(feed, check)


def test_a_dead_run_that_goes_on_is_running_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path, start())
    is_alive = False
    feed = Feed(path, "a", lambda: is_alive)

    async def check() -> None:
        nonlocal is_alive
        await until(feed, lambda: state(feed) == "gone")
        is_alive = True
        append(path, start(reason="it goes on"))
        await until(feed, lambda: state(feed) == "running")

    follow(feed, check)


def test_a_long_file_is_taken_in_without_holding_anyone_up(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(line(start()) + "".join(line(step(i)) for i in range(1, 20_001)))
    feed = Feed(path, "a", held)
    turns = 0

    async def run() -> None:
        nonlocal turns
        following = asyncio.create_task(feed.follow())
        while (feed.view.snapshot()["progress"]["samples"] or 0) < 20_000:
            turns += 1
            await asyncio.sleep(0)
        feed.close()
        await following

    asyncio.run(run())
    assert turns > path.stat().st_size >> 17


def test_close_wakes_who_waits(tmp_path: Path) -> None:
    feed = Feed(tmp_path / "events.jsonl", "a", held)

    async def run() -> None:
        waiting = asyncio.create_task(feed.news(feed.view, feed.view.number, 600))
        await asyncio.sleep(0)
        feed.close()
        async with asyncio.timeout(10):
            await waiting
            await feed.news(feed.view, feed.view.number, 600)  # and nobody waits from now on

    asyncio.run(run())
