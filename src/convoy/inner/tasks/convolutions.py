"""Convolutions by our own hands: which of a step's, in which way, and the calls they become.

`winograd` (winograd.cpp) is for filters of 3x3 whose channels fill whole vectors; `direct`
(direct.cpp) for the others that have few channels, where PyTorch's kernels cost more than the
arithmetic. What suits neither stays PyTorch's, and so does everything on processors without
vectors of sixteen numbers. A convolution also counts for a batch-norm behind it (norms.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from convoy.inner.tasks.capture import Operation, Recording, Ref

_library = torch.library.Library("convoy", "FRAGMENT")
for _schema in (
    "vector_lanes() -> int",
    "winograd_filters(Tensor weight, bool error) -> Tensor",
    "winograd(Tensor x, Tensor filters, Tensor? bias, Tensor? total, Tensor? norm_weight, "
    "Tensor? norm_bias) -> Tensor",
    "winograd_parts(Tensor x, Tensor filters, Tensor? bias, Tensor? total, Tensor? norm_weight, "
    "Tensor? norm_bias) -> (Tensor, Tensor)",
    "winograd_back(Tensor dy, Tensor filters, Tensor x, Tensor total, Tensor? norm_weight, "
    "Tensor? norm_bias) -> (Tensor, Tensor)",
    "winograd_gradient(Tensor dy, Tensor x, Tensor? total, Tensor? norm_weight, "
    "Tensor? norm_bias) -> Tensor",
    "direct_filters(Tensor weight, int[] window, bool error) -> Tensor",
    "direct(Tensor x, Tensor filters, Tensor? bias, int outputs, int[] window) -> Tensor",
    "direct_parts(Tensor x, Tensor filters, Tensor? bias, int outputs, int[] window) "
    "-> (Tensor, Tensor)",
    "direct_error(Tensor dy, Tensor filters, int inputs, int[] size, int[] window) -> Tensor",
    "direct_gradient(Tensor dy, Tensor x, int[] window) -> Tensor",
    "bias_gradient(Tensor dy) -> Tensor",
    "max_pool(Tensor x, int[] size) -> (Tensor, Tensor)",
    "max_pool_back(Tensor dy, Tensor places, Tensor x, int[] size) -> Tensor",
):
    _library.define(_schema)

_ops = torch.ops.convoy
_BACKWARD = torch.ops.aten.convolution_backward.default
_POOL_BACKWARD = torch.ops.aten.max_pool2d_with_indices_backward.default
_LARGEST_POOL = 15  # a place in a window is kept as one byte
_TYPES = frozenset({torch.float32, torch.bfloat16})  # of images; computed is fp32
_MOST_PAIRS = 512 * 512  # of channels by `winograd`; its filters are 64 bytes for each
_MOST_WEIGHTS = 32 * 1024  # by `direct`

Way = Literal["winograd", "direct", ""]


def way_of(recording: Recording, convolution: Operation, lanes: int) -> Way:
    """Return how a recorded convolution, or its way back, is done; "": PyTorch does it.

    Args:
        recording: where it comes from.
        convolution: `convolution(x, weight, ...)` or `convolution_backward(dy, x, weight, ...)`.
        lanes: numbers in a vector of this processor's; 0: it has none that are long enough.
    """
    x, weight, _, stride, padding, dilation, transposed, _, groups = _arguments(convolution)
    shape = recording.shapes[weight.value]
    ours = (
        lanes > 0
        and len(shape) == 4
        and (dilation, transposed, groups) == ([1, 1], False, 1)
        and recording.batched.get(x.value) == 0
        and weight.value not in recording.batched
        and all(recording.types[value.value] in _TYPES for value in (x, weight))
    )
    if not ours:
        return ""
    outputs, inputs, *size = shape
    sides = recording.shapes[x.value][2:]
    if (
        (size, stride, padding) == ([3, 3], [1, 1], [1, 1])
        and inputs % lanes == outputs % lanes == 0
        and inputs * outputs <= _MOST_PAIRS
        and all(side % 2 == 0 for side in sides)
    ):
        return "winograd"
    return "direct" if torch.Size(shape).numel() <= _MOST_WEIGHTS else ""


def neighbours(channels: int, count: int, lanes: int) -> int:
    """Return how many neighbouring results of few channels make one vector.

    >>> neighbours(6, 28, 16), neighbours(3, 32, 16), neighbours(6, 5, 16), neighbours(16, 8, 16)
    (2, 4, 1, 1)
    """
    return next((n for n in (4, 2) if channels * n <= lanes and count % n == 0), 1)


def pools_suit(recording: Recording, pool: Operation, users: list[Operation], lanes: int) -> bool:
    """Tell whether a recorded max-pool is ours: windows that lie side by side, nothing else.

    Args:
        recording: where it comes from.
        pool: `max_pool2d_with_indices(x, size, ...)`.
        users: of its indices.
        lanes: numbers in a vector of this processor's, or 0.
    """
    x, size, *how = pool.args
    plain = how in ([], [size], [size, [0, 0]], [size, [0, 0], [1, 1]])
    return (
        lanes > 0
        and plain
        and len(size) == 2
        and max(size) <= _LARGEST_POOL
        and recording.batched.get(x.value) == 0
        and recording.types[x.value] in _TYPES
        and all(user.op is _POOL_BACKWARD for user in users)
    )


@dataclass(frozen=True, slots=True)
class Normed:
    """What a norm and a rectifier would make of a value, where only convolutions ask for it.

    They make it themselves, each time they read a number, so that it need not be kept.
    """

    x: Ref
    total: Ref
    weight: Ref | None
    bias: Ref | None

    @property
    def norm(self) -> tuple[Ref | None, ...]:
        """Return what the norm is made of."""
        return self.total, self.weight, self.bias


class Convolutions:
    """Writes the calls that take a convolution's place.

    Args:
        recording: where they come from.
        lanes: numbers in a vector of this processor's, or 0.
        new: gives a number to a new value.
    """

    def __init__(self, recording: Recording, lanes: int, new: Callable[[], int]) -> None:
        self._recording, self._lanes, self._new = recording, lanes, new
        self.normed: dict[int, Normed] = {}  # values that are not made

    def forward(self, operation: Operation, parts: int | None) -> list[Operation]:
        """Return what makes a convolution's output, and what that adds to a norm if asked for."""
        way = way_of(self._recording, operation, self._lanes)
        x, weight, bias, *_ = operation.args
        outs = operation.outs if parts is None else (*operation.outs, parts)
        name = way if parts is None else f"{way}_parts"
        op = getattr(_ops, name).default
        if way == "winograd":
            filters = self._filters(way, weight, (), error=False)
            x, *norm = self._read(x)
            return [filters, Operation(op, (x, _made(filters), bias, *norm), {}, outs)]
        # What counts for a norm counts channels, not those of neighbours.
        window = self._window(operation, operation.outs[0] if parts is None else None)
        filters = self._filters(way, weight, (window,), error=False)
        outputs = self._recording.shapes[weight.value][0]
        return [filters, Operation(op, (x, _made(filters), bias, outputs, window), {}, outs)]

    def error(
        self, operation: Operation, returned: tuple[int, int] | None = None
    ) -> list[Operation]:
        """Return what makes the error that a convolution hands back.

        Args:
            operation: the convolution's way back.
            returned: of an input that is not made: what flows back to the norm instead of the
                error, and what that adds to the norm's sums.
        """
        way = way_of(self._recording, operation, self._lanes)
        dy, x, weight, *_ = operation.args
        outs = operation.outs[:1]
        if way == "winograd":
            filters = self._filters(way, weight, (), error=True)
            args: tuple[Any, ...] = (dy, _made(filters), None, None, None, None)
            if returned is None:
                return [filters, Operation(_ops.winograd.default, args, {}, outs)]
            args = (dy, _made(filters), *self._read(x))
            return [filters, Operation(_ops.winograd_back.default, args, {}, returned)]
        _, inputs, *size = self._recording.shapes[x.value]
        plain = operation.args[4] == [1, 1]  # with a stride, neighbours' filters differ
        window = self._window(operation, x.value if plain else None)
        filters = self._filters(way, weight, (window,), error=True)
        args = (dy, _made(filters), inputs, size, window)
        return [filters, Operation(_ops.direct_error.default, args, {}, outs)]

    def _read(self, x: Ref) -> tuple[Ref | None, ...]:
        """Return an input, and the norm that makes it of that, or none."""
        normed = self.normed.get(x.value)
        return (x, None, None, None) if normed is None else (normed.x, *normed.norm)

    def gradients(self, operation: Operation) -> list[Operation]:
        """Return what makes the gradients of a convolution's filters and bias."""
        dy, x, *_ = operation.args
        _, dw, db = operation.outs
        found = []
        if dw is not None:
            op, args = _ops.winograd_gradient.default, (dy, *self._read(x))
            if way_of(self._recording, operation, self._lanes) == "direct":
                op, args = _ops.direct_gradient.default, (dy, x, self._window(operation, dy.value))
            found.append(Operation(op, args, {}, (dw,)))
        if db is not None:
            found.append(Operation(_ops.bias_gradient.default, (dy,), {}, (db,)))
        return found

    def _filters(self, way: Way, weight: Ref, more: tuple[Any, ...], *, error: bool) -> Operation:
        """Have filters brought into the order in which products read them."""
        op = getattr(_ops, f"{way}_filters").default
        return Operation(op, (weight, *more, error), {}, (self._new(),))

    def _window(self, operation: Operation, made: int | None) -> list[int]:
        """Return size, stride and padding, and how many results of a value are made as one."""
        _, weight, _, stride, padding, *_ = _arguments(operation)
        together = 1
        if made is not None:
            _, channels, _, across = self._recording.shapes[made]
            together = neighbours(channels, across, self._lanes)
        return [*self._recording.shapes[weight.value][2:], *stride, *padding, together]


def _made(filters: Operation) -> Ref:
    (value,) = filters.outs
    assert value is not None
    return Ref(value)


def _arguments(convolution: Operation) -> tuple[Any, ...]:
    """Return input, weights, bias, stride, padding, dilation, transposed, and so on."""
    return convolution.args[1:10] if convolution.op is _BACKWARD else convolution.args
