"""Arrays become image sets only if they describe labelled images."""

from typing import Any

import numpy as np
import pytest
import torch

from convoy.data.images import channel_statistics, make_image_set
from convoy.data.load import wrap_data
from convoy.errors import DataError

_LABELS = [0, 1, 0, 1]


def _pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def test_grey_images_without_a_channel_get_one() -> None:
    pixels = _pixels(4, 6, 5)
    made = make_image_set(pixels, _LABELS, None, "x")
    assert made.shape_CHW == (1, 6, 5)
    assert np.array_equal(made.images_NCHW[:, 0].numpy(), pixels)


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_may_come_last(channels: int) -> None:
    pixels = _pixels(4, 6, 5, channels)
    made = make_image_set(pixels, _LABELS, None, "x")
    assert made.shape_CHW == (channels, 6, 5)
    assert np.array_equal(made.images_NCHW.numpy(), pixels.transpose(0, 3, 1, 2))
    assert made.images_NCHW.is_contiguous()


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_may_come_first(channels: int) -> None:
    pixels = _pixels(4, channels, 6, 5)
    assert np.array_equal(make_image_set(pixels, _LABELS, None, "x").images_NCHW.numpy(), pixels)


def test_bytes_stay_bytes_and_labels_become_int64() -> None:
    made = make_image_set(_pixels(4, 6, 5), np.array(_LABELS, np.uint8), None, "x")
    assert made.images_NCHW.dtype == torch.uint8
    assert made.labels.dtype == torch.int64
    assert made.labels.tolist() == _LABELS
    assert len(made) == 4


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_floats_of_any_width_become_float32(dtype: Any) -> None:
    values = (_pixels(4, 6, 5) / 256).astype(dtype)
    made = make_image_set(values, _LABELS, None, "x")
    assert made.images_NCHW.dtype == torch.float32
    assert np.array_equal(made.images_NCHW[:, 0].numpy(), values.astype(np.float32))


def test_labels_as_a_column_are_accepted() -> None:
    assert (
        make_image_set(_pixels(4, 6, 5), np.array([[0], [1], [0], [1]]), None, "x").labels.ndim == 1
    )


def test_classes_without_names_are_numbered() -> None:
    assert make_image_set(_pixels(4, 6, 5), [0, 2, 0, 0], None, "x").classes == ("0", "1", "2")


def test_given_class_names_are_kept_also_for_absent_classes() -> None:
    made = make_image_set(_pixels(4, 6, 5), _LABELS, ["a", "b", "c"], "x")
    assert made.classes == ("a", "b", "c")


def test_a_selection_is_a_copy_of_those_images() -> None:
    made = make_image_set(_pixels(4, 6, 5), _LABELS, ["a", "b"], "x")
    former = made.images_NCHW.clone()
    chosen = made.select(torch.tensor([3, 0]))
    assert torch.equal(chosen.images_NCHW, made.images_NCHW[[3, 0]])
    assert chosen.labels.tolist() == [1, 0]
    assert chosen.classes == ("a", "b")
    chosen.images_NCHW.zero_()
    assert torch.equal(made.images_NCHW, former)


@pytest.mark.parametrize(
    ("images", "labels", "classes", "reason"),
    [
        (_pixels(4, 6), _LABELS, None, "3 or 4 dimensions"),
        (_pixels(4, 6, 5, 3, 1), _LABELS, None, "3 or 4 dimensions"),
        (_pixels(4, 6, 5, 2), _LABELS, None, "1 or 3 channels"),
        (_pixels(4, 4, 5, 4), _LABELS, None, "1 or 3 channels"),
        (_pixels(0, 6, 5), [], None, "no samples"),
        (_pixels(4, 6, 5).astype(np.int64), _LABELS, None, "uint8 or floats"),
        (np.full((4, 6, 5), np.nan), _LABELS, None, "NaN or infinity"),
        (np.full((4, 6, 5), np.inf), _LABELS, None, "NaN or infinity"),
        (_pixels(4, 6, 5), np.array([0.0, 1, 0, 1]), None, "whole numbers"),
        (_pixels(4, 6, 5), np.array([0, 1, 0, 1j]), None, "numbers are needed"),
        (_pixels(4, 6, 5), [0, 1, 0], None, "differ in number; got '4 and 3'"),
        (_pixels(4, 6, 5), [0, 1, 0, -1], None, "negative; got -1"),
        (_pixels(4, 6, 5), [0, 1, 2, 1], ["a", "b"], "out of range; got 2; allowed: 0 to 1"),
    ],
)
def test_what_describes_no_labelled_images_is_refused(
    images: np.ndarray, labels: Any, classes: list[str] | None, reason: str
) -> None:
    with pytest.raises(DataError, match=reason) as caught:
        make_image_set(images, labels, classes, "my arrays")
    assert "my arrays" in str(caught.value)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_statistics_are_those_of_each_channel(channels: int, dtype: torch.dtype) -> None:
    images = torch.from_numpy(_pixels(7, channels, 6, 5)).to(dtype)
    images[:, 0] //= 2
    mean, std = channel_statistics(images)
    exact = images.double().transpose(0, 1).reshape(channels, -1)
    assert mean == pytest.approx(exact.mean(1).tolist(), rel=1e-12)
    assert std == pytest.approx(exact.std(1, correction=0).tolist(), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_blank_images_have_a_deviation_one_can_divide_by(dtype: torch.dtype) -> None:
    mean, std = channel_statistics(torch.full((2, 1, 3, 3), 9, dtype=dtype))
    assert mean == (9.0,)
    assert 0 < std[0] < 1e-3


@pytest.mark.parametrize(
    "images",
    [
        _pixels(4, 6, 5)[:, ::-1],
        np.frombuffer(bytes(4 * 6 * 5), np.uint8).reshape(4, 6, 5),
        np.ones((4, 6, 5), ">f4"),
    ],
    ids=["backward strides", "read-only", "foreign byte order"],
)
def test_arrays_that_torch_would_refuse_are_taken(images: np.ndarray) -> None:
    taken = make_image_set(images, [0, 1, 0, 1], None, "arrays")
    assert np.array_equal(taken.images_NCHW[:, 0].numpy(), images)


def test_a_stray_label_does_not_make_a_million_classes() -> None:
    with pytest.raises(DataError, match="out of range"):
        make_image_set(_pixels(2, 6, 5), [0, 10**9], None, "arrays")


def test_parts_with_other_classes_are_refused() -> None:
    pixels = _pixels(2, 6, 5)
    one = make_image_set(pixels, [0, 1], ["cat", "dog"], "one")
    other = make_image_set(pixels, [0, 1], ["dog", "cat"], "other")
    with pytest.raises(DataError, match="not those of the training part"):
        wrap_data(one, other)
    alone = make_image_set(pixels, [0, 0], ["cat"], "alone")
    with pytest.raises(DataError, match="fewer than two classes"):
        wrap_data(alone, alone)
