"""What carries messages between ranks, and what happens when one of them is gone."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from convoy.errors import ConvoyError


class PeerLostError(ConvoyError):
    """A rank that we wait for is gone, or has not come in time."""


class Wires(Protocol):
    """What a sum needs of a group. What was begun is waited for by whoever began it."""

    def start_send(self, tensor: Tensor, rank: int) -> Any:  # noqa: ANN401 - each has its own
        """Begin to send a tensor to a rank; messages between two ranks keep their order."""
        ...

    def start_receive(self, tensor: Tensor, rank: int) -> Any:  # noqa: ANN401
        """Begin to fill a tensor with what a rank sends."""
        ...

    def wait(self, work: Any) -> None:  # noqa: ANN401
        """Wait for what was begun; raise an error if the rank is gone, or a deadline has passed."""
        ...


@runtime_checkable
class AroundWires(Protocol):
    """Wires with a sum over all ranks of their own."""

    def sum_around(self, tensor: Tensor) -> None:
        """Add up a tensor over all ranks, in place."""
        ...


@dataclass(frozen=True, slots=True)
class _Begun:
    work: dist.Work
    rank: int | None  # None: all


class ProcessGroupWires:
    """The wires of a plain process group of torch.distributed, for tensors on the CPU (gloo).

    Args:
        group: None for the default one.
        deadline_s: how long a rank is waited for.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, deadline_s: float = 60.0) -> None:
        self._group = group
        self._deadline_s = deadline_s

    def start_send(self, tensor: Tensor, rank: int) -> _Begun:
        """Begin to send a tensor to a rank."""
        return self._begin(rank, lambda group: group.send([tensor], rank, 0))

    def start_receive(self, tensor: Tensor, rank: int) -> _Begun:
        """Begin to fill a tensor with what a rank sends."""
        return self._begin(rank, lambda group: group.recv([tensor], rank, 0))

    def sum_around(self, tensor: Tensor) -> None:
        """Add up a tensor over all ranks by gloo's all-reduce, in place."""
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=self._deadline_s)
        self.wait(self._begin(None, lambda group: group.allreduce([tensor], options)))

    def wait(self, work: _Begun) -> None:
        """Wait for what was begun."""
        try:
            work.work.wait(timedelta(seconds=self._deadline_s))
        except RuntimeError as error:
            raise self._lost(work.rank, error) from error

    def _begin(self, rank: int | None, begin: Any) -> _Begun:  # noqa: ANN401 - a function of the group
        group = self._group or dist.group.WORLD
        assert group is not None, "torch.distributed has no group yet"
        try:
            return _Begun(begin(group), rank)
        except RuntimeError as error:
            raise self._lost(rank, error) from error

    def _lost(self, rank: int | None, error: RuntimeError) -> PeerLostError:
        who = "a rank" if rank is None else f"rank {rank}"
        words = str(error).strip().partition("\n")[0]
        return PeerLostError(
            f"{who} is gone, or has not answered in {self._deadline_s:g} s: {words}"
        )
