"""A step sorted into what each group of samples does and what is done once."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from convoy.inner.tasks.recording import Operation, Recording

Kind = Literal["forward", "error", "gradient", "combine", "update"]


@dataclass(eq=False, slots=True)
class Part:
    """An operation, and how it is done.

    Attributes:
        per_group: once for each group of samples, or for several at once; otherwise once.
        kind: what it is for.
        side: it leads to gradients of weights only, so that nothing else waits for it.
        layer: whose weights it works with, for people.
        wide: the whole batch at once, but only some neurons at a time: for a layer with so many
            weights that each group had better not read all of them ("forward", "error" or
            "gradient").
    """

    operation: Operation
    per_group: bool
    kind: Kind = "forward"
    side: bool = False
    layer: str = ""
    wide: Literal["", "forward", "error", "gradient"] = ""


@dataclass(eq=False, slots=True)
class Plan:
    """A step, ready to be written out for groups of any size.

    Attributes:
        parts: in an order that works.
        kinds: of each value: "shared", "batched" or "partial".
        recording: where it comes from.
        updated: buffers that a part changes in place; the others are copied at the end.
        rows: of each weight whose gradient is made some rows at a time, the value that it is
            made of: a product, which may be rounded afterwards.
    """

    parts: list[Part]
    kinds: dict[int, str]
    recording: Recording
    updated: set[str] = field(default_factory=set)
    rows: dict[str, int] = field(default_factory=dict)


def even_ranges(length: int, count: int) -> list[range]:
    """Cut a length into so many ranges, as alike as can be; none is empty.

    >>> even_ranges(10, 3), even_ranges(2, 5)
    ([range(0, 3), range(3, 6), range(6, 10)], [range(0, 1), range(1, 2)])
    """
    count = min(length, count)
    marks = [length * number // count for number in range(count + 1)]
    return [range(first, last) for first, last in pairwise(marks)]
