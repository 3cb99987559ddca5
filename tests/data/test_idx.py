"""MNIST's own files are read whole or refused."""

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convoy.config import Config
from convoy.data.images import TrainTest
from convoy.data.load import load_data
from convoy.data.sources.idx import DIGITS, FASHION_CLASSES, find_idx_files, read_idx
from convoy.errors import DataError

# read_idx gives read-only arrays, of which torch warns once in a process.

_COUNTS = {"train": 20, "t10k": 10}


def _idx(array: np.ndarray) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def _arrays(part: str) -> tuple[np.ndarray, np.ndarray]:
    count = _COUNTS[part]
    images = np.random.default_rng(count).integers(0, 256, (count, 28, 28), dtype=np.uint8)
    return images, np.arange(count) % 10


def _write(folder: Path, *, zipped: bool = False, dot: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part in _COUNTS:
        for array, kind, dims in zip(_arrays(part), ("images", "labels"), (3, 1), strict=True):
            name = f"{part}-{kind}{'.' if dot else '-'}idx{dims}-ubyte"
            content = _idx(array)
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)
    return folder


def _load(tmp_path: Path, name: str = "mnist", **options: Any) -> TrainTest:
    return load_data(
        Config(data=name, data_dir=str(tmp_path), cache_dir=str(tmp_path / "cache"), **options)
    )


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("dot", [False, True])
@pytest.mark.parametrize(
    ("name", "subfolder"),
    [
        ("mnist", ""),
        ("mnist", "mnist"),
        ("mnist", "MNIST/raw"),
        ("fashion-mnist", ""),
        ("fashion-mnist", "fashion-mnist"),
        ("fashion-mnist", "FashionMNIST/raw"),
    ],
)
def test_images_and_labels_are_read_from_the_usual_places(
    tmp_path: Path, name: str, subfolder: str, zipped: bool, dot: bool
) -> None:
    _write(tmp_path / subfolder, zipped=zipped, dot=dot)
    data = _load(tmp_path, name)
    for part, images in (("train", data.train), ("t10k", data.test)):
        pixels, labels = _arrays(part)
        assert np.array_equal(images.images_NCHW[:, 0].numpy(), pixels)
        assert images.labels.tolist() == labels.tolist()


@pytest.mark.parametrize(
    ("name", "classes", "augment"),
    [("mnist", DIGITS, "crop"), ("fashion-mnist", FASHION_CLASSES, "flip")],
)
def test_a_named_set_has_its_classes_and_usual_augmentation(
    tmp_path: Path, name: str, classes: tuple[str, ...], augment: str
) -> None:
    data = _load(_write(tmp_path), name)
    assert data.train.classes == classes
    assert data.augment == augment


def test_a_folder_that_lacks_a_file_is_passed_over(tmp_path: Path) -> None:
    whole, lacking = _write(tmp_path / "whole"), _write(tmp_path / "lacking")
    (lacking / "t10k-labels-idx1-ubyte").unlink()
    found = find_idx_files([lacking, whole])
    assert found is not None
    assert {path.parent for path in found.values()} == {whole}
    assert find_idx_files([lacking]) is None


def test_missing_files_are_refused_with_the_places_looked_in(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="files of 'mnist' were not found") as caught:
        _load(tmp_path)
    assert str(tmp_path / "MNIST/raw") in str(caught.value)
    assert "fashion-mini" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not an IDX file"),
        (b"\0\0\x08", "not an IDX file"),
        (b"\1\0\x08\x01\0\0\0\0", "not an IDX file.*01000801"),
        (b"\0\0\x0d\x01\0\0\0\0", "not an IDX file"),
        (b"\0\0\x08\x03\0\0\0\1\0\0", "cut short inside its header"),
        (_idx(np.zeros((2, 3, 3)))[:-1], "promises 18 bytes; got 17"),
        (_idx(np.zeros((2, 3, 3))) + b"\0", "promises 18 bytes; got 19"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "plain"])
def test_a_damaged_gzip_is_refused(tmp_path: Path, damage: str) -> None:
    content = _idx(np.random.default_rng(0).integers(0, 256, (9, 9, 9)))
    zipped = bytearray(gzip.compress(content))
    zipped[len(zipped) // 2] ^= 0xFF
    damaged = {
        "truncated": gzip.compress(content)[:-20],
        "flipped": bytes(zipped),
        "plain": content,
    }
    path = tmp_path / "file.gz"
    path.write_bytes(damaged[damage])
    with pytest.raises(DataError, match=r"file\.gz cannot be read"):
        read_idx(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(tmp_path / "absent")


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        (np.zeros(19), "differ in number; got '20 and 19'"),
        (np.full(20, 10), "out of range; got 10"),
    ],
)
def test_labels_that_do_not_fit_are_refused(
    tmp_path: Path, labels: np.ndarray, reason: str
) -> None:
    _write(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(_idx(labels))
    with pytest.raises(DataError, match=reason):
        _load(tmp_path)


def test_a_set_without_samples_is_refused(tmp_path: Path) -> None:
    _write(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(_idx(np.zeros((0, 28, 28))))
    with pytest.raises(DataError, match="no samples"):
        _load(tmp_path)


def test_test_images_of_another_size_are_refused(tmp_path: Path) -> None:
    _write(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(_idx(np.zeros((10, 27, 28))))
    with pytest.raises(DataError, match="differ in shape"):
        _load(tmp_path)
