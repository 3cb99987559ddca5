"""Adding up over a star: every member gets the same bits, whoever is its centre."""

import threading
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from convoy.outer.star import Star, is_star_faster


class Post:
    """Carries tensors between threads that play the members of a group."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._on_the_way: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self.received: list[tuple[int, int]] = []

    def put(self, sender: int, receiver: int, tensor: Tensor) -> None:
        with self._changed:
            self._on_the_way[sender, receiver].append(tensor.clone())
            self._changed.notify_all()

    def take(self, sender: int, receiver: int) -> Tensor:
        with self._changed:
            arrived = self._changed.wait_for(lambda: self._on_the_way[sender, receiver], 10)
            assert arrived, "nothing came"
            self.received.append((sender, receiver))
            return self._on_the_way[sender, receiver].pop(0)


class Wires:
    """One member's wires."""

    def __init__(self, post: Post, rank: int, around_s: float = 0.0) -> None:
        self._post, self._rank = post, rank
        self.sums_around = 0
        self._around_s = around_s

    def start_send(self, tensor: Tensor, rank: int) -> Any:
        self._post.put(self._rank, rank, tensor)
        return lambda: None

    def start_receive(self, tensor: Tensor, rank: int) -> Any:
        return lambda: tensor.copy_(self._post.take(rank, self._rank))

    def wait(self, work: Any) -> None:
        work()

    def sum_around(self, tensor: Tensor) -> None:
        self.sums_around += 1
        if tensor.dtype == torch.float64:  # the times: all members are given the same
            tensor.copy_(torch.tensor([3 * 0.01, 3 * self._around_s, 3.0]))


def play(size: int, part: Any) -> list[Any]:
    """Let every member do its part at the same time; return what each returned."""
    with ThreadPoolExecutor(size) as pool:
        futures: list[Future[Any]] = [pool.submit(part, rank) for rank in range(size)]
        return [future.result(timeout=20) for future in futures]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("expects", [False, True], ids=["at once", "expected"])
def test_all_get_the_same_sum_whoever_is_the_centre(size: int, expects: bool) -> None:
    for centre in range(size):
        post = Post()

        def part(rank: int, post: Post = post, centre: int = centre) -> list[Tensor]:
            star = Star(Wires(post, rank), rank, size, centre)
            sums = []
            for turn in range(3):
                mine = torch.rand(100, generator=torch.Generator().manual_seed(rank + 10 * turn))
                if expects:
                    star.expect(mine)
                star.sum(mine)
                sums.append(mine)
            return sums

        results = play(size, part)
        for turn in range(3):
            parts = [
                torch.rand(100, generator=torch.Generator().manual_seed(rank + 10 * turn))
                for rank in range(size)
            ]
            torch.testing.assert_close(results[0][turn], torch.stack(parts).sum(0))
            assert all(torch.equal(result[turn], results[0][turn]) for result in results)


def test_sums_of_other_sizes_may_follow() -> None:
    post = Post()

    def part(rank: int) -> list[float]:
        star = Star(Wires(post, rank), rank, 3, centre=1)
        sums = []
        for numel, dtype in ((4, torch.float32), (2, torch.float64), (9, torch.float32)):
            mine = torch.ones(numel, dtype=dtype)
            star.sum(mine)
            assert mine.shape == (numel,)
            assert mine.dtype == dtype
            sums.append(float(mine[0]))
        return sums

    assert play(3, part) == [[3.0, 3.0, 3.0]] * 3


def test_only_the_centre_expects_anything() -> None:
    post = Post()
    wires = Wires(post, 0)
    star = Star(wires, 0, 3, centre=2)
    star.expect(torch.zeros(3))
    post.put(2, 0, torch.full((3,), 7.0))
    mine = torch.zeros(3)
    star.sum(mine)
    assert mine.tolist() == [7.0] * 3
    assert post.received == [(2, 0)]


@pytest.mark.parametrize(
    ("around_s", "is_faster", "sums"),
    [
        (0.02, True, 1 + 5 * 2),  # a cold one, five trials, and the times after each
        (0.005, False, 1 + 5 * 2),
        (0.2, True, 1 + 2),  # too slow to be tried often
    ],
)
def test_both_ways_are_timed_and_all_come_to_the_same_answer(
    around_s: float, is_faster: bool, sums: int
) -> None:
    post = Post()

    def part(rank: int) -> tuple[bool, int]:
        wires = Wires(post, rank, around_s)
        star = Star(wires, rank, 3, centre=0)
        return is_star_faster(star, wires, 8, torch.float32), wires.sums_around

    assert play(3, part) == [(is_faster, sums)] * 3
