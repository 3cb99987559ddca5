"""Several servers that share the weights, where one core is not enough for all of them.

The weights are cut into equal parts, one for each server; each merges its own part by the same
rule. The first also holds the statistics and hands out the work. To a node they look like one.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from convoy.launch.parameters.exchange import Exchange, Given
from convoy.outer.server import BehindError, Report


def cut_vector(vector: Tensor, weights: int, parts: int) -> list[Tensor]:
    """Return each server's part; the first has the statistics behind its weights.

    >>> [part.tolist() for part in cut_vector(torch.tensor([1, 2, 3, 9]), 3, 2)]
    [[1, 2, 9], [3]]
    """
    first, *others = vector[:weights].tensor_split(parts)
    return [torch.cat([first, vector[weights:]]), *others]


def join_vector(parts: Sequence[Tensor], statistics: int) -> Tensor:
    """Return the whole vector.

    >>> join_vector([torch.tensor([1, 2, 9]), torch.tensor([3])], 1).tolist()
    [1, 2, 3, 9]
    """
    first = parts[0]
    weights = len(first) - statistics
    return torch.cat([first[:weights], *parts[1:], first[weights:]])


class ShardedExchange:
    """Exchanges with several servers at once.

    Args:
        make: makes the exchange with one of them, given its place and the size of its part.
        vector: like those that will be exchanged.
        weights: how many of the numbers are weights.
        parts: how many servers there are.
    """

    def __init__(
        self, make: Callable[[int, int], Exchange], vector: Tensor, weights: int, parts: int
    ) -> None:
        self._weights, self._statistics = weights, len(vector) - weights
        sizes = [len(part) for part in cut_vector(vector, weights, parts)]
        self._parts = [make(place, size) for place, size in enumerate(sizes)]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shards")
        self._versions: list[int] = []

    @property
    def room(self) -> None:
        """Return no place to make a vector in: each server is given a copy of its part."""

    @property
    def exchange_s(self) -> float:
        """Return how long the last exchange took."""
        return max(part.exchange_s for part in self._parts)

    def close(self) -> None:
        """End."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for part in self._parts:
            part.close()

    def pull(self) -> Given:
        """Ask for weights and work."""
        first, *others = self._parts
        given = first.pull()
        if given.order is None:
            for other in others:
                other.rest()
            self._versions = [given.version]
            return given
        return self._join([given, *(other.pull() for other in others)])

    def push(self, base: int, vector: Tensor, report: Report) -> "Future[Given]":
        """Begin to hand in what was trained; the answer comes later."""
        del base  # each server has versions of its own
        parts = cut_vector(vector, self._weights, len(self._parts))
        pending = [
            exchange.push(version, part, report)
            for exchange, version, part in zip(self._parts, self._versions, parts, strict=True)
        ]
        return self._pool.submit(self._collect, pending)

    def _collect(self, pending: "list[Future[Given]]") -> Given:
        given = [
            self._result(place, answer) if place else None for place, answer in enumerate(pending)
        ]
        first = pending[0].result()
        if first.order is None:
            for other in self._parts[1:]:
                other.rest()
            self._versions = [first.version]
            return first
        return self._join([first, *(part for part in given if part is not None)])

    def _result(self, place: int, answer: "Future[Given]") -> Given:
        try:
            return answer.result()
        except BehindError:  # it was started again; the others were not
            return self._parts[place].pull()

    def _join(self, given: list[Given]) -> Given:
        self._versions = [part.version for part in given]
        vector = join_vector([part.vector for part in given], self._statistics)
        refused = next((part.refused for part in given if part.refused), "")
        return replace(given[0], vector=vector, refused=refused)


def part_digest(model: str, place: int, parts: int) -> str:
    """Return what tells a part of a network's numbers from any other."""
    return model if parts == 1 else f"{model}/{place} of {parts}"
