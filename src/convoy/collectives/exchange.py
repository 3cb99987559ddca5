"""Acts a schedule out: messages in chunks, additions while the next chunks are on their way.

Nothing waits for a round to end. A chunk is sent as soon as what it consists of has been added up,
and a chunk that was received is added when somebody needs it, or its room. Three rules keep that
right, whatever the schedule:

    before numbers are sent        all that was received for these places is added
    before numbers are changed     all that was to be sent from these places is sent
    between two ranks              chunks go in the order of the schedule, on both sides

No rank can wait for another in a circle: what is sent in a round depends on earlier rounds only.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from convoy.collectives.schedule import Receive, Schedule, Send
from convoy.collectives.wires import Wires

_CHUNK_BYTES = 1 << 20
_ROOMS = 4  # chunks that may be on their way to be added


@dataclass(slots=True)
class _Pending:
    """A chunk that is on its way."""

    start: int
    stop: int
    work: Any
    room: Tensor | None = None  # where it arrives if it is to be added

    def touches(self, start: int, stop: int) -> bool:
        return self.start < stop and start < self.stop


class Exchange:
    """Runs schedules of one rank; the room for what arrives is kept from one to the next.

    Args:
        wires: carry the chunks.
        chunk_bytes: the longest message.
    """

    def __init__(self, wires: Wires, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._wires = wires
        self._chunk_bytes = chunk_bytes
        self._memory = torch.empty(0, dtype=torch.uint8)

    def run(self, schedule: Schedule, vector: Tensor) -> None:
        """Do this rank's part; `vector` is flat, and holds the outcome afterwards."""
        if any(step.sends or step.receives for step in schedule):
            _Course(self._wires, vector, self._rooms(vector)).run(schedule)

    def _rooms(self, vector: Tensor) -> list[Tensor]:
        """Return room for chunks of a vector; all of the same memory."""
        length = max(1, min(self._chunk_bytes // vector.element_size(), vector.numel()))
        needed = _ROOMS * length * vector.element_size()
        if self._memory.numel() < needed:
            self._memory = torch.empty(needed, dtype=torch.uint8)
        return list(self._memory[:needed].view(vector.dtype).split(length))


class _Course:
    """One vector's way through one schedule."""

    def __init__(self, wires: Wires, vector: Tensor, rooms: list[Tensor]) -> None:
        self._wires, self._vector = wires, vector
        self._chunk = rooms[0].numel()
        self._free = rooms
        self._sending: list[_Pending] = []
        self._arriving: list[_Pending] = []

    def run(self, schedule: Schedule) -> None:
        for step in schedule:
            for send in step.sends:
                for start, stop in self._chunks(send):
                    self._send(send.peer, start, stop)
            for receive in step.receives:
                for start, stop in self._chunks(receive):
                    self._receive(receive, start, stop)
        self._settle(0, self._vector.numel())
        self._let_go(0, self._vector.numel())

    def _chunks(self, message: Send | Receive) -> Iterator[tuple[int, int]]:
        for start in range(message.start, message.stop, self._chunk):
            yield start, min(start + self._chunk, message.stop)

    def _send(self, peer: int, start: int, stop: int) -> None:
        self._settle(start, stop)
        work = self._wires.start_send(self._vector[start:stop], peer)
        self._sending.append(_Pending(start, stop, work))

    def _receive(self, receive: Receive, start: int, stop: int) -> None:
        if not receive.adds:
            self._settle(start, stop)
            self._let_go(start, stop)
            work = self._wires.start_receive(self._vector[start:stop], receive.peer)
            self._arriving.append(_Pending(start, stop, work))
            return
        if not self._free:
            oldest = next(chunk for chunk in self._arriving if chunk.room is not None)
            self._settle(oldest.start, oldest.stop)
        room = self._free.pop()
        work = self._wires.start_receive(room[: stop - start], receive.peer)
        self._arriving.append(_Pending(start, stop, work, room))

    def _settle(self, start: int, stop: int) -> None:
        """Wait for all that is to arrive at some places, and add it in the schedule's order."""
        touched = [chunk for chunk in self._arriving if chunk.touches(start, stop)]
        if not touched:
            return
        self._arriving = [chunk for chunk in self._arriving if not chunk.touches(start, stop)]
        for chunk in touched:
            self._wires.wait(chunk.work)
            if chunk.room is not None:
                self._let_go(chunk.start, chunk.stop)
                self._vector[chunk.start : chunk.stop] += chunk.room[: chunk.stop - chunk.start]
                self._free.append(chunk.room)

    def _let_go(self, start: int, stop: int) -> None:
        """Wait until all that is sent from some places has left."""
        for chunk in [chunk for chunk in self._sending if chunk.touches(start, stop)]:
            self._wires.wait(chunk.work)
            self._sending.remove(chunk)
