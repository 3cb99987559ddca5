"""Convolutions by our own hands: which of a step's, in which way, and the calls they become.

`winograd` (winograd.cpp) is for filters of 3x3 whose channels fill whole vectors, and so is
`pairs` (pairs.cpp), in bf16 and where the processor has a matrix unit; `direct` (direct.cpp) is
for the others that have few channels, where PyTorch's kernels cost more than the arithmetic. What
suits none of them stays PyTorch's, and so does everything on processors without vectors of sixteen
numbers. A convolution also counts for a batch-norm behind it (norms.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from convoy.inner.tasks.recording import Operation, Recording, Ref

_library = torch.library.Library("convoy", "FRAGMENT")
for _schema in (
    "vector_lanes() -> int",
    "matrix_tiles() -> bool",
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
_NORM = "Tensor? norm_weight, Tensor? norm_bias"
_INPUTS = f"Tensor x, Tensor filters, Tensor? bias, Tensor? total, {_NORM}"
for _way, _more, _size in (("winograd", "", ""), ("pairs", ", int stride", ", int[] size")):
    for _schema in (
        "_filters(Tensor weight, bool error) -> Tensor",
        f"({_INPUTS}{_more}) -> Tensor",
        f"_parts({_INPUTS}{_more}) -> (Tensor, Tensor)",
        f"_error(Tensor dy, Tensor filters{_size}{_more}) -> Tensor",
        f"_back(Tensor dy, Tensor filters, Tensor x, Tensor total, {_NORM}{_more})"
        " -> (Tensor, Tensor)",
        f"_gradient(Tensor dy, Tensor x, Tensor? total, {_NORM}{_more}) -> Tensor",
    ):
        _library.define(f"{_way}{_schema}")

_ops = torch.ops.convoy
_BACKWARD = torch.ops.aten.convolution_backward.default
_POOL_BACKWARD = torch.ops.aten.max_pool2d_with_indices_backward.default
_LARGEST_POOL = 15  # a place in a window is kept as one byte
_TYPES = frozenset({torch.float32, torch.bfloat16})  # of images; computed is fp32
_MOST_PAIRS = 512 * 512  # of channels by `winograd`; its filters are 64 bytes for each
_MOST_WEIGHTS = 32 * 1024  # by `direct`

Way = Literal["winograd", "pairs", "direct", ""]
# Ways that can make what a norm and a rectifier give by themselves, as they read.
READ_THROUGH = frozenset({"winograd", "pairs"})


@dataclass(frozen=True, slots=True)
class Hands:
    """What a processor can do for our own convolutions.

    Attributes:
        lanes: numbers in a vector; 0: there are none that are long enough.
        tiles: it has a matrix unit, whose tiles hold numbers of bf16.
    """

    lanes: int = 0
    tiles: bool = False


def way_of(recording: Recording, convolution: Operation, hands: Hands) -> Way:
    """Return how a recorded convolution, or its way back, is done; "": PyTorch does it.

    Args:
        recording: where it comes from.
        convolution: `convolution(x, weight, ...)` or `convolution_backward(dy, x, weight, ...)`.
        hands: what this processor can do.
    """
    lanes = hands.lanes
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
    if (
        (size, padding) == ([3, 3], [1, 1])
        and inputs % lanes == outputs % lanes == 0
        and inputs * outputs <= _MOST_PAIRS
    ):
        in_bf16 = all(recording.types[value.value] == torch.bfloat16 for value in (x, weight))
        if hands.tiles and in_bf16 and stride in ([1, 1], [2, 2]):
            return "pairs"
        if stride == [1, 1] and all(side % 2 == 0 for side in recording.shapes[x.value][2:]):
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
        hands: what this processor can do.
        new: gives a number to a new value.
    """

    def __init__(self, recording: Recording, hands: Hands, new: Callable[[], int]) -> None:
        self._recording, self._hands, self._new = recording, hands, new
        self.normed: dict[int, Normed] = {}  # values that are not made

    def forward(self, operation: Operation, parts: int | None) -> list[Operation]:
        """Return what makes a convolution's output, and what that adds to a norm if asked for."""
        way = way_of(self._recording, operation, self._hands)
        x, weight, bias, *_ = operation.args
        outs = operation.outs if parts is None else (*operation.outs, parts)
        name = way if parts is None else f"{way}_parts"
        op = getattr(_ops, name).default
        if way in READ_THROUGH:
            filters = self._filters(way, weight, (), error=False)
            x, *norm = self._read(x)
            args = (x, _made(filters), bias, *norm, *_stride(way, operation))
            return [filters, Operation(op, args, {}, outs)]
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
        way = way_of(self._recording, operation, self._hands)
        dy, x, weight, *_ = operation.args
        outs = operation.outs[:1]
        if way in READ_THROUGH:
            filters = self._filters(way, weight, (), error=True)
            op, how = getattr(_ops, f"{way}_back").default, self._read(x)
            if returned is None:
                op = getattr(_ops, f"{way}_error").default
                how = ([*self._recording.shapes[x.value][2:]],) if way == "pairs" else ()
            args: tuple[Any, ...] = (dy, _made(filters), *how, *_stride(way, operation))
            return [filters, Operation(op, args, {}, returned or outs)]
        _, inputs, *size = self._recording.shapes[x.value]
        plain = operation.args[4] == [1, 1]  # with a stride, neighbours' filters differ
        window = self._window(operation, x.value if plain else None)
        filters = self._filters(way, weight, (window,), error=True)
        args = (dy, _made(filters), inputs, size, window)
        return [filters, Operation(_ops.direct_error.default, args, {}, outs)]

    def _read(self, x: Ref) -> tuple[Any, ...]:
        """Return an input, and the norm that makes it of that, or none."""
        normed = self.normed.get(x.value)
        return (x, None, None, None) if normed is None else (normed.x, *normed.norm)

    def gradients(self, operation: Operation) -> list[Operation]:
        """Return what makes the gradients of a convolution's filters and bias."""
        dy, x, *_ = operation.args
        _, dw, db = operation.outs
        found = []
        if dw is not None:
            way = way_of(self._recording, operation, self._hands)
            how = (*self._read(x), *_stride(way, operation))
            if way == "direct":
                how = (x, self._window(operation, dy.value))
            op = getattr(_ops, f"{way}_gradient").default
            found.append(Operation(op, (dy, *how), {}, (dw,)))
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
            together = neighbours(channels, across, self._hands.lanes)
        return [*self._recording.shapes[weight.value][2:], *stride, *padding, together]


def _made(filters: Operation) -> Ref:
    (value,) = filters.outs
    assert value is not None
    return Ref(value)


def _stride(way: Way, convolution: Operation) -> tuple[int, ...]:
    """Return the stride for a way that knows more than one."""
    return (_arguments(convolution)[3][0],) if way == "pairs" else ()


def _arguments(convolution: Operation) -> tuple[Any, ...]:
    """Return input, weights, bias, stride, padding, dilation, transposed, and so on."""
    return convolution.args[1:10] if convolution.op is _BACKWARD else convolution.args
