"""What a source of images is: found by name or path, fingerprinted cheaply, decoded once."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from convoy.data.images import ImageSet, channel_statistics
from convoy.errors import DataError
from convoy.tracking import Track


@dataclass(frozen=True, eq=False)
class Decoded:
    """What decoding gives.

    Attributes:
        train: the training part, or everything where the source has no test part.
        test: the source's own test part, if it has one.
        skipped: what could not be read, and why.
        statistics: mean and standard deviation of `train` per channel, once they are known.
    """

    train: ImageSet
    test: ImageSet | None
    skipped: tuple[str, ...] = ()
    statistics: tuple[tuple[float, ...], tuple[float, ...]] | None = None

    def with_statistics(self) -> "Decoded":
        """Return the same with the statistics of the training part."""
        return replace(self, statistics=channel_statistics(self.train.images_NCHW))


@dataclass(frozen=True, eq=False)
class Source:
    """A data set before it is decoded.

    Attributes:
        name: what the user called it.
        decode: reads everything; called only when no cache holds the result.
        files: what the content is made of; empty where it cannot be known beforehand.
        options: what else decides the result of decoding.
        augment: the variation that is usual for such images.
    """

    name: str
    decode: Callable[[Track], Decoded]
    files: Sequence[Path] = ()
    options: dict[str, object] = field(default_factory=dict)
    augment: str = "none"

    def fingerprint(self, track: Track) -> str | None:
        """Return a digest of every byte that decides the result, or None if there are no files."""
        if not self.files:
            return None
        digest = hashlib.sha256(repr(sorted(self.options.items())).encode())
        for path in track(self.files, "checking files", len(self.files)):
            digest.update(os.fsencode(path.name))
            try:
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error}") from error
        return digest.hexdigest()
