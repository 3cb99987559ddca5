"""MNIST's own format: IDX files, plain or gzipped."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from convoy.data.images import ImageSet, make_image_set
from convoy.data.sources.source import Decoded, Source
from convoy.errors import DataError
from convoy.tracking import Track

_UNSIGNED_BYTE = 0x08
_PARTS = {"train": "train", "test": "t10k"}

FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
DIGITS = tuple(str(digit) for digit in range(10))


def read_idx(path: Path) -> np.ndarray:
    """Read one IDX file of unsigned bytes, checking its length against its header."""
    content = _read_bytes(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTE:
        raise DataError(f"{path} is not an IDX file of bytes", got=content[:4].hex())
    dims = content[3]
    header = 4 + 4 * dims
    if len(content) < header:
        raise DataError(f"{path} is cut short inside its header")
    shape = struct.unpack(f">{dims}I", content[4:header])
    if len(content) - header != math.prod(shape):
        raise DataError(
            f"{path} is damaged: its header promises {math.prod(shape)} bytes",
            got=len(content) - header,
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy()


def _read_bytes(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def find_idx_files(folders: list[Path]) -> dict[str, Path] | None:
    """Look for the four files of an MNIST-like set, in the first folder that has them all."""
    for folder in folders:
        found: dict[str, Path] = {}
        for part, prefix in _PARTS.items():
            for kind, dims in (("images", 3), ("labels", 1)):
                for name in (
                    f"{prefix}-{kind}-idx{dims}-ubyte",
                    f"{prefix}-{kind}.idx{dims}-ubyte",
                ):
                    for path in (folder / name, folder / f"{name}.gz"):
                        if path.is_file():
                            found.setdefault(f"{part}-{kind}", path)
        if len(found) == 4:
            return found
    return None


def idx_source(name: str, files: dict[str, Path], classes: tuple[str, ...], augment: str) -> Source:
    """Describe an MNIST-like set whose four files were found."""

    def read_part(part: str) -> ImageSet:
        images = read_idx(files[f"{part}-images"])
        labels = read_idx(files[f"{part}-labels"])
        return make_image_set(
            images, labels.astype(np.int64), classes, str(files[f"{part}-images"])
        )

    def decode(track: Track) -> Decoded:
        train, test = (read_part(part) for part in track(_PARTS, f"reading {name}", len(_PARTS)))
        return Decoded(train, test)

    return Source(
        name=name,
        decode=decode,
        files=sorted(files.values()),
        options={"classes": classes},
        augment=augment,
    )
