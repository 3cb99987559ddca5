"""Vary training images: shifted crops and mirror images, a whole batch at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from convoy.errors import ConfigError
from convoy.randomness import draw_below

_ROWS, _COLUMNS, _MIRROR = 0, 1, 2  # independent streams of a sample's key


@dataclass(frozen=True, slots=True)
class Augmentation:
    """What is done to a training image: a shift of up to `padding` pixels, a mirror image."""

    padding: int = 0
    flip: bool = False

    @property
    def is_none(self) -> bool:
        """Tell whether images stay as they are."""
        return self.padding == 0 and not self.flip


def choose_augmentation(
    wanted: str, usual: str, padding: int, shape_chw: tuple[int, int, int]
) -> Augmentation:
    """Turn the options `augment` and `crop_padding` into an augmentation for such images."""
    kind = usual if wanted == "auto" else wanted
    _, height, width = shape_chw
    pixels = padding or max(1, min(height, width) // 8)
    if "crop" in kind and pixels >= min(height, width):
        raise ConfigError(
            "'crop_padding' is as large as the images",
            got=pixels,
            allowed=f"below {min(height, width)}",
        )
    return Augmentation(padding=pixels if "crop" in kind else 0, flip="flip" in kind)


def augment(images_nchw: Tensor, keys: Tensor, augmentation: Augmentation) -> Tensor:
    """Shift and mirror each image as its key says; what moves in from outside is black.

    All pixels of the batch are fetched by one gather: row and column of each are computed from
    the image's shift and mirroring, so no image is handled on its own.
    """
    if augmentation.is_none:
        return images_nchw
    n, c, h, w = images_nchw.shape
    pad = augmentation.padding
    padded = functional.pad(images_nchw, (pad, pad, pad, pad)) if pad else images_nchw
    shifts = 2 * pad + 1
    top = draw_below(keys, _ROWS, shifts)
    left = draw_below(keys, _COLUMNS, shifts)
    rows = torch.arange(h, device=keys.device) + top[:, None]
    columns = torch.arange(w, device=keys.device)
    if augmentation.flip:
        mirrored = draw_below(keys, _MIRROR, 2)[:, None].bool()
        columns = torch.where(mirrored, columns.flip(0), columns)
    places = rows[:, :, None] * (w + 2 * pad) + (columns + left[:, None])[:, None, :]
    places = places.reshape(n, 1, h * w).expand(n, c, h * w)
    return padded.reshape(n, c, -1).gather(2, places).reshape(n, c, h, w)
