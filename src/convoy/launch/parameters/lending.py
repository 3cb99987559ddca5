"""Who has which shared memory: blocks that nodes hand in, and vectors that they are lent.

From a node's call until its answer, its block is the service's to read; from the answer until its
next call, what it was lent is the node's to read. A node that has given a call up and makes another
overtakes the first, which must then touch neither.
"""

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from convoy.errors import ConvoyError
from convoy.launch.parameters.vectors import DamagedError
from convoy.memory.shared import SharedRooms, SharedVector, remove

Owner = tuple[int, str]  # node and incarnation


@dataclass(eq=False)
class Block:
    """A node's shared memory.

    Attributes:
        turn: its newest call; older ones, given up by the node, may neither read nor lend.
        lent: what the node is reading until its next call.
    """

    up: SharedVector
    owner: Owner
    turn: int = 0
    lent: Tensor | None = None

    def check(self, turn: int) -> None:
        """Refuse a call that was overtaken."""
        if self.turn != turn:
            raise OvertakenError("a later call of this node is here")


class OvertakenError(ConvoyError):
    """The node has given this call up and made another."""


class Lending:
    """Keeps the blocks of all nodes.

    Args:
        rooms: where the service's own vectors are.
        size, dtype: of a vector.
    """

    def __init__(self, rooms: SharedRooms, size: int, dtype: torch.dtype) -> None:
        self._rooms, self._size, self._dtype = rooms, size, dtype
        self._blocks: dict[str, Block] = {}
        self._lock = threading.Lock()
        self._placing = threading.Lock()
        self._placed: tuple[Tensor, Tensor] | None = None  # a vector, and its copy to look at

    def begin(self, name: str, owner: Owner, turn: int) -> Block:
        """Return a node's block, which is the service's from now on."""
        with self._lock:
            block = self._blocks.get(name)
            if block is None:
                up = SharedVector.open(name, self._size, self._dtype)
                if up is None:
                    raise DamagedError("there is no such shared memory")
                block = self._blocks[name] = Block(up, owner)
            if block.owner != owner:
                raise DamagedError("this shared memory is another node's")
            if turn <= block.turn:
                raise OvertakenError("a later call of this node is here")
            block.turn, block.lent = turn, None
        return block

    def lend(self, vector: Tensor, block: Block, turn: int) -> str | None:
        """Let a node read a vector until its next call; return the name of where it is."""
        name = self._rooms.name_of(vector)
        if name is None:
            vector = self._place(vector)
            name = self._rooms.name_of(vector)
        with self._lock:
            block.check(turn)
            block.lent = vector if name is not None else None
        return name

    def _place(self, vector: Tensor) -> Tensor:
        """Return a copy that nodes can look at: one for all of them."""
        with self._placing:
            if self._placed is None or self._placed[0] is not vector:
                self._placed = (vector, self._rooms.copy(vector))
            return self._placed[1]

    def forget(self, owner: Owner) -> None:
        """Let a node's blocks vanish."""
        with self._lock:
            for name in [n for n, block in self._blocks.items() if block.owner == owner]:
                del self._blocks[name]
                remove(name)

    def close(self) -> None:
        """Let everything vanish."""
        for name in self._blocks:
            remove(name)
        self._rooms.close()
