"""What an engine runs: calls with everything settled but the tensors, whose places have numbers."""

from dataclasses import dataclass, field
from typing import Any

from convoy.inner.tasks.plan import Kind


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for a tensor."""

    number: int


@dataclass(eq=False, slots=True)
class Instruction:
    """A call with everything settled but the tensors.

    Attributes:
        part: the number of the plan's part it comes from: what is alike costs alike.
        group: the samples it works on; -1: all, those of several groups, or none.
        reads, writes: places; what it changes in place is in both.
        tile: instructions of one tile make one task: some neurons of a large layer, or a gradient
            for several groups; -1: it is of none.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int | None, ...]
    part: int
    group: int
    kind: Kind
    layer: str
    side: bool = False
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    tile: int = -1


@dataclass(frozen=True, slots=True)
class Sgd:
    """How weights are moved."""

    momentum: float
    nesterov: bool
    weight_decay: float


@dataclass(eq=False, slots=True)
class Program:
    """Instructions, and the places of what goes in and comes out.

    Attributes:
        inputs: places by name: "images", "labels", "keys", "scale", "flow", "rate", each parameter
            as "p:NAME", its gradient as "g:NAME", its momentum as "m:NAME", each buffer as
            "b:NAME".
        loss, logits, error: places of the results; -1: there is none.
        in_sections: the two passes of a part of a network are done one after the other.
    """

    sizes: tuple[int, ...]
    instructions: list[Instruction] = field(default_factory=list)
    inputs: dict[str, int] = field(default_factory=dict)
    loss: int = -1
    logits: int = -1
    error: int = -1
    in_sections: bool = False
    num_slots: int = 0

    @property
    def results(self) -> list[int]:
        """Return the places that somebody looks into afterwards."""
        return [slot for slot in (self.logits, self.error) if slot >= 0]


def slots_in(item: Any) -> list[int]:
    """Return the places named in an argument."""
    if isinstance(item, Slot):
        return [item.number]
    if isinstance(item, (list, tuple)):
        return [number for part in item for number in slots_in(part)]
    return []
