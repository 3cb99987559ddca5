"""In which order samples cross from the convolutions to the fully connected layers.

Krizhevsky's three schemes, as one: a list of passes, each naming a stretch of every node's own
samples. While a pass is computed, the next one's features are already on their way.
"""

from collections.abc import Sequence
from typing import Literal

Scheme = Literal["all", "turns", "slices"]
Stretch = tuple[int, int]


def make_passes(scheme: Scheme, shares: Sequence[int]) -> tuple[tuple[Stretch, ...], ...]:
    """Return the passes of a batch: for each, the stretch of each node's own samples.

    >>> make_passes("all", [2, 1])
    (((0, 2), (0, 1)),)
    >>> make_passes("turns", [2, 1])
    (((0, 2), (0, 0)), ((0, 0), (0, 1)))
    >>> make_passes("slices", [4, 2])
    (((0, 2), (0, 1)), ((2, 4), (1, 2)))
    """
    if scheme == "all":
        found = [tuple((0, share) for share in shares)]
    elif scheme == "turns":
        found = [
            tuple((0, share if node == turn else 0) for node, share in enumerate(shares))
            for turn in range(len(shares))
        ]
    else:
        count = len(shares)
        found = [
            tuple((share * k // count, share * (k + 1) // count) for share in shares)
            for k in range(count)
        ]
    return tuple(one for one in found if any(stop > start for start, stop in one))
