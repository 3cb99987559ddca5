"""Each sample is varied by its key alone, and as a plain loop over the images would do it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from convoy.config import Config
from convoy.data.augment import (
    Augmentation,
    Variation,
    choose_augmentation,
    cut_out,
    draw_variation,
    shift_and_mirror,
)
from convoy.data.batches import Batches
from convoy.data.images import ImageSet, make_image_set
from convoy.errors import ConfigError
from convoy.randomness import sample_keys

_COUNT, _H, _W = 24, 7, 10
_FULL = Augmentation(padding=2, flip=True, cutout=3)


def _images(dtype: torch.dtype, channels: int) -> Tensor:
    generator = torch.Generator().manual_seed(channels)
    images = torch.randint(1, 256, (_COUNT, channels, _H, _W), generator=generator)
    return images.to(dtype)


def _variation(augmentation: Augmentation, *, epoch: int = 0) -> Variation:
    keys = sample_keys(0, epoch, torch.arange(_COUNT))
    return draw_variation(keys, augmentation, (1, _H, _W))


def _shifted_naively(images: Tensor, variation: Variation, padding: int) -> Tensor:
    n, c, h, w = images.shape
    result = torch.empty_like(images)
    for i in range(n):
        image = images[i]
        if variation.top is not None and variation.left is not None:
            padded = torch.zeros(c, h + 2 * padding, w + 2 * padding, dtype=images.dtype)
            padded[:, padding : padding + h, padding : padding + w] = image
            top, left = int(variation.top[i]), int(variation.left[i])
            image = padded[:, top : top + h, left : left + w]
        if variation.mirrored is not None and bool(variation.mirrored[i]):
            image = image.flip(2)
        result[i] = image
    return result


def _cut_naively(images: Tensor, variation: Variation, side: int) -> Tensor:
    assert variation.hole_row is not None
    assert variation.hole_column is not None
    result = images.clone()
    for i in range(len(images)):
        top = int(variation.hole_row[i]) - side // 2
        left = int(variation.hole_column[i]) - side // 2
        result[i, :, max(top, 0) : top + side, max(left, 0) : left + side] = 0
    return result


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "augmentation",
    [
        Augmentation(padding=1),
        Augmentation(padding=3),
        Augmentation(flip=True),
        Augmentation(padding=2, flip=True),
    ],
)
def test_shifting_and_mirroring_equal_a_loop_over_the_images(
    dtype: torch.dtype, channels: int, augmentation: Augmentation
) -> None:
    images = _images(dtype, channels)
    variation = _variation(augmentation)
    varied = shift_and_mirror(images, variation, augmentation.padding)
    assert varied.dtype == dtype
    assert torch.equal(varied, _shifted_naively(images, variation, augmentation.padding))
    assert not torch.equal(varied, images)
    assert torch.equal(images, _images(dtype, channels))


def test_without_a_variation_images_stay_as_they_are() -> None:
    images = _images(torch.uint8, 1)
    variation = _variation(Augmentation())
    assert torch.equal(shift_and_mirror(images, variation, 0), _images(torch.uint8, 1))
    floats = images.float()
    assert torch.equal(cut_out(floats, variation, 0), images.float())


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", [1, 2, 3, 6])
def test_cutting_out_equals_a_loop_over_the_images(channels: int, side: int) -> None:
    images = _images(torch.float32, channels)
    variation = _variation(Augmentation(cutout=side))
    expected = _cut_naively(images, variation, side)
    assert torch.equal(cut_out(images.clone(), variation, side), expected)
    assert not torch.equal(expected, images)


def test_all_shifts_holes_and_both_mirrorings_occur() -> None:
    keys = sample_keys(0, 0, torch.arange(2000))
    drawn = draw_variation(keys, _FULL, (1, _H, _W))
    expected = [(drawn.top, 5), (drawn.left, 5), (drawn.mirrored, 2)]
    expected += [(drawn.hole_row, _H), (drawn.hole_column, _W)]
    for values, count in expected:
        assert values is not None
        assert values.long().unique().tolist() == list(range(count))


def test_rows_columns_and_mirroring_are_drawn_independently() -> None:
    keys = sample_keys(0, 0, torch.arange(5000))
    drawn = draw_variation(keys, Augmentation(padding=4, flip=True, cutout=2), (1, 9, 9))
    parts = [drawn.top, drawn.left, drawn.mirrored, drawn.hole_row, drawn.hole_column]
    table = torch.stack([part.double() for part in parts if part is not None])
    assert len(table) == 5
    assert float((torch.corrcoef(table) - torch.eye(5)).abs().max()) < 0.07


def test_part_of_a_variation_is_that_of_those_images() -> None:
    whole = _variation(_FULL)
    part = whole.part(slice(5, 9))
    for name in ("top", "left", "mirrored", "hole_row", "hole_column"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[5:9])
    assert Variation().part(slice(0, 2)).top is None


def _numbered_set(count: int, dtype: torch.dtype, channels: int) -> ImageSet:
    return make_image_set(_images(dtype, channels)[:count], list(range(count)), None, "numbered")


def _pixels_by_sample(
    images: ImageSet, *, epoch: int, size: int, seed: int = 0
) -> dict[int, Tensor]:
    channels = images.shape_CHW[0]
    batches = Batches(
        images, mean=(9.0,) * channels, std=(3.0,) * channels, device=torch.device("cpu")
    )
    whole = batches.epoch(epoch, seed=seed, augmentation=_FULL)
    found: dict[int, Tensor] = {}
    for start in range(0, len(images), size):
        batch = whole.batch(start, min(start + size, len(images)))
        found.update(zip(batch.labels.tolist(), batch.images_NCHW, strict=True))
    return found


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [1, 5])
def test_a_sample_gets_the_same_pixels_however_the_epoch_is_cut_into_batches(
    dtype: torch.dtype, channels: int, size: int
) -> None:
    images = _numbered_set(_COUNT, dtype, channels)
    whole = _pixels_by_sample(images, epoch=3, size=_COUNT)
    parts = _pixels_by_sample(images, epoch=3, size=size)
    assert sorted(whole) == sorted(parts) == list(range(_COUNT))
    assert all(torch.equal(whole[i], parts[i]) for i in whole)


def test_a_sample_gets_the_same_pixels_whichever_other_samples_there_are() -> None:
    many = _pixels_by_sample(_numbered_set(_COUNT, torch.uint8, 1), epoch=1, size=8)
    few = _pixels_by_sample(_numbered_set(10, torch.uint8, 1), epoch=1, size=8)
    assert all(torch.equal(few[i], many[i]) for i in range(10))


@pytest.mark.parametrize(("epoch", "seed"), [(2, 0), (1, 1)])
def test_another_epoch_or_seed_gives_most_samples_other_pixels(epoch: int, seed: int) -> None:
    images = _numbered_set(_COUNT, torch.uint8, 1)
    first = _pixels_by_sample(images, epoch=1, size=8)
    other = _pixels_by_sample(images, epoch=epoch, size=8, seed=seed)
    assert sum(torch.equal(first[i], other[i]) for i in first) < _COUNT / 4


@pytest.mark.parametrize(
    ("options", "usual", "expected"),
    [
        ({}, "none", Augmentation()),
        ({}, "flip", Augmentation(flip=True)),
        ({}, "crop", Augmentation(padding=4)),
        ({}, "crop+flip", Augmentation(padding=4, flip=True)),
        ({"augment": "none"}, "crop+flip", Augmentation()),
        ({"augment": "flip"}, "none", Augmentation(flip=True)),
        ({"augment": "crop"}, "flip", Augmentation(padding=4)),
        ({"augment": "crop+flip"}, "none", Augmentation(padding=4, flip=True)),
        ({"augment": "crop", "crop_padding": 2}, "none", Augmentation(padding=2)),
        ({"cutout": 8}, "none", Augmentation(cutout=8)),
        ({"cutout": 31, "augment": "flip"}, "none", Augmentation(flip=True, cutout=31)),
    ],
)
def test_the_augmentation_follows_the_options_or_what_is_usual(
    options: dict[str, Any], usual: str, expected: Augmentation
) -> None:
    assert choose_augmentation(Config(**options), usual, (3, 32, 40)) == expected


def test_tiny_images_are_shifted_by_one_pixel_at_least() -> None:
    assert choose_augmentation(Config(augment="crop"), "none", (1, 5, 5)).padding == 1


@pytest.mark.parametrize("option", ["crop_padding", "cutout"])
def test_what_is_as_large_as_the_image_is_refused(option: str) -> None:
    options: dict[str, Any] = {option: 12}
    with pytest.raises(
        ConfigError, match=f"'{option}' is as large as the images; got 12.*below 12"
    ):
        choose_augmentation(Config(augment="crop+flip", **options), "none", (1, 12, 20))


@pytest.mark.parametrize(
    ("wanted", "usual"), [("none", "crop"), ("flip", "crop"), ("auto", "flip")]
)
def test_a_padding_without_a_crop_is_refused(wanted: Any, usual: str) -> None:
    config = Config(augment=wanted, crop_padding=2)
    with pytest.raises(ConfigError, match="needs a crop"):
        choose_augmentation(config, usual, (1, 28, 28))
