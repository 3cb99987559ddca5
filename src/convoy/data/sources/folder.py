"""Images sorted into one folder per class: root/[train|test/]class/*.jpg|png, or a tar of it."""

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image, ImageOps

from convoy.data.images import ImageSet, make_image_set
from convoy.data.sources.archive import ImageFiles
from convoy.data.sources.source import Decoded, Source
from convoy.errors import BadSampleError, DataError
from convoy.tracking import Track

_TRAIN_NAMES = ("train", "training")
_TEST_NAMES = ("test", "val", "valid", "validation")
_DEEP_MODES = frozenset({"I", "I;16", "I;16L", "I;16B", "I;16N"})  # 16 bits of grey
_GREY_MODES = frozenset({"1", "L"}) | _DEEP_MODES


@dataclass(frozen=True, slots=True)
class Layout:
    """Which image belongs to which part and class.

    Attributes:
        classes: names in sorted order; their places are the labels.
        parts: for "train" and, where there is one, "test": each image's path and label.
    """

    classes: tuple[str, ...]
    parts: dict[str, dict[PurePosixPath, int]]


def find_layout(files: ImageFiles) -> Layout:
    """Work out parts and classes from the paths alone.

    Raises:
        DataError: there are no classes, one is empty, or the parts do not fit together.
    """
    images = files.images()
    if not images:
        raise DataError(
            f"{files.root} has no images",
            allowed="root/[train|test/]class/*.jpg or *.png",
        )
    top = _common_top(images)
    part_of = _find_parts(files, top)
    folders = {name: _class_folders(files, root) for name, root in part_of.items()}
    classes = tuple(sorted(folder.name for folder in folders["train"]))
    _check_classes(files.root, classes, folders)
    numbers = {name: number for number, name in enumerate(classes)}
    parts: dict[str, dict[PurePosixPath, int]] = {name: {} for name in part_of}
    for path in images:
        for name, root in part_of.items():
            if root in path.parents and len(path.parts) - len(root.parts) >= 2:
                parts[name][path] = numbers[path.parts[len(root.parts)]]
    _check_no_empty_class(files.root, classes, parts)
    return Layout(classes, parts)


def _common_top(images: list[PurePosixPath]) -> PurePosixPath:
    """Step into folders that hold everything, such as the single top folder of many archives."""
    top = PurePosixPath()
    while True:
        heads = {path.relative_to(top).parts[0] for path in images}
        (head, *others) = heads
        depth = min(len(path.relative_to(top).parts) for path in images)
        if others or depth < 3 or head.lower() in _TRAIN_NAMES:
            return top
        top = top / head


def _find_parts(files: ImageFiles, top: PurePosixPath) -> dict[str, PurePosixPath]:
    children = [folder for folder in files.folders() if folder.parent == top and folder != top]
    train = next((c for c in children if c.name.lower() in _TRAIN_NAMES), None)
    test = next((c for c in children if c.name.lower() in _TEST_NAMES), None)
    if train is None and test is None:
        return {"train": top}
    if train is None:
        raise DataError(f"{files.root} has a test part but no 'train' folder", got=str(test))
    return {"train": train} if test is None else {"train": train, "test": test}


def _class_folders(files: ImageFiles, part: PurePosixPath) -> list[PurePosixPath]:
    return [
        folder
        for folder in files.folders()
        if folder.parent == part and folder != part and not folder.name.startswith(".")
    ]


def _check_classes(
    root: Path, classes: tuple[str, ...], folders: dict[str, list[PurePosixPath]]
) -> None:
    if len(classes) < 2:
        raise DataError(
            f"{root} has fewer than two class folders",
            got=list(classes),
            allowed="root/[train|test/]class/*.jpg or *.png",
        )
    unknown = sorted({folder.name for folder in folders.get("test", [])} - set(classes))
    if unknown:
        raise DataError(
            f"{root}: the test part has classes that the training part lacks", got=unknown
        )


def _check_no_empty_class(
    root: Path, classes: tuple[str, ...], parts: dict[str, dict[PurePosixPath, int]]
) -> None:
    for part, images in parts.items():
        empty = sorted(set(range(len(classes))) - set(images.values()))
        if empty and part == "train":
            names = [classes[number] for number in empty]
            raise DataError(
                f"{root}: a class folder has no images", got=names, hint="Fill it or remove it."
            )
        if not images:
            raise DataError(f"{root}: the {part} part has no images")


def folder_source(name: str, files: ImageFiles, *, image_size: int, max_bad_samples: int) -> Source:
    """Describe the images of a folder or archive.

    Args:
        name: what the user called it.
        files: the image files.
        image_size: side to crop and scale to; 0 keeps images as they are.
        max_bad_samples: how many unreadable images may be left out.
    """

    def decode(track: Track) -> Decoded:
        return _Reader(files, find_layout(files), image_size, max_bad_samples).decode(track)

    options: dict[str, object] = {"image_size": image_size, "max_bad_samples": max_bad_samples}
    if len(files.parts()) > 1:  # a folder: the names below it are content too
        options["paths"] = [str(path) for path in files.images()]
    return Source(
        name=name, decode=decode, files=files.parts(), options=options, augment="crop+flip"
    )


class _Reader:
    """Decodes every image of a layout into one array per part."""

    def __init__(self, files: ImageFiles, layout: Layout, size: int, max_bad: int) -> None:
        self._files = files
        self._layout = layout
        self._size = size
        self._max_bad = max_bad
        self._bad: list[str] = []

    def decode(self, track: Track) -> Decoded:
        count = sum(len(images) for images in self._layout.parts.values())
        grey = self._all_grey(track, count)
        pixels: dict[PurePosixPath, np.ndarray] = {}
        for path, content in track(self._members(), "decoding images", count):
            try:
                pixels[path] = _decode_image(content, grey=grey, size=self._size)
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
                self._skip(path, error)
        self._check_sizes(pixels)
        train = self._gather("train", pixels)
        test = self._gather("test", pixels) if "test" in self._layout.parts else None
        return Decoded(train, test, tuple(self._bad))

    def _members(self) -> Iterator[tuple[PurePosixPath, bytes]]:
        wanted = {path for images in self._layout.parts.values() for path in images}
        return (item for item in self._files.read() if item[0] in wanted)

    def _all_grey(self, track: Track, count: int) -> bool:
        for path, content in track(self._members(), "reading headers", count):
            try:
                with Image.open(io.BytesIO(content)) as image:
                    if image.mode not in _GREY_MODES:
                        return False
            except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
                del path  # the decoding pass names and counts it
        return True

    def _skip(self, path: PurePosixPath, error: Exception) -> None:
        self._bad.append(f"{path}: {error}")
        if len(self._bad) > self._max_bad:
            raise BadSampleError(
                f"{self._files.root}: the image {path} cannot be read: {error}",
                got=f"{len(self._bad)} bad images",
                allowed=f"max_bad_samples = {self._max_bad}",
                hint="Mend or remove it, or give a larger --max-bad-samples.",
            ) from error

    def _check_sizes(self, pixels: dict[PurePosixPath, np.ndarray]) -> None:
        first: dict[tuple[int, ...], PurePosixPath] = {}
        for path, image in pixels.items():
            first.setdefault(image.shape[:2], path)
        if len(first) > 1:
            examples = [f"{path} is {w}x{h}" for (h, w), path in list(first.items())[:2]]
            raise DataError(
                f"{self._files.root}: images differ in size ({'; '.join(examples)})",
                hint="Give --image-size N to crop and scale them all.",
            )

    def _gather(self, part: str, pixels: dict[PurePosixPath, np.ndarray]) -> ImageSet:
        labels = self._layout.parts[part]
        paths = [path for path in labels if path in pixels]
        if not paths:
            raise DataError(f"{self._files.root}: no image of the {part} part could be read")
        return make_image_set(
            np.stack([pixels[path] for path in paths]),
            np.array([labels[path] for path in paths], dtype=np.int64),
            self._layout.classes,
            f"{self._files.root} ({part})",
        )


def _decode_image(content: bytes, *, grey: bool, size: int) -> np.ndarray:
    with Image.open(io.BytesIO(content)) as image:
        whole: Image.Image = image
        if image.mode in _DEEP_MODES:  # convert() would clip everything above 255
            whole = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        converted = whole.convert("L" if grey else "RGB")
    if size:
        converted = ImageOps.fit(converted, (size, size), Image.Resampling.BILINEAR)
    return np.asarray(converted)
