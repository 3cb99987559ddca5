"""The processes of a parameter service: one, or several that share the weights (shards.py)."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from convoy.launch.parameters.process import ServiceOrder, ServiceProcess
from convoy.launch.parameters.shards import cut_vector, join_vector, part_digest


class Services:
    """The processes of a parameter service, as if there were one.

    Args:
        order: of one service that would hold everything.
        parts: how many share it.
    """

    def __init__(self, order: ServiceOrder, parts: int) -> None:
        self._statistics = len(order.vector) - order.weights
        vectors = cut_vector(order.vector, order.weights, parts)
        self._processes: list[ServiceProcess] = []
        try:
            for place, vector in enumerate(vectors):
                self._processes.append(ServiceProcess(_part_of(order, place, vector, parts)))
        except BaseException:
            self.end()
            raise

    @property
    def address(self) -> str:
        """Return where nodes find them."""
        return ",".join(process.address for process in self._processes)

    @property
    def restarts(self) -> int:
        """Return how often one was started again."""
        return sum(process.restarts for process in self._processes)

    @property
    def version(self) -> int:
        """Return the version that the last start went on from."""
        return self._processes[0].version

    @property
    def damaged(self) -> list[str]:
        """Return the states that were found damaged."""
        return [name for process in self._processes for name in process.damaged]

    @property
    def pids(self) -> list[int]:
        """Return the processes' numbers."""
        return [process.pid for process in self._processes if process.pid is not None]

    def revive(self) -> str | None:
        """Start those again that have died; return how one died, if one has."""
        died = [how for how in (process.revive() for process in self._processes) if how]
        return died[0] if died else None

    def end(self) -> None:
        """Let them write their states, and end them."""
        for process in self._processes:
            process.end()

    def admit(self, node: int, incarnation: str, speed: float, threads: int = 0) -> None:
        """Let a node take part."""
        for process in self._processes:
            process.admit(node, incarnation, speed, threads)

    def remove(self, node: int, incarnation: str) -> None:
        """Let a node take part no longer."""
        for process in self._processes:
            process.remove(node, incarnation)

    def open(self) -> None:
        """Let them serve nodes."""
        for process in self._processes:
            process.open()

    def pause(self) -> None:
        """Let the one that hands out work give nobody any until they are opened again."""
        self._processes[0].pause()

    def standing(self) -> dict[str, Any]:
        """Return how the run stands: as the first says, with what all have moved."""
        first, *others = (process.standing() for process in self._processes)
        for other in others:
            first["moved_bytes"] += other["moved_bytes"]
            first["problem"] = first["problem"] or other["problem"]
        return first

    def weights(self, epoch: int) -> tuple[int, Tensor]:
        """Return version and vector at the end of an epoch, or of now where epoch is 0."""
        found = [process.weights(epoch) for process in self._processes]
        return found[0][0], join_vector([part for _, part in found], self._statistics)


def _part_of(order: ServiceOrder, place: int, vector: Tensor, parts: int) -> ServiceOrder:
    statistics = len(order.vector) - order.weights if place == 0 else 0
    if parts == 1:
        return order
    return replace(
        order,
        vector=vector,
        weights=len(vector) - statistics,
        model=part_digest(order.model, place, parts),
        folder=order.folder / str(place),
        record=order.record if place == 0 else order.record.with_suffix(f".{place}.jsonl"),
        hands_out=place == 0,
    )
