"""Is loading ever the bottleneck? Our batches against torch's DataLoader, on one core.

Both give the same images in batches: shifted, mirrored and normalised. The DataLoader does it
sample by sample, as transforms usually do, in this process (more processes would take the
cores that the training needs).
"""

import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from convoy.bench.report import Bar, Contenders, Report, Row, interleave, median_ratio
from convoy.data.augment import Augmentation
from convoy.data.batches import Batches
from convoy.data.images import ImageSet, make_image_set

AT_LEAST_PER_S = 40_000
_COUNT, _SIDE, _BATCH, _PADDING = 6_400, 28, 64, 3
_MEAN, _STD = 127.5, 74.0


def bench_loading(*, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure both ways, interleaved, on one thread."""
    repeats = 3 if quick else 5
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        values = interleave(_contenders, repeats=repeats, slices=3, tell=tell)
    finally:
        torch.set_num_threads(threads)
    rows = tuple(Row("28x28, crop and mirror", n, "samples/s", v) for n, v in values.items())
    speed = rows[0].median
    ratio = median_ratio(values["convoy"], values["DataLoader"])
    bars = (
        Bar("convoy, samples per second on one core", speed, at_least=AT_LEAST_PER_S),
        Bar("convoy / DataLoader", ratio, at_least=1.0),
    )
    return Report("loading", repeats, rows, bars)


def _contenders(_: ExitStack) -> Contenders:
    return {"convoy": _ours(_images()), "DataLoader": _data_loader(_images())}


def _images() -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    shape = (_COUNT, _SIDE, _SIDE)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return make_image_set(images, torch.arange(_COUNT) % 10, None, "random images")


def _ours(images: ImageSet) -> Callable[[], float]:
    batches = Batches(images, mean=(_MEAN,), std=(_STD,), device=torch.device("cpu"))
    augmentation = Augmentation(padding=_PADDING, flip=True)

    def run() -> float:
        started = time.perf_counter()
        epoch = batches.epoch(0, seed=0, augmentation=augmentation)
        count = sum(len(batch) for batch in epoch.batches(_BATCH))
        return count / (time.perf_counter() - started)

    return run


class _SampleBySample(Dataset[tuple[Tensor, int]]):
    """Varies one image at a time."""

    def __init__(self, images: ImageSet) -> None:
        self._images = images.images_NCHW
        self._labels = images.labels.tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = functional.pad(self._images[index], (_PADDING,) * 4)
        top, left, mirror = torch.randint(0, 2 * _PADDING + 1, (3,)).tolist()
        image = image[:, top : top + _SIDE, left : left + _SIDE]
        if mirror % 2:
            image = image.flip(2)
        return (image.float() - _MEAN) / _STD, self._labels[index]


def _data_loader(images: ImageSet) -> Callable[[], float]:
    loader = DataLoader(_SampleBySample(images), batch_size=_BATCH, shuffle=True)

    def run() -> float:
        started = time.perf_counter()
        count = sum(len(labels) for _, labels in loader)
        return count / (time.perf_counter() - started)

    return run
