"""What is known of a data set before a single sample of it is there."""

import math
import re
import reprlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np

from convoy.data.images import TrainTest
from convoy.errors import DataError

_SAMPLES_AT_MOST = 1_000_000_000
_VALUES_AT_MOST = 1 << 24  # in one image
SAMPLE_BYTES_AT_MOST = 4 * _VALUES_AT_MOST
_CLASSES_AT_MOST = 1_000_000
_STATISTIC_AT_MOST = 1e30
_TEXTS = ("name", "digest", "dtype", "augment")
_TUPLES = ("shape_CHW", "classes", "mean", "std")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class DataCard:
    """Describes a data set's training images; a card that makes no sense cannot be made.

    Attributes:
        name: what the user called the data set.
        digest: identifies the content of the whole of it; names a folder, so it is checked.
        count: how many training images there are.
        shape_CHW, dtype: of one image.
        classes: the classes' names, in the order of their numbers.
        mean, std: of all training images, per channel, in the images' own units.
        augment: the variation that is usual for such images.
    """

    name: str
    digest: str
    count: int
    shape_CHW: tuple[int, int, int]  # noqa: N815 - the suffix is the shape
    dtype: Literal["uint8", "float32"]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    augment: str

    def __post_init__(self) -> None:
        for field, holds in self._laws():
            if not holds:
                value = reprlib.repr(getattr(self, field))
                raise DataError(f"the description of a data set is wrong: {field} is {value}")

    def _laws(self) -> Iterator[tuple[str, object]]:
        """Yield what must hold of which field; a law may rely on those before it."""
        yield from ((name, isinstance(getattr(self, name), str)) for name in _TEXTS)
        yield from ((name, isinstance(getattr(self, name), tuple)) for name in _TUPLES)
        yield "digest", _SHA256.fullmatch(self.digest)
        yield "count", _is_count(self.count, _SAMPLES_AT_MOST)
        yield "dtype", self.dtype in ("uint8", "float32")
        yield "shape_CHW", len(self.shape_CHW) == 3
        yield "shape_CHW", all(_is_count(side, _VALUES_AT_MOST) for side in self.shape_CHW)
        yield "shape_CHW", math.prod(self.shape_CHW) <= _VALUES_AT_MOST
        yield "classes", 2 <= len(self.classes) <= _CLASSES_AT_MOST
        yield "classes", all(isinstance(name, str) for name in self.classes)
        yield "mean", self._are_statistics(self.mean)
        yield "std", self._are_statistics(self.std) and min(self.std) > 0

    def _are_statistics(self, values: tuple[float, ...]) -> bool:
        return len(values) == self.shape_CHW[0] and all(
            type(value) in (int, float) and abs(value) < _STATISTIC_AT_MOST for value in values
        )

    @classmethod
    def of(cls, data: TrainTest) -> "DataCard":
        """Describe a data set that is here."""
        return cls(
            name=data.name,
            digest=data.digest,
            count=len(data.train),
            shape_CHW=data.train.shape_CHW,
            dtype="uint8" if data.train.images_NCHW.dtype.itemsize == 1 else "float32",
            classes=data.train.classes,
            mean=data.mean,
            std=data.std,
            augment=data.augment,
        )

    @classmethod
    def from_dict(cls, values: object) -> "DataCard":
        """Read what `as_dict` gave, from wherever it came.

        Raises:
            DataError: it describes no data set.
        """
        if not isinstance(values, dict) or set(values) != {field.name for field in fields(cls)}:
            raise DataError("this does not describe a data set", got=reprlib.repr(values))
        return cls(**{key: _as_tuple(value) for key, value in values.items()})

    def as_dict(self) -> dict[str, Any]:
        """Return the card as plain values, for JSON."""
        return asdict(self)

    @property
    def sample_bytes(self) -> int:
        """Return the size of one image."""
        return math.prod(self.shape_CHW) * np.dtype(self.dtype).itemsize

    def check_numbers(self, numbers: np.ndarray) -> None:
        """Raise a DataError if there is no sample with one of these numbers."""
        wrong = numbers[(numbers < 0) | (numbers >= self.count)]
        if len(wrong):
            raise DataError(
                "no sample has this number", got=int(wrong[0]), allowed=f"0 to {self.count - 1}"
            )


def _is_count(value: object, at_most: int) -> bool:
    return type(value) is int and 1 <= value <= at_most


def _as_tuple(value: Any) -> Any:  # noqa: ANN401 - any value of JSON
    return tuple(value) if isinstance(value, list) else value
