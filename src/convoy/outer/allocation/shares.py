"""Whole shares of a batch: in proportion to weights, none of them too small to be worth it."""

from collections.abc import Sequence


def apportion(weights: Sequence[float], total: int, min_share: int = 0) -> tuple[int, ...]:
    """Split a total in proportion to weights, by largest remainder.

    A share is 0 or at least `min_share`: a node whose part would be smaller is lifted to it,
    at the others' cost; where the total is too small for all, the nodes of lowest weight get 0.

    >>> apportion([0.8, 0.6, 0.4, 0.2], 256)
    (102, 77, 51, 26)
    >>> apportion([50, 1], 256, min_share=8)
    (248, 8)
    >>> apportion([3, 1, 2], 20, min_share=8)
    (12, 0, 8)
    """
    if not weights:
        raise ValueError("there is nobody to share with")
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    room = max(1, total // min_share) if min_share else len(weights)
    # A weight of 0 is a node that was left out: it is not lifted to the minimum.
    served = [i for i in order[:room] if weights[i] > 0] or order[:1]
    lifted: list[int] = []
    shares = [0] * len(weights)
    while True:
        free = [i for i in served if i not in lifted]
        parts = _largest_remainder([weights[i] for i in free], total - min_share * len(lifted))
        small = [i for i, part in zip(free, parts, strict=True) if part < min_share]
        if not small or len(free) == 1:
            break
        lifted += small if len(small) < len(free) else small[1:]
    for i in lifted:
        shares[i] = min_share
    for i, part in zip(free, parts, strict=True):
        shares[i] = part
    return tuple(shares)


def apportion_within(
    weights: Sequence[float], total: int, most: Sequence[int], min_share: int = 0
) -> tuple[int, ...]:
    """Split a total as `apportion` does, where nobody can take more than so much.

    What is too much for some goes to the others; all together must be able to take the total.

    >>> apportion_within([3, 1], 100, [40, 90])
    (40, 60)
    """
    assert sum(most) >= total, (most, total)
    full: dict[int, int] = {}
    while True:
        open_ = [node for node in range(len(weights)) if node not in full]
        left = total - sum(full.values())
        parts = apportion([weights[node] for node in open_], left, min_share) if open_ else ()
        over = [node for node, part in zip(open_, parts, strict=True) if part > most[node]]
        if not over:
            found = full | dict(zip(open_, parts, strict=True))
            return tuple(found[node] for node in range(len(weights)))
        full |= {node: most[node] for node in over}


def _largest_remainder(weights: Sequence[float], total: int) -> list[int]:
    """Round the exact parts down, then give what is left to those that lost most."""
    whole = sum(weights)
    if whole <= 0:
        weights, whole = [1.0] * len(weights), float(len(weights))
    exact = [total * weight / whole for weight in weights]
    parts = [int(part) for part in exact]
    missing = total - sum(parts)
    by_loss = sorted(range(len(weights)), key=lambda i: (parts[i] - exact[i], i))
    for i in by_loss[:missing]:
        parts[i] += 1
    return parts
