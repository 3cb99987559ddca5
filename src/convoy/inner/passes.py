"""The contract of what computes a part of a network: a batch goes forward, and later back.

y, passage = passes.forward(x, keys, weights)    several batches may be on their way
dx = passes.backward(passage, dy)                which the part before it waits for
passes.gradients(passage)                        what the weights get, in the .grad of each
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class Passes(Protocol):
    """Computes some blocks of a network, of several batches at a time."""

    def forward(
        self, x: Tensor, keys: Tensor | None, weights: Sequence[Tensor] | None
    ) -> tuple[Tensor, Any]:
        """Return what the blocks make of a batch, and what its way back needs.

        Args:
            x: what goes in.
            keys: of the samples, where some are dropped by them.
            weights: to be read on both ways, one for each that is trained; None: those that the
                blocks have at the moment of each.
        """
        ...

    def backward(self, passage: Any, gradient: Tensor) -> Tensor | None:  # noqa: ANN401
        """Return the gradient of a batch's input, if it is wanted."""
        ...

    def gradients(self, passage: Any) -> None:  # noqa: ANN401
        """Leave the gradient of each weight in its .grad."""
        ...
