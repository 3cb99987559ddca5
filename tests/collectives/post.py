"""Wires between threads that play the ranks of a group."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from convoy.collectives.wires import PeerLostError


class Post:
    """Carries tensors; what is sent is taken from the sender's memory when it is waited for.

    So whoever changes what it has not yet sent is found out, and so is whoever reads too early.
    """

    def __init__(self, patience_s: float = 10.0) -> None:
        self._changed = threading.Condition()
        self._sent: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self._taken: Counter[tuple[int, int]] = Counter()
        self.messages: Counter[int] = Counter()
        self.bytes: Counter[int] = Counter()
        self._patience_s = patience_s

    def put(self, sender: int, receiver: int, tensor: Tensor) -> int:
        with self._changed:
            way = sender, receiver
            self._sent[way].append(tensor)  # no copy: it must stay as it is until it was taken
            self.messages[sender] += 1
            self.bytes[sender] += tensor.numel() * tensor.element_size()
            self._changed.notify_all()
            return len(self._sent[way])

    def take(self, sender: int, receiver: int, number: int, tensor: Tensor) -> None:
        with self._changed:
            way = sender, receiver
            self._wait(lambda: len(self._sent[way]) >= number, sender)
            tensor.copy_(self._sent[way][number - 1])
            self._taken[way] += 1
            self._changed.notify_all()

    def wait_until_taken(self, sender: int, receiver: int, number: int) -> None:
        with self._changed:
            self._wait(lambda: self._taken[sender, receiver] >= number, receiver)

    def _wait(self, is_so: Callable[[], bool], rank: int) -> None:
        if not self._changed.wait_for(is_so, self._patience_s):
            raise PeerLostError(f"rank {rank} is silent")


class Wires:
    """One rank's wires."""

    def __init__(self, post: Post, rank: int) -> None:
        self._post, self._rank = post, rank
        self._begun: Counter[int] = Counter()

    def start_send(self, tensor: Tensor, rank: int) -> Any:
        number = self._post.put(self._rank, rank, tensor)
        return lambda: self._post.wait_until_taken(self._rank, rank, number)

    def start_receive(self, tensor: Tensor, rank: int) -> Any:
        self._begun[rank] += 1
        number = self._begun[rank]
        return lambda: self._post.take(rank, self._rank, number, tensor)

    def wait(self, work: Any) -> None:
        work()


def play(size: int, part: Callable[[int], Any]) -> list[Any]:
    """Let every rank do its part at the same time; return what each returned."""
    with ThreadPoolExecutor(size) as pool:
        futures: list[Future[Any]] = [pool.submit(part, rank) for rank in range(size)]
        return [future.result(timeout=30) for future in futures]
