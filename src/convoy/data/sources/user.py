"""The user's own data: arrays, image sets, or any data set of (image, label) pairs."""

from collections.abc import Sequence
from typing import Any, TypeGuard

import numpy as np
import torch

from convoy.data.images import ImageSet, make_image_set
from convoy.data.sources.source import Decoded, Source
from convoy.errors import DataError
from convoy.registry import load_user_callable
from convoy.tracking import Track


def as_image_set(value: object, name: str, track: Track) -> ImageSet:
    """Turn what a user hands over into an image set.

    Args:
        value: an ImageSet; a pair (images, labels) of arrays or tensors; or an object with a
            length and items (image, label), such as a torch data set.
        name: what to call it in an error.
        track: shows progress while items are read.
    """
    if isinstance(value, ImageSet):
        return make_image_set(value.images_NCHW, value.labels, value.classes, name)
    if _is_pair_of_arrays(value):
        return make_image_set(value[0], value[1], None, name)
    if hasattr(value, "__len__") and hasattr(value, "__getitem__"):
        return _from_items(value, name, track)
    raise DataError(
        f"the {name} data is of no known kind",
        got=type(value).__name__,
        allowed="an ImageSet, (images, labels), or a data set with a length and items",
    )


def _is_pair_of_arrays(value: object) -> TypeGuard[tuple[np.ndarray, np.ndarray]]:
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(isinstance(part, (np.ndarray, torch.Tensor)) for part in value)
    )


def _from_items(items: Any, name: str, track: Track) -> ImageSet:  # noqa: ANN401 - the user's own
    count = len(items)
    if count == 0:
        raise DataError(f"the {name} data has no samples")
    images, labels = [], []
    for index in track(range(count), f"reading {name} data", count):
        try:
            image, label = items[index]
            images.append(_as_array(image))
            labels.append(int(label))
        except Exception as error:  # the user's data set may fail in any way
            raise DataError(
                f"sample {index} of the {name} data cannot be read: {type(error).__name__}: {error}"
            ) from error
    shapes = {image.shape for image in images}
    if len(shapes) > 1:
        raise DataError(f"the {name} data has images of different sizes", got=sorted(shapes)[:3])
    classes = getattr(items, "classes", None)
    names = [str(c) for c in classes] if isinstance(classes, Sequence) else None
    return make_image_set(np.stack(images), labels, names, f"the {name} data")


def _as_array(image: object) -> np.ndarray:
    return image.numpy() if isinstance(image, torch.Tensor) else np.asarray(image)


def user_source(target: str) -> Source:
    """Describe the two data sets that a user's "module:callable" returns."""

    def decode(track: Track) -> Decoded:
        make = load_user_callable(target, "data set")
        try:
            parts = make()
        except Exception as error:  # the user's function may fail in any way
            raise DataError(f"'{target}' failed: {type(error).__name__}: {error}") from error
        if not isinstance(parts, (tuple, list)) or len(parts) != 2:
            raise DataError(f"'{target}' must return two data sets", got=type(parts).__name__)
        return Decoded(
            as_image_set(parts[0], "training", track), as_image_set(parts[1], "test", track)
        )

    return Source(name=target, decode=decode)
