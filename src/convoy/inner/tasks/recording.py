"""What was recorded of a network: operations, the values between them, what goes in and out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Ref:
    """The value that an operation takes or gives, by its number."""

    value: int


@dataclass(frozen=True, slots=True)
class Size:
    """A number among the arguments that grows with the samples: base + slope * samples."""

    base: int
    slope: int

    def at(self, samples: int) -> int:
        """Return the number for so many samples."""
        return self.base + self.slope * samples


@dataclass(eq=False, slots=True)
class Operation:
    """One call of an ATen operator.

    Attributes:
        args, kwargs: constants, `Ref`s and `Size`s, also in lists.
        outs: the values it gives; None where nobody asks for one.
        layer: the part of the network it belongs to, for people.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int | None, ...]
    layer: str = ""


@dataclass(eq=False, slots=True)
class Recording:
    """A step: operations in an order that works, and what goes in and comes out.

    Of a whole network, or of a part of one: that has no labels and no loss, but is given what
    flows back to it, and gives what flows back from it. What a recording has not is -1.

    Attributes:
        operations: forward, loss and backward.
        parameters, buffers: the value of each, by its name.
        images, keys: what else goes in; `keys` may be unused.
        labels, scale: likewise, of a whole network.
        flow: likewise, of a part: the gradient of what it says.
        gradients: the value of each parameter's gradient, by the parameter's name.
        new_buffers: what becomes of each buffer.
        logits: what the network, or the part, said.
        loss: the sum of losses, of a whole network.
        error: the gradient of a part's input, where somebody waits for it.
        batched: for each value that holds samples, the dimension that counts them.
        shapes, types: of each value, for two samples.
        scattered: parameters whose rows do not lie in memory one after the other.
    """

    operations: list[Operation] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    images: int = -1
    labels: int = -1
    keys: int = -1
    scale: int = -1
    flow: int = -1
    gradients: dict[str, int] = field(default_factory=dict)
    new_buffers: dict[str, int] = field(default_factory=dict)
    loss: int = -1
    logits: int = -1
    error: int = -1
    batched: dict[int, int] = field(default_factory=dict)
    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    types: dict[int, torch.dtype] = field(default_factory=dict)
    scattered: set[str] = field(default_factory=set)
    num_values: int = 0

    @property
    def pulls(self) -> set[int]:
        """Return the values that a backward pass begins with."""
        return {self.scale, self.flow} - {-1}

    @property
    def asked(self) -> set[int]:
        """Return the values that somebody asks for afterwards, beside those of buffers."""
        return {self.loss, self.logits, self.error, *self.gradients.values()} - {-1}


def map_refs(item: Any, function: Callable[[Any], Any]) -> Any:
    """Return an argument with its `Ref`s and `Size`s replaced."""
    if isinstance(item, (Ref, Size)):
        return function(item)
    if isinstance(item, (list, tuple)):
        return type(item)(map_refs(part, function) for part in item)
    return item


def refs_in(operation: Operation) -> list[int]:
    """Return the values that an operation reads."""
    found: list[int] = []

    def note(item: object) -> object:
        if isinstance(item, Ref):
            found.append(item.value)
        return item

    map_refs(operation.args, note)
    map_refs(tuple(operation.kwargs.values()), note)
    return found
