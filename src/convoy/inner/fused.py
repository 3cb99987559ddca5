"""The executor `fused`: torch.compile fuses a network's operations, one CUDA graph launches them.

The compiler alone leaves the launches of the update and of its own guards; the recording alone
leaves batch-norm, activation and sum as kernels of their own, each of which reads and writes the
whole feature map. Together they have neither.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn, optim

from convoy.data.batches import Batch
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.compiling import compile_for_one_size
from convoy.inner.eager import EagerExecutor
from convoy.inner.graph import GraphExecutor
from convoy.models.dropout import SampleDropout

_REASON_LENGTH = 160


class FusedExecutor(GraphExecutor):
    """Records steps whose forward and backward pass were compiled."""

    name = "fused"

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        arithmetic: Arithmetic,
        *,
        label_smoothing: float = 0.0,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        # Without a GPU nothing is recorded, and so nothing is worth compiling.
        make = FusedForward if arithmetic.device.type == "cuda" else EagerExecutor
        eager = make(model, optimizer, arithmetic, label_smoothing=label_smoothing, tell=tell)
        super().__init__(model, optimizer, arithmetic, tell=tell, eager=eager)


class FusedForward(EagerExecutor):
    """Computes as `eager` does, but compiled for the size of the first batch it sees.

    Other sizes are a short last batch, or a share that changes: compiling for each of them would
    take longer than it saves.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        arithmetic: Arithmetic,
        *,
        label_smoothing: float = 0.0,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(model, optimizer, arithmetic, label_smoothing=label_smoothing)
        self._tell = tell
        self._shape: torch.Size | None = None
        self._compiled: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
        self._is_refused = False
        if any(isinstance(module, SampleDropout) and module.p for module in model.modules()):
            self._refuse("its dropout draws a mask for each sample, which is not compiled")

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of a batch's losses, ready to be differentiated, and the logits."""
        if self._shape is None and not self._is_refused:
            self._compile(batch)
        if self._compiled is None or batch.images_NCHW.shape != self._shape:
            return super().forward(batch)
        return self._compiled(batch.images_NCHW, batch.labels)

    def _compile(self, batch: Batch) -> None:
        """Compile both passes by running them once; the network is left as it was."""
        self._shape = batch.images_NCHW.shape
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        try:
            compiled = compile_for_one_size(self.compute)
            loss, _ = compiled(batch.images_NCHW, batch.labels)
            torch.autograd.grad(loss, parameters, allow_unused=True)
        except Exception as error:  # a compiler may fail in any way
            lines = str(error).strip().splitlines() or [type(error).__name__]
            self._refuse(f"torch.compile failed: {lines[0].rstrip('.')[:_REASON_LENGTH]}")
        else:
            self._compiled = compiled
        finally:
            for buffer, former in buffers:
                buffer.copy_(former)

    def _refuse(self, why: str) -> None:
        self._is_refused = True
        if self._tell is not None:
            self._tell(f"the executor 'fused' computes as 'graph' does: {why}")
