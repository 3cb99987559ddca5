"""From sample numbers to a batch on the device: gather, vary, normalise, as whole tensors."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from convoy.data.augment import Augmentation, cut_out, shift_and_mirror
from convoy.data.images import ImageSet
from convoy.randomness import sample_keys


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
        self._images = images.images_NCHW.to(device)
        self._labels = images.labels.to(device)
        self._mean = torch.tensor(mean, device=device, dtype=torch.float32).view(1, -1, 1, 1)
        self._scale = 1 / torch.tensor(std, device=device, dtype=torch.float32).view(1, -1, 1, 1)
        self._dtype = dtype
        self._memory_format = memory_format
        self.device = device

    def __len__(self) -> int:
        return len(self._labels)

    def training(
        self, indices: Tensor, *, seed: int, epoch: int, augmentation: Augmentation
    ) -> Batch:
        """Return the training samples with these numbers, varied as (seed, epoch, number) say."""
        indices = indices.to(self.device, non_blocking=True)
        keys = sample_keys(seed, epoch, indices)
        pixels = self._images.index_select(0, indices)
        images = self._normalise(shift_and_mirror(pixels, keys, augmentation))
        images = cut_out(images, keys, augmentation.cutout)
        return Batch(images, self._labels.index_select(0, indices), keys)

    def in_order(self, size: int) -> Iterator[Batch]:
        """Yield all samples as they are, in order, for evaluation."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield Batch(self._normalise(self._images[part]), self._labels[part])

    def _normalise(self, pixels_nchw: Tensor) -> Tensor:
        # A fresh tensor either way, so that the steps in place never reach the data set.
        floats = pixels_nchw.to(torch.float32, copy=True)
        floats = floats.sub_(self._mean).mul_(self._scale)
        return floats.to(dtype=self._dtype, memory_format=self._memory_format)
