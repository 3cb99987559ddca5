"""A network that misbehaves as a test wants: a TCP proxy on loopback.

    client  -- "up" -->     proxy  -- "up" -->     target
            <-- "down" --          <-- "down" --

It knows nothing of what travels, so it serves plain and encrypted connections alike. Whatever it
does to them is counted in `hits`, for a test has to show that its fault happened.
"""

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

Direction = Literal["up", "down"]
BOTH: tuple[Direction, ...] = ("up", "down")
RANDOM_FAULTS = ("lost request", "lost in flight", "lost reply")
_CHUNK, _BURST_AT_MOST = 1 << 16, 1 << 22
_IN_FLIGHT = 64  # chunks that a delayed line holds, before the sender has to wait
_BURST_OVER_S = 0.02  # without another byte
_REPLY_BYTES = 100  # up to here, it may only keep the connection going
_SMOOTH_S = 0.02  # a throttled line lets through what this is enough for, at a time
_PART_S = 1.0
_WAIT_S = 10.0
_RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: close at once, and not politely

_Queue = asyncio.Queue[tuple[float, bytes]]


@dataclass(eq=False)
class _Line:
    """One direction of the network, for all connections."""

    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    free_at: float = 0.0
    end_after: int | None = None
    flip_after: int | None = None
    is_open: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Connection:
    """A client's connection, and what is to happen in its present exchange."""

    task: asyncio.Task[Any]
    writers: list[asyncio.StreamWriter]
    in_exchange: bool = False
    loses_reply: bool = False


class _Broken(Exception):  # noqa: N818 - it is what was wanted
    """A fault ends a connection."""


class ChaosProxy:
    """Forwards connections to a target, with the faults that are asked for.

    Faults hold for connections that are there and for new ones. Bytes are counted from when a
    fault is asked for, over all connections.

    Args:
        host, port: the target.

    Attributes:
        port: where the proxy listens.
        hits: how often each fault struck. "delay", "throttle", "cut up", "cut down": pieces of
            data; "close", "refuse", "truncate" and the random faults: connections; "flip": bits.
            "exchange" counts the occasions that random faults had.
    """

    def __init__(self, host: str, port: int) -> None:
        self.hits: Counter[str] = Counter()
        self._target = (host, port)
        self._lines: dict[Direction, _Line] = {way: _Line() for way in BOTH}
        self._connections: set[_Connection] = set()
        self._refuses = False
        self._probability, self._draw = 0.0, random.Random(0)
        self._kinds: tuple[str, ...] = RANDOM_FAULTS
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = int(self._server.sockets[0].getsockname()[1])
        self.heal()

    @property
    def address(self) -> str:
        """Return where the proxy listens, as "host:port"."""
        return f"127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """Return how many connections there are."""
        return len(self._connections)

    def __enter__(self) -> "ChaosProxy":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._run(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WAIT_S)
        self._loop.close()

    # ------------------------------------------------------------ faults

    def delay(self, seconds: float, *ways: Direction) -> None:
        """Let everything arrive so much later; just as much can be on its way."""
        self._change(*ways, delay_s=seconds)

    def throttle(self, bytes_per_s: float, *ways: Direction) -> None:
        """Let at most so many bytes through, of all connections together."""
        self._change(*ways, bytes_per_s=bytes_per_s)

    def cut(self, *ways: Direction) -> None:
        """Let nothing through, both ways or one way, and close nothing, until healed.

        What was sent meanwhile arrives then, as TCP would send it again. No connection reaches
        the target while either way is cut.
        """
        self._do(*(self._lines[way].is_open.clear for way in ways or BOTH))

    def heal(self) -> None:
        """Undo whatever was asked for."""
        self._change(delay_s=0.0, bytes_per_s=0.0, end_after=None, flip_after=None)
        self._do(*(line.is_open.set for line in self._lines.values()))
        self.refuse(False)
        self.fail_at_random(0.0)

    def refuse(self, refuses: bool = True) -> None:
        """Reset new connections as they come."""
        self._do(lambda: setattr(self, "_refuses", refuses))

    def close_all(self) -> None:
        """Close every connection; new ones are welcome."""
        self._do(self._close_all)

    def truncate(self, way: Direction, after: int) -> None:
        """Let so many more bytes through, then close the connection that the last went by."""
        self._change(way, end_after=after)

    def flip(self, way: Direction, after: int) -> None:
        """Let so many more bytes through, then change one bit in the next."""
        self._change(way, flip_after=after)

    def fail_at_random(
        self, probability: float, seed: int = 0, kinds: tuple[str, ...] = RANDOM_FAULTS
    ) -> None:
        """Let exchanges fail with some probability, in one of several ways.

        An exchange begins with a client's first bytes since the target's last.

        - "lost request": nothing of what the client sends arrives, and the connection is closed.
        - "lost in flight": a part of it arrives, and the connection is closed.
        - "lost reply": all of it arrives; the connection is closed instead of the reply.
        """

        def change() -> None:
            self._probability, self._kinds, self._draw = probability, kinds, random.Random(seed)

        assert set(kinds) <= set(RANDOM_FAULTS), kinds
        self._do(change)

    # ------------------------------------------------------------ into the proxy's thread

    def _change(self, *ways: Direction, **values: float | None) -> None:
        def change() -> None:
            for way in ways or BOTH:
                for name, value in values.items():
                    setattr(self._lines[way], name, value)

        self._do(change)

    def _do(self, *actions: Callable[[], None]) -> None:
        async def act() -> None:
            for action in actions:
                action()

        self._run(act())

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_WAIT_S)

    # ------------------------------------------------------------ in it: connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            self.hits["refuse"] += 1
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
            return
        task = asyncio.current_task()
        assert task is not None
        connection = _Connection(task, [writer])
        self._connections.add(connection)
        try:
            await self._forward(connection, reader, writer)
        except* (OSError, asyncio.CancelledError):
            pass  # however it ends, both sides learn of it
        finally:
            self._connections.discard(connection)
            for one in connection.writers:
                one.close()

    async def _forward(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        for way in BOTH:
            await self._pass_cut(way)
        target_reader, target_writer = await asyncio.open_connection(*self._target)
        connection.writers.append(target_writer)
        pairs = {"up": (reader, target_writer), "down": (target_reader, writer)}
        try:
            async with asyncio.TaskGroup() as group:
                for way in BOTH:
                    source, sink = pairs[way]
                    queue: _Queue = asyncio.Queue(_IN_FLIGHT)
                    group.create_task(self._take_in(self._lines[way], source, queue))
                    group.create_task(self._pass_on(way, queue, sink, connection))
        except* _Broken:
            await asyncio.gather(*(_part(source, sink) for source, sink in pairs.values()))

    async def _take_in(self, line: _Line, source: asyncio.StreamReader, queue: _Queue) -> None:
        data = b"x"
        while data:
            smooth = int(line.bytes_per_s * _SMOOTH_S) or _CHUNK
            data = await source.read(min(_CHUNK, smooth))
            if line.delay_s:
                self.hits["delay"] += 1
            await queue.put((self._loop.time() + line.delay_s, data))

    async def _pass_on(
        self, way: Direction, queue: _Queue, sink: asyncio.StreamWriter, connection: _Connection
    ) -> None:
        while True:
            due, data = await queue.get()
            await asyncio.sleep(max(0.0, due - self._loop.time()))
            await self._pass_cut(way)
            if not data:
                sink.write_eof()
                return
            await self._pass_throttle(self._lines[way], len(data))
            if way == "up":
                await self._begin_exchange(connection, data, queue, sink)
            else:
                self._end_exchange(connection, data)
            await self._send(self._lines[way], data, sink)

    def _close_all(self) -> None:
        for connection in self._connections:
            self.hits["close"] += 1
            connection.task.cancel()

    async def _shut(self) -> None:
        self._server.close()
        tasks = [connection.task for connection in self._connections]
        for connection in list(self._connections):
            for writer in connection.writers:
                writer.transport.abort()
            connection.task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.01)  # transports close in the loop's next turns

    # ------------------------------------------------------------ in it: faults

    async def _pass_cut(self, way: Direction) -> None:
        if not self._lines[way].is_open.is_set():
            self.hits[f"cut {way}"] += 1
            await self._lines[way].is_open.wait()

    async def _pass_throttle(self, line: _Line, size: int) -> None:
        if line.bytes_per_s:
            self.hits["throttle"] += 1
            line.free_at = max(line.free_at, self._loop.time()) + size / line.bytes_per_s
            await asyncio.sleep(line.free_at - self._loop.time())

    async def _begin_exchange(
        self, connection: _Connection, data: bytes, queue: _Queue, sink: asyncio.StreamWriter
    ) -> None:
        if connection.in_exchange:
            return
        connection.in_exchange = True
        self.hits["exchange"] += 1
        if self._draw.random() >= self._probability:
            return
        kind = self._draw.choice(self._kinds)
        if kind == "lost reply":
            connection.loses_reply = True  # once there is one
            return
        if kind == "lost in flight":
            burst = await _gather(data, queue)
            sink.write(burst[: self._draw.randint(1, len(burst) - 1) if len(burst) > 1 else 0])
            await sink.drain()
        self.hits[kind] += 1
        raise _Broken

    def _end_exchange(self, connection: _Connection, data: bytes) -> None:
        if not connection.loses_reply:
            connection.in_exchange = False
        elif len(data) > _REPLY_BYTES:
            self.hits["lost reply"] += 1
            raise _Broken

    async def _send(self, line: _Line, data: bytes, sink: asyncio.StreamWriter) -> None:
        data, is_last = self._truncated(line, self._flipped(line, data))
        sink.write(data)
        await sink.drain()
        if is_last:
            self.hits["truncate"] += 1
            raise _Broken

    def _flipped(self, line: _Line, data: bytes) -> bytes:
        if line.flip_after is None:
            return data
        at, line.flip_after = line.flip_after, line.flip_after - len(data)
        if at >= len(data):
            return data
        line.flip_after = None
        self.hits["flip"] += 1
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    def _truncated(self, line: _Line, data: bytes) -> tuple[bytes, bool]:
        if line.end_after is None:
            return data, False
        at, line.end_after = line.end_after, line.end_after - len(data)
        if at > len(data):
            return data, False
        line.end_after = None
        return data[:at], True


async def _part(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """End a stream, and hear out the other: a reset would take back what has just been sent."""
    sink.write_eof()
    with contextlib.suppress(TimeoutError, OSError):
        async with asyncio.timeout(_PART_S):
            while await source.read(_CHUNK):
                pass


async def _gather(data: bytes, queue: _Queue) -> bytes:
    """Return what a client sends until it waits for something."""
    burst = bytearray(data)
    with contextlib.suppress(TimeoutError):
        while len(burst) < _BURST_AT_MOST and data:
            _, data = await asyncio.wait_for(queue.get(), _BURST_OVER_S)
            burst += data
    return bytes(burst)
