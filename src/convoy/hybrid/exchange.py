"""Activations between nodes: gathered from all, or partial sums returned to their owners.

Everything goes straight from one node to another, for every pair at once. What is begun can be
finished later, so that computing goes on meanwhile. Sums are taken in the order of the nodes:
their bits do not depend on who was faster.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from convoy.collectives.wires import Wires

Finish = Callable[[], Tensor]


class Exchange:
    """One node's exchanges with all others.

    Args:
        wires: carry tensors.
        rank, size: which node this is, and how many there are.
        device: where tensors are wanted.
        wire: where they lie on their way.

    Attributes:
        waited_s: how long this node has waited for others so far.
        sent_bytes: what it has sent so far.
    """

    def __init__(
        self,
        wires: Wires,
        rank: int,
        size: int,
        device: torch.device | None = None,
        wire: torch.device | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.waited_s = 0.0
        self.sent_bytes = 0
        self._wires = wires
        self._device = device or torch.device("cpu")
        self._wire = wire or self._device
        self._others = [rank ^ k for k in range(1, 1 << (size - 1).bit_length())]
        self._others = [other for other in self._others if other < size]

    # ---------------------------------------------------------------- rows: samples

    def start_gather(self, own: Tensor, counts: Sequence[int]) -> Finish:
        """Begin to bring everyone's rows together; `counts` says how many each has."""
        parts = self._start(
            [own] * self.size, [(count, *own.shape[1:]) for count in counts], own.dtype
        )

        def finish() -> Tensor:
            found = parts()
            found[self.rank] = own
            return torch.cat(found)

        return finish

    def start_return(self, partial: Tensor, counts: Sequence[int]) -> Finish:
        """Begin to add up everyone's partial sums; each gets the rows that are its own."""
        pieces = partial.split(list(counts))
        shape = (counts[self.rank], *partial.shape[1:])
        return self._start_sum(pieces, shape, partial.dtype)

    def gather(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        """Bring everyone's rows together."""
        return self.start_gather(own, counts)()

    def give_back(self, partial: Tensor, counts: Sequence[int]) -> Tensor:
        """Add up everyone's partial sums of the rows that are this node's own."""
        return self.start_return(partial, counts)()

    # ---------------------------------------------------------------- columns: neurons

    def gather_columns(self, own: Tensor, widths: Sequence[int]) -> Tensor:
        """Bring everyone's columns together."""
        parts = self._start([own] * self.size, [(len(own), width) for width in widths], own.dtype)
        found = parts()
        found[self.rank] = own
        return torch.cat(found, 1)

    def give_back_columns(self, partial: Tensor, widths: Sequence[int]) -> Tensor:
        """Add up everyone's partial sums of the columns that are this node's own."""
        pieces = partial.split(list(widths), 1)
        shape = (len(partial), widths[self.rank])
        return self._start_sum(pieces, shape, partial.dtype)()

    # ---------------------------------------------------------------- one to one

    def start_send(self, tensor: Tensor, rank: int) -> Callable[[], None]:
        """Begin to send a tensor to one node; what is returned waits until it is done."""
        leaving = tensor.to(self._wire).contiguous()
        self.sent_bytes += leaving.numel() * leaving.element_size()
        return functools.partial(self._finish_send, self._wires.start_send(leaving, rank), leaving)

    def _finish_send(self, work: Any, leaving: Tensor) -> None:  # noqa: ANN401
        del leaving  # it had to live until now
        self._wires.wait(work)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Tensor:
        """Return the tensor that a node sends."""
        arriving = torch.empty(tuple(shape), dtype=dtype, device=self._wire)
        self._wires.wait(self._wires.start_receive(arriving, rank))
        return arriving.to(self._device)

    # ---------------------------------------------------------------- how

    def _start_sum(
        self, pieces: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Finish:
        parts = self._start(pieces, [shape] * self.size, dtype)

        def finish() -> Tensor:
            found = parts()
            found[self.rank] = pieces[self.rank]
            total = found[0].clone() if self.rank == 0 else found[0]
            for part in found[1:]:
                total += part
            return total

        return finish

    def _start(
        self, pieces: Sequence[Tensor], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
    ) -> Callable[[], list[Tensor]]:
        """Begin to send each node its piece, and to receive one of a shape from each."""
        arriving = {
            other: torch.empty(shapes[other], dtype=dtype, device=self._wire)
            for other in self._others
        }
        leaving = {other: pieces[other].to(self._wire).contiguous() for other in self._others}
        receives = [
            self._wires.start_receive(part, other)
            for other, part in arriving.items()
            if part.numel()
        ]
        sends = [
            self._wires.start_send(part, other) for other, part in leaving.items() if part.numel()
        ]
        self.sent_bytes += sum(part.numel() * part.element_size() for part in leaving.values())

        def finish() -> list[Tensor]:
            started = time.perf_counter()
            for work in [*receives, *sends]:
                self._wires.wait(work)
            leaving.clear()  # they had to live until now
            self.waited_s += time.perf_counter() - started
            own = torch.empty(0)
            return [
                arriving[node].to(self._device) if node in arriving else own
                for node in range(self.size)
            ]

        return finish
