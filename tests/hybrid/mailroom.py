"""Nodes as threads of one process, and what carries tensors between them."""

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

PATIENCE_S = 60.0


class Mailroom:
    """Boxes for messages: the k-th that one node sends another meets the k-th that it expects."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[int, int, int], Tensor] = {}
        self.news = threading.Condition()
        self.messages = 0
        self.numbers = 0

    def wires(self, rank: int) -> "MailWires":
        return MailWires(self, rank)


class MailWires:
    """A node's side of it."""

    def __init__(self, room: Mailroom, rank: int) -> None:
        self._room, self._rank = room, rank
        self._sent: Counter[int] = Counter()
        self._expected: Counter[int] = Counter()

    def start_send(self, tensor: Tensor, rank: int) -> None:
        with self._room.news:
            self._room.boxes[self._rank, rank, self._sent[rank]] = tensor.clone()
            self._room.messages += 1
            self._room.numbers += tensor.numel()
            self._room.news.notify_all()
        self._sent[rank] += 1

    def start_receive(self, tensor: Tensor, rank: int) -> Callable[[], None]:
        key = rank, self._rank, self._expected[rank]
        self._expected[rank] += 1

        def fetch() -> None:
            with self._room.news:
                arrived = self._room.news.wait_for(lambda: key in self._room.boxes, PATIENCE_S)
                assert arrived, f"nothing came: {key}"
                found = self._room.boxes.pop(key)
            assert found.shape == tensor.shape
            assert found.dtype == tensor.dtype
            tensor.copy_(found)

        return fetch

    def wait(self, work: Callable[[], None] | None) -> None:
        if work is not None:
            work()


def on_all(size: int, act: Callable[[int, MailWires], Any]) -> tuple[list[Any], Mailroom]:
    """Let every node act, each in a thread; return what they gave, and the mailroom."""
    room = Mailroom()

    def begin(rank: int) -> Any:
        torch.set_num_threads(1)
        return act(rank, room.wires(rank))

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(begin, rank) for rank in range(size)]
        found = [future.result(PATIENCE_S) for future in futures]
    assert not room.boxes, "messages that nobody expected"
    return found, room
