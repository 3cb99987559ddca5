"""NumPy archives are read under any of the usual names, and never unpickled."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convoy.config import Config
from convoy.data.images import TrainTest
from convoy.data.load import load_data
from convoy.errors import ConfigError, DataError


def _part(count: int) -> tuple[np.ndarray, np.ndarray]:
    images = np.random.default_rng(count).integers(0, 256, (count, 6, 5), dtype=np.uint8)
    return images, np.arange(count) % 2


_TRAIN, _TEST = _part(12), _part(6)


def _load(path: Path, **options: Any) -> TrainTest:
    return load_data(Config(data=str(path), cache_dir=str(path.parent / "cache"), **options))


def _save(tmp_path: Path, **arrays: Any) -> Path:
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (("x_train", "y_train"), ("x_test", "y_test")),
        (("train_images", "train_labels"), ("test_images", "test_labels")),
        (("images", "labels"), ("x_test", "y_test")),
    ],
)
def test_both_parts_are_found_under_any_of_their_names(
    tmp_path: Path, train: tuple[str, str], test: tuple[str, str]
) -> None:
    arrays = dict(zip((*train, *test), (*_TRAIN, *_TEST), strict=True))
    data = _load(_save(tmp_path, **arrays))
    for found, (images, labels) in ((data.train, _TRAIN), (data.test, _TEST)):
        assert np.array_equal(found.images_NCHW[:, 0].numpy(), images)
        assert found.labels.tolist() == labels.tolist()
    assert data.train.classes == ("0", "1")
    assert data.augment == "none"


@pytest.mark.parametrize(
    "names", [("x_train", "y_train"), ("train_images", "train_labels"), ("images", "labels")]
)
def test_data_without_a_test_part_is_split(tmp_path: Path, names: tuple[str, str]) -> None:
    path = _save(tmp_path, **dict(zip(names, _TRAIN, strict=True)))
    data = _load(path, test_fraction=0.5)
    assert len(data.train) == len(data.test) == 6
    together = np.concatenate([data.train.images_NCHW.numpy(), data.test.images_NCHW.numpy()])
    assert sorted(map(bytes, together)) == sorted(map(bytes, _TRAIN[0]))


def test_the_split_follows_seed_and_fraction_and_so_does_the_digest(tmp_path: Path) -> None:
    path = _save(tmp_path, images=_TRAIN[0], labels=_TRAIN[1])
    plain, again, seeded, larger = (
        _load(path, **options) for options in ({}, {}, {"seed": 1}, {"test_fraction": 0.5})
    )
    assert plain.digest == again.digest
    assert len({plain.digest, seeded.digest, larger.digest}) == 3
    assert plain.train.images_NCHW.tolist() == again.train.images_NCHW.tolist()
    assert plain.train.images_NCHW.tolist() != seeded.train.images_NCHW.tolist()


def test_statistics_are_those_of_the_training_part_alone(tmp_path: Path) -> None:
    data = _load(_save(tmp_path, images=_TRAIN[0], labels=_TRAIN[1]), test_fraction=0.5)
    pixels = data.train.images_NCHW.double()
    assert data.mean == pytest.approx([float(pixels.mean())])
    assert data.std == pytest.approx([float(pixels.std(correction=0))])


def test_class_names_are_taken_from_the_archive(tmp_path: Path) -> None:
    path = _save(tmp_path, images=_TRAIN[0], labels=_TRAIN[1], classes=np.array(["cat", "dog"]))
    data = _load(path)
    assert data.train.classes == data.test.classes == ("cat", "dog")


def test_float_images_stay_floats(tmp_path: Path) -> None:
    values = (_TRAIN[0] / 255).astype(np.float32)
    data = _load(
        _save(tmp_path, x_train=values, y_train=_TRAIN[1], x_test=values, y_test=_TRAIN[1])
    )
    assert np.array_equal(data.train.images_NCHW[:, 0].numpy(), values)
    assert data.mean == pytest.approx([float(values.mean(dtype=np.float64))])


def test_a_compressed_archive_is_read(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "data.npz", images=_TRAIN[0], labels=_TRAIN[1])
    assert len(_load(tmp_path / "data.npz").train) == 10


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"x_test": _TEST[0], "y_test": _TEST[1]}, r"no training part; got \['x_test', 'y_test'\]"),
        ({"x_train": _TRAIN[0]}, "no training part"),
        ({"images": _TRAIN[0], "labels": _TRAIN[1][:-1]}, "differ in number; got '12 and 11'"),
        ({"images": _TRAIN[0], "labels": _TRAIN[1] - 1}, "negative; got -1"),
        ({"images": _TRAIN[0], "labels": _TRAIN[1] / 2}, "whole numbers"),
        ({"images": _TRAIN[0][:0], "labels": _TRAIN[1][:0]}, "no samples"),
        ({"images": _TRAIN[0], "labels": _TRAIN[1], "classes": ["one"]}, "out of range; got 1"),
        (
            {
                "x_train": _TRAIN[0],
                "y_train": _TRAIN[1] * 0,
                "x_test": _TEST[0],
                "y_test": _TEST[1],
            },
            "out of range; got 1",
        ),
        (
            {
                "x_train": _TRAIN[0],
                "y_train": _TRAIN[1],
                "x_test": _TEST[0][:, 1:],
                "y_test": _TEST[1],
            },
            "differ in shape",
        ),
        (
            {
                "x_train": _TRAIN[0],
                "y_train": _TRAIN[1],
                "x_test": _TEST[0] / 2,
                "y_test": _TEST[1],
            },
            "differ in type",
        ),
        ({"images": _TRAIN[0], "labels": np.arange(12)}, "one sample only"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    tmp_path: Path, arrays: dict[str, Any], reason: str
) -> None:
    with pytest.raises(DataError, match=reason):
        _load(_save(tmp_path, **arrays))


def test_pickled_objects_are_refused_and_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return Path.touch, (tmp_path / "sprung",)  # type: ignore[return-value]

    images = np.array([Trap()] * 12, dtype=object)
    path = _save(tmp_path, images=images, labels=_TRAIN[1])
    with pytest.raises(DataError, match=r"cannot be read as \.npz"):
        _load(path)
    assert not (tmp_path / "sprung").exists()


# np.load leaves the file of a truncated archive open.
@pytest.mark.parametrize("damage", ["empty", "text", "truncated", "flipped"])
def test_a_damaged_archive_is_refused(tmp_path: Path, damage: str) -> None:
    path = _save(tmp_path, images=_TRAIN[0], labels=_TRAIN[1])
    content = path.read_bytes()
    middle = 300  # inside the first array
    damaged = {
        "empty": b"",
        "text": b"these are no arrays",
        "truncated": content[: len(content) // 2],
        "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(DataError, match=r"data\.npz cannot be read as \.npz"):
        _load(path)


def test_a_missing_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown data set"):
        _load(tmp_path / "absent.npz")
