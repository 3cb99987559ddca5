"""Sums of the ranks of one host, through memory that all of them see.

Every rank has a slot, twice: while the others read the one, it fills the other. A vector goes
through in chunks that stay in a core's cache, and the ranks meet once a chunk.

    short vectors, or two ranks   copy ours in | meet | add up all slots into ours
    long ones                     copy ours in | meet | add up a part | meet | copy all parts out

In the second, while chunk i is copied in, a part of chunk i - 1 is added up, and chunk i - 2 is
copied out. Numbers are added in the order of the ranks, whatever the size: which chunk they were
in changes no bit, and neither does who has added them.

A slot is free again by the time it is filled: whoever meets the others for a chunk has read all of
the chunk before the last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from convoy.collectives.rendezvous import PAGE_BYTES, Rendezvous
from convoy.collectives.schedule import even_bounds

_CHUNK_BYTES = 1 << 20  # of 256 KB to 4 MB the fastest, or nearly so, for 2 and 4 ranks on 2 cores
_MEMORY_BYTES = 32 << 20  # of all slots together, at most
_SHORT_BYTES = 1 << 16  # up to here each adds up all of it: cheaper than to meet twice


def chunk_bytes(size: int) -> int:
    """Return how long a slot is where so many ranks share a host."""
    return min(_CHUNK_BYTES, _MEMORY_BYTES // (2 * size + 2) // PAGE_BYTES * PAGE_BYTES)


def block_bytes(size: int) -> int:
    """Return how much memory so many ranks share: a page to meet, slots, and room for sums."""
    return PAGE_BYTES + (2 * size + 2) * chunk_bytes(size)


@dataclass(frozen=True, slots=True)
class _Slots:
    """The memory as numbers of one kind.

    Attributes:
        length: numbers of a slot.
        filled: what each rank has copied in; twice.
        sums: what all have added up together; twice.
    """

    length: int
    filled: tuple[tuple[Tensor, ...], ...]
    sums: tuple[Tensor, ...]


Stage = Callable[[int], object]  # of the chunk with a number


class Hearth:
    """One rank's side of the shared memory.

    Args:
        block: the memory, full of zeros at first.
        size: how many ranks share it.
        place: which of them this is.
        rendezvous: where they meet.
    """

    def __init__(self, block: Tensor, size: int, place: int, rendezvous: Rendezvous) -> None:
        self._block, self._size, self._place = block, size, place
        self._rendezvous = rendezvous
        self._turn = 0  # chunks so far: odd ones use the second slots
        self._slots: dict[torch.dtype, _Slots] = {}

    def sum(self, vector: Tensor) -> None:
        """Add up a flat vector over the ranks, in place."""
        if self._size == 2:
            # Both add the same two numbers: they get the same bits.
            self._swap(vector, lambda chunk, slots: chunk.add_(slots[1 - self._place]))
        elif vector.numel() * vector.element_size() <= _SHORT_BYTES:
            self._swap(vector, lambda chunk, slots: _add_up(slots, chunk))
        else:
            self._share_out(vector)

    def mix(self, vector: Tensor, other: int) -> None:
        """Make a vector the mean of ours and that of another place, which does the same."""
        self._swap(vector, lambda chunk, slots: chunk.add_(slots[other]).mul_(0.5))

    def spread(self, vector: Tensor, source: int) -> None:
        """Give all ranks the vector of one place."""
        slots, chunks, turns = self._cut(vector)

        def fill(number: int) -> None:
            if self._place == source:
                _first(slots.filled[turns[number]][source], chunks[number]).copy_(chunks[number])

        def take(number: int) -> None:
            if self._place != source:
                chunks[number].copy_(_first(slots.filled[turns[number]][source], chunks[number]))

        self._flow(len(chunks), (fill, take))

    def watch(self) -> None:
        """Take note of the others' processes, once all have opened the memory."""
        self._rendezvous.watch()

    def leave(self) -> None:
        """Take no part any more."""
        self._rendezvous.leave()

    def _swap(self, vector: Tensor, take: Callable[[Tensor, list[Tensor]], object]) -> None:
        """Show the others our numbers, and take what we need of theirs."""
        slots, chunks, turns = self._cut(vector)

        def fill(number: int) -> None:
            ours = slots.filled[turns[number]][self._place]
            _first(ours, chunks[number]).copy_(chunks[number])

        def take_all(number: int) -> None:
            chunk = chunks[number]
            take(chunk, [_first(slot, chunk) for slot in slots.filled[turns[number]]])

        self._flow(len(chunks), (fill, take_all))

    def _share_out(self, vector: Tensor) -> None:
        """Let each rank add up a part of every chunk."""
        slots, chunks, turns = self._cut(vector)

        def part(number: int) -> slice:
            bounds = even_bounds(chunks[number].numel(), self._size)
            return slice(bounds[self._place], bounds[self._place + 1])

        def fill(number: int) -> None:
            ours = _first(slots.filled[turns[number]][self._place], chunks[number])
            mine = part(number)  # nobody else needs it
            ours[: mine.start].copy_(chunks[number][: mine.start])
            ours[mine.stop :].copy_(chunks[number][mine.stop :])

        def add_up(number: int) -> None:
            mine = part(number)
            parts = [slot[mine] for slot in slots.filled[turns[number]]]
            parts[self._place] = chunks[number][mine]
            _add_up(parts, slots.sums[turns[number]][mine])

        def take(number: int) -> None:
            chunks[number].copy_(_first(slots.sums[turns[number]], chunks[number]))

        self._flow(len(chunks), (fill, add_up, take))

    def _flow(self, count: int, stages: Sequence[Stage]) -> None:
        """Take chunks through stages, one behind the other; all ranks meet after every step."""
        steps = count + len(stages) - 1 if count else 0
        done = 0
        for step in range(steps):
            if step:
                self._rendezvous.wait(done)
            for delay, stage in enumerate(stages):
                if 0 <= step - delay < count:
                    stage(step - delay)
            if step < steps - 1:  # that we have read the last one, the next sum will tell
                done = self._rendezvous.post()

    def _cut(self, vector: Tensor) -> tuple[_Slots, tuple[Tensor, ...], list[int]]:
        """Return the slots for a vector, its chunks, and which of the two slots each goes to."""
        slots = self._slots.get(vector.dtype) or self._make_slots(vector.dtype)
        chunks = vector.split(slots.length) if vector.numel() else ()
        turns = [(self._turn + number) % 2 for number in range(len(chunks))]
        self._turn += len(chunks)
        return slots, chunks, turns

    def _make_slots(self, dtype: torch.dtype) -> _Slots:
        length = chunk_bytes(self._size) // dtype.itemsize
        rows = self._block[PAGE_BYTES:].view(dtype).split(length)
        size = self._size
        made = _Slots(length, (rows[:size], rows[size : 2 * size]), rows[2 * size :])
        self._slots[dtype] = made
        return made


def _first(slot: Tensor, like: Tensor) -> Tensor:
    """Return as much of a slot as a chunk fills."""
    return slot[: like.numel()]


def _add_up(parts: Sequence[Tensor], total: Tensor) -> None:
    """Add in the order of the ranks."""
    torch.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        total += part
