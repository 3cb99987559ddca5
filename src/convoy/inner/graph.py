"""The executor `graph`: a training step on a GPU as one CUDA graph, launched at once.

A small network's step is hundreds of short operations, and launching each takes a processor
longer than computing it takes the GPU. Recorded, all of them are one launch.
"""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torch import nn, optim
from torch.nn.modules.batchnorm import _BatchNorm

from convoy.data.batches import Batch
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.eager import EagerExecutor
from convoy.inner.executor import Sums
from convoy.inner.fixed import FixedStep
from convoy.inner.recorder import CudaRecorder, Recorder, RecordingError

T = TypeVar("T")


class GraphExecutor:
    """Replays recorded steps; what cannot be recorded is computed operation by operation.

    Args:
        model: it must already be on its device.
        optimizer: whose update is recorded too.
        arithmetic: how to compute.
        label_smoothing: of the training loss.
        tell: is told, once, why steps are not recorded.
        make_recorder: makes a recorder; CUDA graphs unless given.
        eager: does what is recorded, and what is not; the plain executor unless given.
    """

    name = "graph"

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        arithmetic: Arithmetic,
        *,
        label_smoothing: float = 0.0,
        tell: Callable[[str], None] | None = None,
        make_recorder: Callable[[], Recorder] | None = None,
        eager: EagerExecutor | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.arithmetic = arithmetic
        self._eager = eager or EagerExecutor(
            model, optimizer, arithmetic, label_smoothing=label_smoothing
        )
        self._tell = tell
        self._make_recorder = make_recorder or partial(CudaRecorder, arithmetic.device)
        self._fixed: FixedStep | None = None
        self._records = True
        why = reason_against(model)
        if make_recorder is None and arithmetic.device.type != "cuda":
            why = "it needs a GPU"
        if why is not None:
            self._give_up(why)

    def gradients(self, batch: Batch, divisor: float) -> Sums:
        """Leave the gradient of (sum of losses / divisor) in each parameter's .grad."""
        return self._do(lambda way: way.gradients(batch, divisor))

    def update(self, learning_rate: float) -> None:
        """Apply the gradients to the weights."""
        self._do(lambda way: way.update(learning_rate))

    def step(self, batch: Batch, divisor: float, learning_rate: float) -> Sums:
        """Do both halves, as one launch."""
        return self._do(lambda way: way.step(batch, divisor, learning_rate))

    def evaluate(self, batch: Batch, *, mirrored: bool = False) -> Sums:
        """Run a batch through without learning from it."""
        return self._eager.evaluate(batch, mirrored=mirrored)

    def _do(self, work: Callable[[FixedStep | EagerExecutor], T]) -> T:
        """Do something on fixed tensors if that is possible, otherwise as ever."""
        if self._records:
            if self._fixed is None or self._fixed.is_stale:
                self._fixed = FixedStep(self._eager, self._make_recorder())
            try:
                return work(self._fixed)
            except RecordingError as error:
                self._give_up(str(error))
        return work(self._eager)

    def _give_up(self, why: str) -> None:
        """Compute operation by operation from here on, and say why."""
        self._records, self._fixed = False, None
        if self._tell is not None:
            self._tell(f"the executor '{self.name}' computes as 'eager' does: {why}")


def reason_against(model: nn.Module) -> str | None:
    """Say why a network's steps cannot be recorded, as far as that can be seen beforehand."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.momentum is None:
            return f"the batch-norm '{name}' averages over all steps, so it must count them here"
    return None
