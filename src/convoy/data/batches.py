"""From sample numbers to a batch on the device: gather, vary, normalise, as whole tensors."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from convoy.data.ahead import made_ahead
from convoy.data.augment import Augmentation, cut_out, draw_variation, shift_and_mirror
from convoy.data.images import ImageSet
from convoy.randomness import epoch_order, sample_keys

_CHUNK_BYTES = 8 << 20  # of floats prepared at once: measured best on two cores
_GPU_CHUNK_BYTES = 32 << 20  # launching costs more there, caches matter less


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Samples ready for the network.

    Attributes:
        images_NCHW: normalised floats.
        labels: class numbers.
        keys: each sample's key for whatever is random about it; None outside training.
    """

    images_NCHW: Tensor  # noqa: N815 - the suffix is the shape
    labels: Tensor
    keys: Tensor | None = None

    def __len__(self) -> int:
        return len(self.labels)


def join_batches(parts: Sequence[Batch]) -> Batch:
    """Return several batches of one pass as one."""
    if len(parts) == 1:
        return parts[0]
    keys = [part.keys for part in parts if part.keys is not None]
    return Batch(
        torch.cat([part.images_NCHW for part in parts]),
        torch.cat([part.labels for part in parts]),
        torch.cat(keys) if keys else None,
    )


class Batches:
    """Makes batches of one image set on one device.

    On a GPU the images are kept there as bytes, so that a batch never crosses the bus.
    """

    def __init__(
        self,
        images: ImageSet,
        *,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        self.device = device
        self.shape_chw = images.shape_CHW
        self._images = images.images_NCHW.to(device)
        self._labels = images.labels.to(device)
        self._mean = torch.tensor(mean, device=device).view(1, -1, 1, 1)
        self._scale = 1 / torch.tensor(std, device=device).view(1, -1, 1, 1)
        self._dtype = dtype
        self._memory_format = memory_format

    def __len__(self) -> int:
        return len(self._labels)

    def epoch(
        self, number: int, *, seed: int, augmentation: Augmentation, order: Tensor | None = None
    ) -> "Epoch":
        """Return one pass over the images, each varied in its own way.

        The order is seeded, or given: then it may be any images, as often as they are named.
        """
        if order is None:
            order = epoch_order(seed, number, len(self))
        return Epoch(self, number, seed, augmentation, order)

    def in_order(self, size: int, first: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Yield samples as they are, in order, for evaluation: all, or those of a stretch."""
        stop = len(self) if stop is None else stop
        for start in range(first, stop, size):
            part = slice(start, min(start + size, stop))
            yield Batch(self.normalise(self._images[part]), self._labels[part])

    def pixels(self, indices: Tensor) -> Tensor:
        """Return the images with these numbers, as they are stored."""
        return self._images.index_select(0, indices)

    def labels(self, indices: Tensor) -> Tensor:
        """Return the labels of the images with these numbers."""
        return self._labels.index_select(0, indices)

    def refresh(self, images: ImageSet, indices: Tensor) -> None:
        """Take over images that have arrived since; in shared memory they are here already."""
        if self.device.type != "cpu":
            there = indices.to(self.device)
            self._images[there] = images.images_NCHW[indices].to(self.device)
            self._labels[there] = images.labels[indices].to(self.device)

    def normalise(self, pixels_nchw: Tensor) -> Tensor:
        """Return pixels as new floats of mean 0 and deviation 1, laid out for the network."""
        floats = pixels_nchw.to(torch.float32, copy=True).sub_(self._mean).mul_(self._scale)
        return floats.to(dtype=self._dtype, memory_format=self._memory_format)


class Epoch:
    """One pass over the training images: who comes when, and how each is varied.

    Both follow from (seed, epoch, sample number) alone, and are drawn for the whole epoch at
    once, so that a batch costs only the work on its own pixels. Any part of the pass can be
    asked for, in any order, by any node.
    """

    def __init__(
        self,
        samples: Batches,
        number: int,
        seed: int,
        augmentation: Augmentation,
        order: Tensor,
    ) -> None:
        self._samples = samples
        self._augmentation = augmentation
        self._order = order.to(samples.device)
        self._keys = sample_keys(seed, number, self._order)
        self._variation = draw_variation(self._keys, augmentation, samples.shape_chw)

    def batches(self, size: int, first: int = 0) -> Iterator[Batch]:
        """Yield the pass in batches, from number `first` on; the last may be short.

        Several are prepared at once: the work per operation is small, its overhead is not. On a
        GPU that is done while the ones before are trained on.
        """
        sample_bytes = 4 * math.prod(self._samples.shape_chw)
        device = self._samples.device
        on_gpu = device.type == "cuda"
        chunk_bytes = _GPU_CHUNK_BYTES if on_gpu else _CHUNK_BYTES
        chunk = size * max(1, chunk_bytes // (size * sample_bytes))
        starts = range(first * size, len(self._order), chunk)
        wholes = (self.batch(start, start + chunk) for start in starts)
        for whole in made_ahead(wholes, device) if on_gpu else wholes:
            assert whole.keys is not None
            parts = (t.split(size) for t in (whole.images_NCHW, whole.labels, whole.keys))
            for images, labels, keys in zip(*parts, strict=True):
                yield Batch(images, labels, keys)

    @property
    def order(self) -> Tensor:
        """Return the images' numbers, in the order of the pass."""
        return self._order

    def marks(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return the labels and keys of the samples from one place to another."""
        span = slice(start, stop)
        return self._samples.labels(self._order[span]), self._keys[span]

    def batch(self, start: int, stop: int) -> Batch:
        """Return the samples from place `start` up to, not including, place `stop`."""
        span = slice(start, stop)
        variation = self._variation.part(span)
        numbers = self._order[span]
        pixels = self._samples.pixels(numbers)
        pixels = shift_and_mirror(pixels, variation, self._augmentation.padding)
        images = cut_out(self._samples.normalise(pixels), variation, self._augmentation.cutout)
        # Labels are read now, as images are: some may have arrived since the pass began.
        return Batch(images, self._samples.labels(numbers), self._keys[span])
