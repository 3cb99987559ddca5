"""CIFAR-10's binary format: records of one label byte and 3,072 pixel bytes."""

from pathlib import Path

import numpy as np

from convoy.data.images import ImageSet, make_image_set
from convoy.data.sources.source import Decoded, Source
from convoy.errors import DataError
from convoy.tracking import Track

CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
_RECORD = 1 + 3 * 32 * 32
_TRAIN = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
_TEST = ("test_batch.bin",)


def read_records(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read one batch file as images (NCHW) and labels."""
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if content.size == 0 or content.size % _RECORD:
        raise DataError(
            f"{path} is damaged: its length is no multiple of {_RECORD} bytes", got=content.size
        )
    records = content.reshape(-1, _RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def find_cifar_folder(folders: list[Path]) -> Path | None:
    """Return the first folder that holds all six batch files."""
    for folder in folders:
        if all((folder / name).is_file() for name in _TRAIN + _TEST):
            return folder
    return None


def cifar_source(name: str, folder: Path) -> Source:
    """Describe the binary CIFAR-10 in a folder."""

    def read_part(files: tuple[str, ...], track: Track) -> ImageSet:
        parts = [
            read_records(folder / file) for file in track(files, f"reading {name}", len(files))
        ]
        images = np.concatenate([part[0] for part in parts])
        labels = np.concatenate([part[1] for part in parts])
        return make_image_set(images, labels, CIFAR10_CLASSES, str(folder))

    def decode(track: Track) -> Decoded:
        return Decoded(read_part(_TRAIN, track), read_part(_TEST, track))

    files = [folder / file for file in _TRAIN + _TEST]
    return Source(name=name, decode=decode, files=files, augment="crop+flip")
