"""Load a data set: from the cache if it holds it, else by decoding it once."""

import hashlib
import logging

import numpy as np

from convoy.config import Config
from convoy.data.cache import ImageCache
from convoy.data.catalog import find_source
from convoy.data.images import ImageSet, TrainTest, channel_statistics
from convoy.data.sources.source import Decoded, Source
from convoy.data.split import split
from convoy.errors import DataError
from convoy.files import default_cache_dir, user_path
from convoy.tracking import Track, untracked

_log = logging.getLogger(__name__)


def load_data(config: Config, track: Track = untracked) -> TrainTest:
    """Return the data set a config names, decoded, checked and described."""
    source = find_source(config)
    decoded, fingerprint = _load_or_decode(source, config, track)
    if decoded.test is None:
        decoded = _split(decoded, config)
        fingerprint = fingerprint and f"{fingerprint}|{config.test_fraction}|{config.seed}"
    return _described(source.name, decoded, fingerprint, source.augment)


def wrap_data(train: ImageSet, test: ImageSet) -> TrainTest:
    """Describe two image sets that the user handed over in memory."""
    return _described("given", Decoded(train, test), None, "none")


def _load_or_decode(source: Source, config: Config, track: Track) -> tuple[Decoded, str | None]:
    fingerprint = source.fingerprint(track)
    if fingerprint is None:
        return source.decode(track), None
    cache = ImageCache(user_path(config.cache_dir) if config.cache_dir else default_cache_dir())
    decoded = cache.load(fingerprint)
    if decoded is None:
        decoded = source.decode(track).with_statistics()
        try:
            cache.store(fingerprint, decoded)
        except OSError as error:
            # Costs the next run its decoding, this one nothing.
            _log.warning("decoded images could not be cached: %s", error)
    return decoded, fingerprint


def _split(decoded: Decoded, config: Config) -> Decoded:
    train, test = split(decoded.train, config.test_fraction, config.seed)
    return Decoded(train, test, decoded.skipped)


def _described(name: str, decoded: Decoded, fingerprint: str | None, augment: str) -> TrainTest:
    train, test = decoded.train, decoded.test
    assert test is not None
    if train.shape_CHW != test.shape_CHW:
        raise DataError(
            f"{name}: training and test images differ in shape",
            got=f"{train.shape_CHW} and {test.shape_CHW}",
        )
    if train.images_NCHW.dtype != test.images_NCHW.dtype:
        raise DataError(f"{name}: training and test images differ in type")
    if len(train.classes) < 2:
        raise DataError(f"{name}: fewer than two classes", got=list(train.classes))
    if test.classes != train.classes[: len(test.classes)]:
        raise DataError(
            f"{name}: the classes of the test part are not those of the training part",
            got=list(test.classes),
            allowed=str(list(train.classes)),
        )
    mean, std = decoded.statistics or channel_statistics(train.images_NCHW)
    return TrainTest(
        name=name,
        train=train,
        test=test,
        digest=hashlib.sha256(fingerprint.encode()).hexdigest()
        if fingerprint
        else content_digest(train, test),
        augment=augment,
        mean=mean,
        std=std,
        skipped=decoded.skipped,
    )


def content_digest(*sets: ImageSet) -> str:
    """Return a digest of images and labels in memory."""
    digest = hashlib.sha256()
    for images in sets:
        for tensor in (images.images_NCHW, images.labels):
            digest.update(np.ascontiguousarray(tensor.numpy()).data)
    return digest.hexdigest()
