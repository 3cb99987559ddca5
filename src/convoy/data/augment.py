"""Vary training images: shifted crops and mirror images, a whole batch at a time."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from convoy.config import Config
from convoy.errors import ConfigError
from convoy.randomness import draw_below

_ROWS, _COLUMNS, _MIRROR, _HOLE_ROW, _HOLE_COLUMN = range(5)  # streams of a sample's key


@dataclass(frozen=True, slots=True)
class Augmentation:
    """What is done to a training image.

    Attributes:
        padding: it is shifted by up to this many pixels.
        flip: it is mirrored, or not.
        cutout: a square of this side is blanked out.
    """

    padding: int = 0
    flip: bool = False
    cutout: int = 0


def choose_augmentation(
    config: Config, usual: str, shape_chw: tuple[int, int, int]
) -> Augmentation:
    """Turn a config's options into an augmentation for images of such a shape."""
    kind = usual if config.augment == "auto" else config.augment
    side = min(shape_chw[1:])
    for name in ("crop_padding", "cutout"):
        if getattr(config, name) >= side:
            raise ConfigError(
                f"'{name}' is as large as the images",
                got=getattr(config, name),
                allowed=f"below {side}",
            )
    padding = config.crop_padding or max(1, side // 8)
    return Augmentation(
        padding=padding if "crop" in kind else 0, flip="flip" in kind, cutout=config.cutout
    )


def shift_and_mirror(images_nchw: Tensor, keys: Tensor, augmentation: Augmentation) -> Tensor:
    """Shift and mirror each image as its key says; what moves in from outside is black.

    All pixels of the batch are fetched by one gather: row and column of each are computed from
    the image's shift and mirroring, so no image is handled on its own.
    """
    if augmentation.padding == 0 and not augmentation.flip:
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


def cut_out(images_nchw: Tensor, keys: Tensor, side: int) -> Tensor:
    """Blank a square of each image, in place; its centre is anywhere, so a part may lie outside.

    Meant for normalised images, where zero is the mean colour.
    """
    if side == 0:
        return images_nchw
    height, width = images_nchw.shape[2:]

    def band(stream: int, length: int) -> Tensor:
        start = draw_below(keys, stream, length)[:, None] - side // 2
        places = torch.arange(length, device=keys.device)
        return (places >= start) & (places < start + side)

    rows, columns = band(_HOLE_ROW, height), band(_HOLE_COLUMN, width)
    hole = rows[:, :, None] & columns[:, None, :]
    return images_nchw.masked_fill_(hole[:, None], 0.0)
