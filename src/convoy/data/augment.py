"""Vary training images: shifted crops, mirror images and blanked squares, as whole tensors."""

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
    if config.crop_padding and "crop" not in kind:
        raise ConfigError("'crop_padding' needs a crop", got=kind, hint="Give --augment crop+flip.")
    padding = config.crop_padding or max(1, side // 8)
    return Augmentation(
        padding=padding if "crop" in kind else 0, flip="flip" in kind, cutout=config.cutout
    )


@dataclass(frozen=True, slots=True, eq=False)
class Variation:
    """How each of some images is varied; None for what is not done to any.

    Attributes:
        top, left: the shift, from 0 to twice the padding.
        mirrored: whether it is mirrored.
        hole_row, hole_column: the middle of the blanked square.
    """

    top: Tensor | None = None
    left: Tensor | None = None
    mirrored: Tensor | None = None
    hole_row: Tensor | None = None
    hole_column: Tensor | None = None

    def part(self, span: slice) -> "Variation":
        """Return the variation of some of the images."""
        return Variation(
            *(None if t is None else t[span] for t in (self.top, self.left, self.mirrored)),
            *(None if t is None else t[span] for t in (self.hole_row, self.hole_column)),
        )


def draw_variation(
    keys: Tensor, augmentation: Augmentation, shape_chw: tuple[int, int, int]
) -> Variation:
    """Draw how images are varied from their samples' keys."""
    _, height, width = shape_chw
    shifts = 2 * augmentation.padding + 1
    crop, hole = augmentation.padding > 0, augmentation.cutout > 0
    return Variation(
        top=draw_below(keys, _ROWS, shifts) if crop else None,
        left=draw_below(keys, _COLUMNS, shifts) if crop else None,
        mirrored=draw_below(keys, _MIRROR, 2).bool() if augmentation.flip else None,
        hole_row=draw_below(keys, _HOLE_ROW, height) if hole else None,
        hole_column=draw_below(keys, _HOLE_COLUMN, width) if hole else None,
    )


def shift_and_mirror(images_nchw: Tensor, variation: Variation, padding: int) -> Tensor:
    """Shift and mirror each image; what moves in from outside is black.

    All pixels of the batch are fetched by one gather: row and column of each are computed from
    the image's shift and mirroring, so no image is handled on its own.
    """
    if variation.top is None and variation.mirrored is None:
        return images_nchw
    n, c, h, w = images_nchw.shape
    rows = torch.arange(h, device=images_nchw.device).expand(n, h)
    columns = torch.arange(w, device=images_nchw.device).expand(n, w)
    if variation.mirrored is not None:
        columns = torch.where(variation.mirrored[:, None], columns.flip(1), columns)
    if variation.top is not None and variation.left is not None:
        images_nchw = functional.pad(images_nchw, (padding, padding, padding, padding))
        rows = rows + variation.top[:, None]
        columns = columns + variation.left[:, None]
    places = rows[:, :, None] * images_nchw.shape[3] + columns[:, None, :]
    places = places.reshape(n, 1, h * w).expand(n, c, h * w)
    return images_nchw.reshape(n, c, -1).gather(2, places).reshape(n, c, h, w)


def cut_out(images_nchw: Tensor, variation: Variation, side: int) -> Tensor:
    """Blank a square of each image, in place; its middle is anywhere, so part may lie outside.

    Meant for normalised images, where zero is the mean colour.
    """
    if variation.hole_row is None or variation.hole_column is None:
        return images_nchw

    def band(middle: Tensor, length: int) -> Tensor:
        start = middle[:, None] - side // 2
        places = torch.arange(length, device=middle.device)
        return (places >= start) & (places < start + side)

    height, width = images_nchw.shape[2:]
    hole = (
        band(variation.hole_row, height)[:, :, None]
        & band(variation.hole_column, width)[:, None, :]
    )
    return images_nchw.masked_fill_(hole[:, None], 0.0)
