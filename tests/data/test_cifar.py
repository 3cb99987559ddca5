"""CIFAR-10's binary files are read whole or refused."""

from pathlib import Path

import numpy as np
import pytest

from convoy.config import Config
from convoy.data.images import TrainTest
from convoy.data.load import load_data
from convoy.data.sources.cifar import CIFAR10_CLASSES, find_cifar_folder, read_records
from convoy.errors import DataError

_RECORD = 3073
_FILES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]


def _records(number: int, count: int = 4) -> np.ndarray:
    records = np.random.default_rng(number).integers(0, 256, (count, _RECORD), dtype=np.uint8)
    records[:, 0] = (np.arange(count) + number) % 10
    return records


def _write(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(_FILES):
        _records(number).tofile(folder / name)
    return folder


def _load(tmp_path: Path) -> TrainTest:
    return load_data(
        Config(data="cifar10", data_dir=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    )


@pytest.mark.parametrize("subfolder", ["", "cifar10", "cifar-10-batches-bin"])
def test_all_batches_are_read_in_order(tmp_path: Path, subfolder: str) -> None:
    _write(tmp_path / subfolder)
    data = _load(tmp_path)
    expected = np.concatenate([_records(number) for number in range(5)])
    assert np.array_equal(data.train.images_NCHW.numpy(), expected[:, 1:].reshape(-1, 3, 32, 32))
    assert data.train.labels.tolist() == expected[:, 0].tolist()
    assert np.array_equal(data.test.images_NCHW.numpy(), _records(5)[:, 1:].reshape(-1, 3, 32, 32))
    assert data.train.classes == CIFAR10_CLASSES
    assert data.augment == "crop+flip"


@pytest.mark.parametrize("size", [0, 1, _RECORD - 1, 2 * _RECORD + 1])
def test_a_file_of_the_wrong_length_is_refused(tmp_path: Path, size: int) -> None:
    _write(tmp_path)
    (tmp_path / "data_batch_3.bin").write_bytes(bytes(size))
    with pytest.raises(DataError, match=rf"data_batch_3\.bin is damaged.*got {size}"):
        _load(tmp_path)


def test_a_label_out_of_range_is_refused(tmp_path: Path) -> None:
    _write(tmp_path)
    records = _records(5)
    records[1, 0] = 10
    records.tofile(tmp_path / "test_batch.bin")
    with pytest.raises(DataError, match="out of range; got 10"):
        _load(tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_records(tmp_path / "absent.bin")


@pytest.mark.parametrize("missing", ["data_batch_5.bin", "test_batch.bin"])
def test_a_folder_that_lacks_a_file_is_passed_over(tmp_path: Path, missing: str) -> None:
    lacking, whole = _write(tmp_path / "lacking"), _write(tmp_path / "whole")
    (lacking / missing).unlink()
    assert find_cifar_folder([lacking, whole]) == whole
    with pytest.raises(DataError, match="files of 'cifar10' were not found"):
        _load(lacking)
