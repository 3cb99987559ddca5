"""Images with labels, and the pair of them that a run needs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from convoy.errors import DataError

_MAX_UNNAMED_CLASSES = 1_000_000  # a stray label must not make as many names


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Labelled images as whole tensors, in memory or memory-mapped.

    Attributes:
        images_NCHW: uint8 (0..255), or float32 for images that were normalised elsewhere.
        labels: one class number per image, int64.
        classes: the classes' names, in the order of their numbers.
    """

    images_NCHW: Tensor  # noqa: N815 - the suffix is the shape
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape_CHW(self) -> tuple[int, int, int]:  # noqa: N802 - the suffix is the shape
        """Return channels, height and width of one image."""
        _, c, h, w = self.images_NCHW.shape
        return c, h, w

    def select(self, indices: Tensor) -> "ImageSet":
        """Return the images at some indices, copied."""
        return ImageSet(self.images_NCHW[indices], self.labels[indices], self.classes)


@dataclass(frozen=True, eq=False)
class TrainTest:
    """A data set ready to train on.

    Attributes:
        name: what the user called it.
        digest: identifies the content; a resumed run must meet the same.
        augment: the variation that is usual for such images.
        mean, std: of the training images, per channel, in the images' own units.
        skipped: what could not be read, and why.
    """

    name: str
    train: ImageSet
    test: ImageSet
    digest: str
    augment: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    skipped: tuple[str, ...] = ()


def make_image_set(
    images: np.ndarray | Tensor,
    labels: np.ndarray | Tensor | Sequence[int],
    classes: Sequence[str] | None,
    source: str,
) -> ImageSet:
    """Check and wrap arrays as an image set.

    Args:
        images: N images as NHW, NHWC or NCHW; uint8, or floats as they should be learned from.
        labels: N class numbers from 0.
        classes: the classes' names; numbered where None.
        source: what to call the arrays in an error.

    Raises:
        DataError: the arrays do not describe labelled images.
    """
    pixels = _as_nchw(_as_tensor(images, source), source)
    numbers = _as_labels(_as_tensor(labels, source), len(pixels), source)
    count = int(numbers.max()) + 1
    if classes is None and count > _MAX_UNNAMED_CLASSES:
        raise DataError(
            f"{source}: a label is out of range",
            got=count - 1,
            allowed=f"below {_MAX_UNNAMED_CLASSES} where the classes have no names",
        )
    names = tuple(classes) if classes is not None else tuple(str(i) for i in range(count))
    if count > len(names):
        raise DataError(
            f"{source}: a label is out of range",
            got=count - 1,
            allowed=f"0 to {len(names) - 1} ({len(names)} classes)",
        )
    return ImageSet(pixels, numbers, names)


def _as_tensor(values: np.ndarray | Tensor | Sequence[int], source: str) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach().cpu()
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{source}: numbers are needed", got=str(array.dtype))
    # Torch takes no foreign byte order, no backward strides and no read-only memory.
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _as_nchw(images: Tensor, source: str) -> Tensor:
    if images.ndim == 3:
        images = images[:, None]
    if images.ndim != 4:
        raise DataError(
            f"{source}: images must have 3 or 4 dimensions (NHW, NHWC or NCHW)",
            got=tuple(images.shape),
        )
    if images.shape[1] not in (1, 3) and images.shape[3] in (1, 3):
        images = images.permute(0, 3, 1, 2)
    if images.shape[1] not in (1, 3):
        raise DataError(
            f"{source}: images must have 1 or 3 channels",
            got=tuple(images.shape),
            allowed="NHW, NHWC or NCHW",
        )
    if len(images) == 0:
        raise DataError(f"{source} has no samples")
    if images.dtype == torch.uint8:
        return images.contiguous()
    if not images.dtype.is_floating_point:
        raise DataError(f"{source}: images must be uint8 or floats", got=str(images.dtype))
    if not bool(torch.isfinite(images).all()):
        raise DataError(f"{source}: images hold NaN or infinity")
    return images.to(torch.float32).contiguous()


def _as_labels(labels: Tensor, count: int, source: str) -> Tensor:
    if labels.dtype.is_floating_point or labels.dtype.is_complex:
        raise DataError(f"{source}: labels must be whole numbers", got=str(labels.dtype))
    labels = labels.to(torch.int64).reshape(-1)
    if len(labels) != count:
        raise DataError(
            f"{source}: images and labels differ in number", got=f"{count} and {len(labels)}"
        )
    if int(labels.min()) < 0:
        raise DataError(f"{source}: a label is negative", got=int(labels.min()))
    return labels


def channel_statistics(images_nchw: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel, in the images' own units."""
    means, stds = [], []
    for channel in images_nchw.unbind(1):
        mean, std = _statistics(channel.reshape(-1))
        means.append(mean)
        stds.append(max(std, 1e-6))
    return tuple(means), tuple(stds)


def _statistics(values: Tensor) -> tuple[float, float]:
    if values.dtype != torch.uint8:
        return float(values.double().mean()), float(values.double().std(correction=0))
    # A histogram of 256 counts gives exact moments without a copy of the data as floats.
    counts = torch.from_numpy(np.bincount(values.numpy(), minlength=256)).double()
    levels = torch.arange(256, dtype=torch.float64)
    mean = float((counts * levels).sum() / counts.sum())
    variance = float((counts * (levels - mean) ** 2).sum() / counts.sum())
    return mean, variance**0.5
