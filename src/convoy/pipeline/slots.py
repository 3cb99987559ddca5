"""Rows of memory that one stage writes and its neighbour on the same machine reads.

What a stage sends is copied once, to a row that the neighbour sees; only a short message travels.
There are `lead + 2` rows, used in turn. A row is free again by the time it is written:

    activations  before forward f a stage has done backward f - 1 - lead, for which its neighbour
                 had begun its own: batches before that one are read no more
    gradients    before backward g a stage has got forward g, which its neighbour sent after
                 backward g - 1 - lead: gradients up to there are read no more
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from convoy.memory.shared import SharedVector, remove

_NAME_LENGTH = 64  # bytes


class Slots:
    """Some rows.

    Args:
        rows: in the order in which they are used.
    """

    def __init__(self, rows: Sequence[SharedVector]) -> None:
        self._rows = tuple(rows)

    def __bool__(self) -> bool:
        return bool(self._rows)

    def row(self, number: int) -> Tensor:
        """Return where the message with a number lies."""
        return self._rows[number % len(self._rows)].vector

    def names(self, count: int) -> Tensor:
        """Return by what the neighbour finds so many rows, as bytes; zeros where there are none."""
        block = torch.zeros(count, _NAME_LENGTH, dtype=torch.uint8)
        for place, row in zip(block, self._rows, strict=False):
            text = row.name.encode()
            place[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return block

    def hide(self) -> None:
        """Let nobody else open the rows: they vanish with the last one that has them open."""
        for row in self._rows:
            remove(row.name)


def make_slots(count: int, size: int, dtype: torch.dtype) -> Slots:
    """Make so many rows of so many numbers; none where this machine has no memory to share."""
    rows = [SharedVector.make(size, dtype) for _ in range(count)]
    found = [row for row in rows if row is not None]
    if len(found) == count:
        return Slots(found)
    Slots(found).hide()
    return Slots(())


def open_slots(names: Tensor, size: int, dtype: torch.dtype) -> Slots:
    """Open a neighbour's rows; none where it lives on another machine."""
    rows = []
    for block in names:
        name = bytes(block.tolist()).rstrip(b"\0").decode("ascii", "replace")
        row = SharedVector.open(name, size, dtype)
        if row is None:
            return Slots(())
        rows.append(row)
    return Slots(rows)
