"""A seeded split into training and test part, for data that comes in one piece."""

import torch
from torch import Tensor

from convoy.data.images import ImageSet
from convoy.errors import DataError
from convoy.randomness import fold


def split_indices(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Return training and test indices with the same part of every class in the test.

    Every class keeps at least one sample on either side.
    """
    generator = torch.Generator().manual_seed(fold(seed, 2))
    train, test = [], []
    for number in torch.unique(labels):
        members = torch.nonzero(labels == number).reshape(-1)
        if len(members) < 2:
            raise DataError(
                f"class {int(number)} has one sample only, so it cannot be split into two parts",
                hint="Add samples, or bring a test part of your own.",
            )
        shuffled = members[torch.randperm(len(members), generator=generator)]
        count = min(max(round(len(members) * fraction), 1), len(members) - 1)
        test.append(shuffled[:count])
        train.append(shuffled[count:])
    return torch.cat(train).sort().values, torch.cat(test).sort().values


def split(images: ImageSet, fraction: float, seed: int) -> tuple[ImageSet, ImageSet]:
    """Split an image set into a training and a test part."""
    train, test = split_indices(images.labels, fraction, seed)
    return images.select(train), images.select(test)
