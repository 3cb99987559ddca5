"""Convolutions with filters of 3x3 by Winograd's short products: which of them, and their names.

The products are in winograd.cpp. A convolution takes part if its channels fill whole vectors and
its tiles of 2x2 results fill whole images; the others stay PyTorch's.
"""

import torch

from convoy.inner.tasks.capture import Operation, Recording, Ref

_library = torch.library.Library("convoy", "FRAGMENT")
for _schema in (
    "winograd_lanes() -> int",
    "winograd_filters(Tensor weight, bool error) -> Tensor",
    "winograd(Tensor x, Tensor filters, Tensor? bias) -> Tensor",
    "winograd_parts(Tensor x, Tensor filters, Tensor? bias) -> (Tensor, Tensor)",
    "winograd_gradient(Tensor dy, Tensor x) -> Tensor",
):
    _library.define(_schema)

_MOST_PAIRS = 256 * 256  # of channels: filters of more no longer fit a core's cache


def suits(recording: Recording, convolution: Operation, lanes: int) -> bool:
    """Tell whether a recorded convolution, or its way back, can be done by short products.

    Args:
        recording: where it comes from.
        convolution: `convolution(x, weight, ...)` or `convolution_backward(dy, x, weight, ...)`.
        lanes: numbers in a vector of this processor's; 0: it has none that are long enough.
    """
    backward = convolution.op is torch.ops.aten.convolution_backward.default
    x, weight, _, *how = convolution.args[1:] if backward else convolution.args
    if not lanes or how[:6] != [[1, 1], [1, 1], [1, 1], False, [0, 0], 1]:
        return False
    outputs, inputs, *size = recording.shapes[weight.value]
    return (
        recording.batched.get(x.value) == 0
        and weight.value not in recording.batched
        and all(_is_fp32(recording, value) for value in (x, weight))
        and size == [3, 3]
        and inputs % lanes == outputs % lanes == 0
        and inputs * outputs <= _MOST_PAIRS
        and all(side % 2 == 0 for side in recording.shapes[x.value][2:])
    )


def _is_fp32(recording: Recording, value: Ref) -> bool:
    return recording.types[value.value] == torch.float32
