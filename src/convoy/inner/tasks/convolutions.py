"""Convolutions by our own hands: which of a step's, in which way, and the calls they become.

`winograd` (winograd.cpp) is for filters of 3x3 whose channels fill whole vectors; `direct`
(direct.cpp) for the others that have few channels, where PyTorch's kernels cost more than the
arithmetic. What suits neither stays PyTorch's, and so does everything on processors without
vectors of sixteen numbers. A convolution also counts for a batch-norm behind it (norms.py).
"""

from collections.abc import Callable
from typing import Any, Literal

import torch

from convoy.inner.tasks.capture import Operation, Recording, Ref

_library = torch.library.Library("convoy", "FRAGMENT")
for _schema in (
    "vector_lanes() -> int",
    "winograd_filters(Tensor weight, bool error) -> Tensor",
    "winograd(Tensor x, Tensor filters, Tensor? bias) -> Tensor",
    "winograd_parts(Tensor x, Tensor filters, Tensor? bias) -> (Tensor, Tensor)",
    "winograd_gradient(Tensor dy, Tensor x) -> Tensor",
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
_MOST_PAIRS = 256 * 256  # of channels by `winograd`: filters of more do not fit a core's cache
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
    # PyTorch's bf16 is faster where channels fill vectors.
    rounded = recording.types[x.value] == torch.bfloat16
    few = torch.Size(shape).numel() <= _MOST_WEIGHTS and not (rounded and inputs >= lanes)
    return "direct" if few and all(sides) else ""


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


class Convolutions:
    """Writes the calls that take a convolution's place.

    Args:
        recording: where they come from.
        lanes: numbers in a vector of this processor's, or 0.
        new: gives a number to a new value.
    """

    def __init__(self, recording: Recording, lanes: int, new: Callable[[], int]) -> None:
        self._recording, self._lanes, self._new = recording, lanes, new

    def forward(self, operation: Operation, parts: int | None) -> list[Operation]:
        """Return what makes a convolution's output, and what that adds to a norm if asked for."""
        way = way_of(self._recording, operation, self._lanes)
        x, weight, bias, *_ = operation.args
        outs = operation.outs if parts is None else (*operation.outs, parts)
        more: tuple[Any, ...] = ()
        if way == "direct":
            # What counts for a norm counts channels, not those of neighbours.
            many = operation.outs[0] if parts is None else None
            more = (self._window(operation, many),)
        filters = self._filters(way, weight, more, error=False)
        outputs = self._recording.shapes[weight.value][0]
        args = (x, Ref(filters.outs[0] or 0), bias, *((outputs, *more) if more else ()))
        name = way if parts is None else f"{way}_parts"
        return [filters, Operation(getattr(_ops, name).default, args, {}, outs)]

    def error(self, operation: Operation) -> list[Operation]:
        """Return what makes the error that a convolution hands back."""
        way = way_of(self._recording, operation, self._lanes)
        dy, x, weight, *_ = operation.args
        _, inputs, *size = self._recording.shapes[x.value]
        if way == "winograd":
            filters = self._filters(way, weight, (), error=True)
            args: tuple[Any, ...] = (dy, Ref(filters.outs[0] or 0), None)
            return [filters, Operation(_ops.winograd.default, args, {}, operation.outs[:1])]
        plain = operation.args[4] == [1, 1]  # with a stride, neighbours' filters differ
        window = self._window(operation, x.value if plain else None)
        filters = self._filters(way, weight, (window,), error=True)
        args = (dy, Ref(filters.outs[0] or 0), inputs, size, window)
        return [filters, Operation(_ops.direct_error.default, args, {}, operation.outs[:1])]

    def gradients(self, operation: Operation) -> list[Operation]:
        """Return what makes the gradients of a convolution's filters and bias."""
        dy, x, *_ = operation.args
        _, dw, db = operation.outs
        found = []
        if dw is not None:
            op, args = _ops.winograd_gradient.default, (dy, x)
            if way_of(self._recording, operation, self._lanes) == "direct":
                op, args = _ops.direct_gradient.default, (dy, x, self._window(operation, dy.value))
            found.append(Operation(op, args, {}, (dw,)))
        if db is not None:
            found.append(Operation(_ops.bias_gradient.default, (dy,), {}, (db,)))
        return found

    def _filters(
        self, way: Way, weight: Ref, more: tuple[Any, ...], *, error: bool
    ) -> Operation:
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


def _arguments(convolution: Operation) -> tuple[Any, ...]:
    """Return input, weights, bias, stride, padding, dilation, transposed, and so on."""
    return convolution.args[1:10] if convolution.op is _BACKWARD else convolution.args
