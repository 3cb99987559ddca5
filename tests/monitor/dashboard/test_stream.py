"""Server-sent events: all at first, then what changed; and readers that do not read."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.types import Message

from convoy.monitor.dashboard.feed import Feed
from convoy.monitor.dashboard.stream import EventStream, Pace, Seats, messages
from tests.monitor.dashboard.browser import Listener, ask
from tests.monitor.dashboard.lines import append, line, start, step
from tests.monitor.dashboard.served import SWIFT, served


def test_all_at_first_then_what_changed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path, start(), step(100), step(200))
    with served(path) as site:
        ask(site.port, "/api/snapshot", headers=site.cookie)  # answered when all is taken in
        listener = Listener(site.port, site.cookie)
        first = listener.message()
        assert listener.status == 200
        assert first["reset"] is True
        assert first["sections"]["progress"]["samples"] == 200
        append(path, step(300))
        delta = listener.message()
        assert "reset" not in delta
        assert set(delta["sections"]) <= {"run", "progress", "counts", "nodes"}
        assert delta["series"]["train"]["columns"]["samples"] == [300]
        assert delta["series"]["train"]["from"] == 2
        listener.close()


def test_a_file_begun_anew_is_told_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path, start(), step(100))
    with served(path) as site, Listener(site.port, site.cookie) as listener:
        listener.until_samples(100)
        path.write_text(line(start(model="other")))
        delta = listener.message()
        assert delta["reset"] is True
        assert delta["sections"]["run"]["model"] == "other"


def test_silence_is_broken_by_a_heartbeat(tmp_path: Path) -> None:
    with served(tmp_path / "events.jsonl") as site, Listener(site.port, site.cookie) as listener:
        listener.message()
        assert [listener.line() for _ in range(3)] == [": nothing new"] * 3


def test_the_usual_heartbeat_is_every_fifteen_seconds() -> None:
    assert (Pace().heartbeat_s, Pace().pause_s) == (15.0, 0.4)


def test_the_33rd_page_is_refused_until_another_leaves(tmp_path: Path) -> None:
    with served(tmp_path / "events.jsonl") as site:
        listeners = [Listener(site.port, site.cookie) for _ in range(32)]
        try:
            assert all(listener.message()["reset"] for listener in listeners)
            refused = ask(site.port, "/api/stream", headers=site.cookie)
            assert refused.status == 503
            assert refused.header("retry-after") == "10"
            assert ask(site.port, "/api/snapshot", headers=site.cookie).status == 200
            listeners.pop().close()
            while (late := Listener(site.port, site.cookie)).status != 200:
                late.close()  # the server has not noticed yet
            listeners.append(late)
        finally:
            for listener in listeners:
                listener.close()


def test_a_stream_that_was_not_let_in_takes_no_seat(tmp_path: Path) -> None:
    with served(tmp_path / "events.jsonl") as site:
        for _ in range(40):
            assert ask(site.port, "/api/stream").status == 401
        with Listener(site.port, site.cookie) as listener:
            assert listener.status == 200


def test_messages_come_no_faster_than_their_pause(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append(path, start())
    feed = Feed(path, "a", lambda: True)

    async def run() -> int:
        stream = messages(feed, Pace(pause_s=0.2, heartbeat_s=30))
        following = asyncio.create_task(feed.follow())
        await feed.caught_up(10)
        await anext(stream)
        for samples in range(1, 50):
            feed.view.take(json.loads(line(step(samples))))
        told = json.loads((await anext(stream)).removeprefix("data: "))
        feed.close()
        await following
        return len(told["series"]["train"]["columns"]["samples"])

    assert asyncio.run(run()) == 49  # all in one


def test_a_reader_that_never_reads_is_given_up_and_its_seat_is_free(tmp_path: Path) -> None:
    feed, seats = Feed(tmp_path / "events.jsonl", "a", lambda: True), Seats(1)
    made = 0

    async def never(message: Message) -> None:
        nonlocal made
        if message["type"] == "http.response.body":
            made += 1
            await asyncio.Event().wait()

    async def silent() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        assert seats.take()
        assert not seats.take()
        answer = EventStream(feed, seats, Pace(0.0, 0.01, patience_s=0.1))
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        async with asyncio.timeout(20):
            await answer(scope, silent, never)
        assert seats.take()

    asyncio.run(run())
    assert made == 1  # no second message was even worked out


def test_closing_the_feed_ends_every_stream(tmp_path: Path) -> None:
    feed = Feed(tmp_path / "events.jsonl", "a", lambda: True)

    async def count(stream: AsyncIterator[str]) -> int:
        found = 0
        async for _ in stream:
            found += 1
            feed.close()
        return found

    assert asyncio.run(count(messages(feed, SWIFT))) == 1
