"""NumPy archives: x_train, y_train (and x_test, y_test), or images and labels."""

import zipfile
import zlib
from pathlib import Path

import numpy as np

from convoy.data.images import ImageSet, make_image_set
from convoy.data.sources.source import Decoded, Source
from convoy.errors import DataError
from convoy.tracking import Track

_TRAIN_KEYS = (("x_train", "y_train"), ("train_images", "train_labels"), ("images", "labels"))
_TEST_KEYS = (("x_test", "y_test"), ("test_images", "test_labels"))


def npz_source(name: str, path: Path, augment: str = "none") -> Source:
    """Describe the arrays of an .npz file."""

    def decode(track: Track) -> Decoded:
        (only,) = track([path], f"reading {path.name}", 1)
        arrays = _read_arrays(only)
        classes = [str(c) for c in arrays["classes"]] if "classes" in arrays else None
        train = _find_part(arrays, _TRAIN_KEYS, classes, path)
        if train is None:
            known = " or ".join(" + ".join(pair) for pair in _TRAIN_KEYS)
            raise DataError(f"{path} has no training part", got=sorted(arrays), allowed=known)
        return Decoded(train, _find_part(arrays, _TEST_KEYS, train.classes, path))

    return Source(name=name, decode=decode, files=[path], augment=augment)


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise DataError(f"{path} holds one array, not an archive of arrays")
            return {key: archive[key] for key in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} cannot be read as .npz: {error}") from error


def _find_part(
    arrays: dict[str, np.ndarray],
    keys: tuple[tuple[str, str], ...],
    classes: list[str] | tuple[str, ...] | None,
    path: Path,
) -> ImageSet | None:
    for images, labels in keys:
        if images in arrays and labels in arrays:
            part = f"{path} ({images})"
            return make_image_set(arrays[images], arrays[labels], classes, part)
    return None
