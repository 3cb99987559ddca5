"""Decoded images on disk, memory-mapped; used only if every byte is as it was written."""

import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from convoy.data.images import ImageSet
from convoy.data.sources.source import Decoded
from convoy.files import (
    digest_of,
    new_folder,
    read_manifest,
    remove_partials,
    write_manifest,
)

_FORMAT = "convoy-images-1"


class ImageCache:
    """A folder of decoded data sets, each under the fingerprint of what it was decoded from."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def folder(self, key: str) -> Path:
        """Return where a data set lies or would lie."""
        return self._root / key[:32]

    def load(self, key: str) -> Decoded | None:
        """Return a data set if it is there and whole; a damaged one is removed."""
        folder = self.folder(key)
        if not folder.is_dir():
            return None
        try:
            return _load(folder, key)
        except (OSError, ValueError, KeyError, TypeError):
            shutil.rmtree(folder, ignore_errors=True)
            return None

    def store(self, key: str, data: Decoded) -> None:
        """Write a data set; it appears under its name only when it is complete."""
        self._root.mkdir(parents=True, exist_ok=True)
        remove_partials(self._root)
        sets = {"train": data.train, "test": data.test}
        with new_folder(self.folder(key)) as folder:
            for part, images in sets.items():
                if images is not None:
                    _save_array(folder / f"{part}-images.npy", images.images_NCHW)
                    _save_array(folder / f"{part}-labels.npy", images.labels)
            content = {
                "key": key,
                "classes": data.train.classes,
                "statistics": data.statistics,
                "skipped": data.skipped,
                "files": {path.name: digest_of(path) for path in sorted(folder.glob("*.npy"))},
            }
            write_manifest(folder / "manifest.json", _FORMAT, content)


def _save_array(path: Path, tensor: Tensor) -> None:
    np.save(path, tensor.numpy(), allow_pickle=False)


def _load(folder: Path, key: str) -> Decoded:
    manifest = read_manifest(folder / "manifest.json", _FORMAT)
    if manifest["key"] != key:
        raise ValueError("written for other data")
    for name, digest in manifest["files"].items():
        if digest_of(folder / name) != digest:
            raise ValueError(f"{name} is damaged")
    classes = tuple(manifest["classes"])
    has_test = "test-images.npy" in manifest["files"]
    mean, std = manifest["statistics"]
    return Decoded(
        train=_load_part(folder, "train", classes),
        test=_load_part(folder, "test", classes) if has_test else None,
        skipped=tuple(manifest["skipped"]),
        statistics=(tuple(mean), tuple(std)),
    )


def _load_part(folder: Path, part: str, classes: tuple[str, ...]) -> ImageSet:
    images, labels = (
        # Copy-on-write mapping: torch wants writable memory, the file must never change.
        torch.from_numpy(np.load(folder / f"{part}-{kind}.npy", mmap_mode="c", allow_pickle=False))
        for kind in ("images", "labels")
    )
    return ImageSet(images, labels, classes)
