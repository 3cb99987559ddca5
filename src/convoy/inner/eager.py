"""The plain executor: PyTorch's own forward, backward and update."""

from collections.abc import Callable

import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from convoy.data.batches import Batch
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.executor import Sums
from convoy.models.dropout import drop_by


class EagerExecutor:
    """Computes steps operation by operation, as a hand-written PyTorch loop does."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        arithmetic: Arithmetic,
        *,
        label_smoothing: float = 0.0,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        del tell  # there is nothing that it could not do
        self.model = model
        self.optimizer = optimizer
        self.arithmetic = arithmetic
        self._label_smoothing = label_smoothing

    def gradients(self, batch: Batch, divisor: float) -> Sums:
        """Leave the gradient of (sum of losses / divisor) in each parameter's .grad."""
        if not self.model.training:  # the walk over all modules would cost a small network 1 %
            self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss, logits = self.forward(batch)
        # Scaling what flows back costs nothing; dividing the loss would cost two operations.
        loss.backward(torch.full_like(loss, 1 / divisor))
        return Sums(loss.detach(), logits.detach(), batch.labels)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of a batch's losses, ready to be differentiated, and the logits."""
        with drop_by(batch.keys):
            return self.compute(batch.images_NCHW, batch.labels)

    def compute(self, images_nchw: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Do the same for tensors, with nothing in it that a compiler could not follow."""
        with self.arithmetic.autocast():
            logits: Tensor = self.model(images_nchw)
            loss = functional.cross_entropy(
                logits, labels, reduction="sum", label_smoothing=self._label_smoothing
            )
        return loss, logits

    def update(self, learning_rate: float) -> None:
        """Apply the gradients to the weights."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()

    def step(self, batch: Batch, divisor: float, learning_rate: float) -> Sums:
        """Do both halves."""
        sums = self.gradients(batch, divisor)
        self.update(learning_rate)
        return sums

    @torch.no_grad()
    def evaluate(self, batch: Batch, *, mirrored: bool = False) -> Sums:
        """Run a batch through without learning from it.

        With `mirrored`, a sample's logits are the mean over the image and its mirror image.
        """
        self.model.eval()
        with self.arithmetic.autocast():
            logits: Tensor = self.model(batch.images_NCHW)
            if mirrored:
                logits = (logits + self.model(batch.images_NCHW.flip(3))) / 2
            loss = functional.cross_entropy(logits, batch.labels, reduction="sum")
        return Sums(loss, logits, batch.labels)
