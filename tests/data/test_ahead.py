"""What comes next is made on a side stream, and both streams wait where they must."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from convoy.data import batches
from convoy.data.ahead import made_ahead
from convoy.data.augment import Augmentation
from convoy.data.batches import Batch, Batches
from convoy.data.images import make_image_set

_CUDA = torch.device("cuda")


class Stream:
    """Notes who waits for whom."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self._log.append(f"{self._name} waits for {other._name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put streams that only keep a log in the place of CUDA's; return the log."""
    lines: list[str] = []

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        lines.append(f"on {stream._name}")
        yield
        lines.append("back")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("main", lines))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream("side", lines))
    monkeypatch.setattr(torch.cuda, "stream", on)
    return lines


def _items(count: int, log: list[str]) -> Iterator[int]:
    for number in range(count):
        log.append(f"make {number}")
        yield number


def _made(number: int | None) -> list[str]:
    made = [] if number is None else [f"make {number}"]
    return ["side waits for main", "on side", *made, "back"]


def test_each_item_is_made_while_the_one_before_is_used(log: list[str]) -> None:
    for number in made_ahead(_items(3, log), _CUDA):
        log.append(f"use {number}")
    expected = _made(0)
    for number in range(3):
        coming = number + 1 if number < 2 else None
        expected += ["main waits for side", *_made(coming), f"use {number}"]
    assert log == [*expected, "main waits for side"]


def test_whoever_stops_early_still_waits_for_what_is_being_made(log: list[str]) -> None:
    for _ in made_ahead(_items(3, log), _CUDA):
        break
    assert log[-1] == "main waits for side"
    assert "make 1" in log
    assert "make 2" not in log


def test_nothing_to_make_is_nothing_to_use(log: list[str]) -> None:
    assert list(made_ahead(_items(0, log), _CUDA)) == []


def _epoch(device: torch.device, size: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (50, 3, 8, 8), dtype=torch.uint8, generator=generator)
    part = make_image_set(images, [i % 5 for i in range(50)], None, "random")
    made = Batches(part, mean=(0.5,) * 3, std=(2.0,) * 3, device=device)
    varied = Augmentation(padding=2, flip=True, cutout=3)
    return list(made.epoch(1, seed=3, augmentation=varied).batches(size))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("chunk_bytes", [1, 8 << 10, 32 << 20])
def test_on_a_gpu_the_batches_are_those_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(batches, "_GPU_CHUNK_BYTES", chunk_bytes)
    for here, there in zip(_epoch(torch.device("cpu"), 7), _epoch(_CUDA, 7), strict=True):
        assert torch.equal(here.images_NCHW, there.images_NCHW.cpu())
        assert torch.equal(here.labels, there.labels.cpu())
        assert here.keys is not None
        assert there.keys is not None
        assert torch.equal(here.keys, there.keys.cpu())
