"""Gradients of many weights are found for several groups at once.

What each group adds to a gradient is as large as the weights, however few samples it has. Where
that is more than what the gradient is made of, groups' samples are put behind each other first:

    each group by itself     x1, dy1 -> dw1     x2, dy2 -> dw2     dw1 + dw2 -> dw
    two groups at once       x1, x2 -> x        dy1, dy2 -> dy     x, dy -> dw

Few large tasks balance worse than many small ones, so the ratio's root says how many go together.
"""

import math
from collections.abc import Sequence

from convoy.inner.tasks.plan import Part, Plan, even_ranges
from convoy.inner.tasks.recording import refs_in

_MANY = 1 << 17  # weights: fewer stay in a cache


def bundles_of(plan: Plan, part: Part, sizes: Sequence[int]) -> list[range]:
    """Return the groups for which a part is done at once.

    Args:
        plan: the step.
        part: of the step, done for each group.
        sizes: samples of each group.
    """
    count = len(sizes)
    if not part.side:
        return even_ranges(count, count)
    weights = max(_numbers(plan, out) for out in part.operation.outs if out is not None)
    if weights < _MANY or not _can_be_put_together(plan, part):
        return even_ranges(count, count)
    read = sum(_numbers(plan, value) for value in _samples_in(plan, part)) / 2  # recorded with two
    most = together(weights, round(read * max(sizes)), count)
    return even_ranges(count, -(-count // most))


def together(weights: int, read: int, count: int) -> int:
    """Return how many of some groups go together.

    Args:
        weights: numbers that a group adds to the gradient.
        read: numbers of a group that it is made of.
        count: of groups.

    >>> together(512 * 512 * 9, 8 * 2 * 512 * 4, 16), together(512 * 512 * 9, 8 * 2 * 512 * 16, 16)
    (8, 4)
    >>> together(64 * 64 * 9, 8 * 2 * 64 * 64, 16), together(10**6, 1, 2)
    (1, 2)
    """
    return max(1, min(count, round(math.sqrt(weights / max(read, 1)))))


def _can_be_put_together(plan: Plan, part: Part) -> bool:
    """Tell whether a part makes a sum, of what has its samples in a known place."""
    known = all(
        plan.kinds[value] == "shared" or value in plan.recording.batched
        for value in refs_in(part.operation)
    )
    return known and _stays_alone(plan, part)


def _stays_alone(plan: Plan, part: Part) -> bool:
    """Tell whether a sum is never added to another one, whose groups may go together otherwise."""
    sums = {out for out in part.operation.outs if out is not None}
    if any(plan.kinds[value] != "partial" for value in sums):
        return False
    for other in plan.parts:
        read = refs_in(other.operation)
        if not sums.isdisjoint(read):
            if len(read) > 1:
                return False
            sums.update(out for out in other.operation.outs if out is not None)
    return True


def _samples_in(plan: Plan, part: Part) -> list[int]:
    return [v for v in refs_in(part.operation) if plan.kinds[v] == "batched"]


def _numbers(plan: Plan, value: int) -> int:
    return math.prod(plan.recording.shapes[value])
