"""Work that no other stage waits for: what a convolution's weights get of a batch.

A backward pass has two products for each convolution, the gradient of its input and that of its
weights. The stage before waits for the first ones only. So they are computed alone, as one chain
through the stage, and what it leads to is sent; the others come after it, while it travels:

    here        dx3 -> dx2 -> dx1 -> send     dw3  dw2  dw1     update
    otherwise   dx3  dw3 -> dx2  dw2 -> dx1  dw1 -> send        update

The numbers are the same, bit for bit: PyTorch too has a kernel for each of the two. But gradients
that wait leave the processor's cache: a step takes some 4 % longer (ResNet-56, M2). So it is done
where stages wait for each other (schedule.py: should_postpone).
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Sizes = int | Sequence[int]
Pair = tuple[int, int]
Settings = tuple[Pair, Pair, Pair, int]  # stride, padding, dilation, groups


class Postponed:
    """The products of a backward pass that are still to be computed."""

    def __init__(self) -> None:
        self.collects = False
        self._due: deque[Callable[[], None]] = deque()

    def watch(self) -> TorchFunctionMode:
        """Return a context whose convolutions can leave their weights' gradients for later."""
        return _Watch(self)

    def backward(self, y: Tensor, gradient: Tensor) -> None:
        """Go back through what was watched; what its convolutions' weights get is left."""
        self.collects = True
        try:
            y.backward(gradient)
        finally:
            self.collects = False

    def add(self, product: Callable[[], None]) -> None:
        """Take a product that can wait."""
        self._due.append(product)

    def __len__(self) -> int:
        return len(self._due)

    def compute(self) -> None:
        """Compute all that was left, and add it to the weights' gradients."""
        while self._due:
            self._due.popleft()()  # which lets go of a layer's activations


class _Watch(TorchFunctionMode):
    """Sees every function of torch that is called meanwhile."""

    def __init__(self, postponed: Postponed) -> None:
        super().__init__()
        self._postponed = postponed

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever is called returns
        given = kwargs or {}
        if func is functional.conv2d:
            y = _convolve(self._postponed, *args, **given)
            if y is not None:
                return y
        return func(*args, **given)


def _convolve(
    postponed: Postponed,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: str | Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Tensor | None:
    """Do what conv2d does; None: not here, its weights' gradient cannot wait."""
    if isinstance(padding, str) or input.ndim != 4 or not torch.is_grad_enabled():
        return None
    if not all(map(_can_wait, [weight] if bias is None else [weight, bias])):
        return None
    if torch.is_autocast_enabled(input.device.type):
        return None  # its rounded copies of the weights pass their gradients on
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None  # they want to see operations, not ours
    settings = (_pair(stride), _pair(padding), _pair(dilation), groups)
    y: Tensor = _Convolution.apply(  # type: ignore[no-untyped-call]
        input, weight, bias, settings, postponed
    )
    return y


def _can_wait(weight: Tensor) -> bool:
    """Tell whether nobody asks for a weight's gradient but its update."""
    if not weight.is_leaf or not weight.requires_grad:
        return False  # one that is made of others passes its gradient on to them
    hooks = (weight._backward_hooks, getattr(weight, "_post_accumulate_grad_hooks", None))
    return not any(hooks)  # of the user's, who would be told of nothing


class _Convolution(torch.autograd.Function):
    """A convolution whose backward pass, if it is the stage's, is that of its input only.

    A network can ask for gradients itself in its forward pass, and again for theirs (a penalty on
    them, say): it gets all of them at once, by operations that autograd sees.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - it takes any attribute
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        settings: Settings,
        postponed: Postponed,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.leaves = (weight, bias)  # what is saved may come back as a copy
        ctx.settings, ctx.postponed = settings, postponed
        stride, padding, dilation, groups = settings
        return functional.conv2d(x, weight, bias, stride, padding, dilation, groups)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        x, weight = ctx.saved_tensors
        leaf, bias = ctx.leaves
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        if ctx.postponed.collects:
            ctx.postponed.add(partial(_add_gradients, dy, x, leaf, bias, ctx.settings))
            of_weight = of_bias = False
        wanted = (of_x, of_weight, of_bias)
        return *_differentiate(dy, x, weight, bias, ctx.settings, wanted), None, None


def _add_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings
) -> None:
    wanted = (False, True, bias is not None)
    _, dw, db = _differentiate(dy, x, weight, bias, settings, wanted)
    # By autograd, which brings them into the layout of the weights.
    if bias is None:
        torch.autograd.backward([weight], [dw])
    else:
        torch.autograd.backward([weight, bias], [dw, db])


def _differentiate(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    settings: Settings,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of input, weight and bias that are wanted."""
    if not any(wanted):
        return None, None, None
    stride, padding, dilation, groups = settings
    sizes = None if bias is None else [len(bias)]
    found: tuple[Tensor | None, Tensor | None, Tensor | None]
    found = torch.ops.aten.convolution_backward(
        dy, x, weight, sizes, stride, padding, dilation, False, (0, 0), groups, wanted
    )
    return found


def _pair(value: Sizes) -> Pair:
    """Return what is meant for height and width.

    >>> _pair(2), _pair([1, 3]), _pair((1,))
    ((2, 2), (1, 3), (1, 1))
    """
    sizes = [value] if isinstance(value, int) else list(value)
    return sizes[0], sizes[-1]
