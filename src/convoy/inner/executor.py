"""The contract of an executor: weights and a batch in, gradient sums and counts out.

A step has two halves, so that a strategy can exchange gradients between them:

    sums = executor.gradients(batch, divisor)    # .grad = d(sum of losses)/dw / divisor
    ...                                          # all-reduce
    executor.update(learning_rate)               # weights move

A node that exchanges nothing asks for both at once, and an executor may weave them together:

    sums = executor.step(batch, divisor, learning_rate)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn, optim

from convoy.config import Config
from convoy.data.batches import Batch
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.optimizer import make_optimizer
from convoy.registry import Entry, Registry

if TYPE_CHECKING:
    from convoy.inner.tasks.step import Grain

SUMS_KEPT = 256  # steps; memory for what nobody has read yet stays bounded


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """What a batch adds up to; the sums of several batches or nodes can simply be added.

    Attributes:
        loss: sum of the samples' losses, on the device.
        logits, labels: what the network said and what was right, on the device. Whoever wants
            to know how many were correct can ask for many batches at once.
        correct: how many were right, on the device, where the executor has counted itself;
            there are no logits then.

    They may be read until SUMS_KEPT more steps were done; an executor may then write over them.
    """

    loss: Tensor
    logits: Tensor | None
    labels: Tensor
    correct: Tensor | None = None

    @property
    def count(self) -> int:
        """Return how many samples there were."""
        return len(self.labels)

    def count_correct(self) -> Tensor:
        """Return how many were right, still on the device."""
        if self.correct is not None:
            return self.correct
        assert self.logits is not None
        return (self.logits.argmax(1) == self.labels).sum()


def count_correct(parts: Sequence[Sums]) -> int:
    """Return how many samples of some batches were classified correctly."""
    counted = [part.correct for part in parts if part.correct is not None]
    said = [(part.logits, part.labels) for part in parts if part.logits is not None]
    total = int(torch.stack(counted).sum()) if counted else 0
    if said:
        answers = torch.cat([logits for logits, _ in said]).argmax(1)
        total += int((answers == torch.cat([labels for _, labels in said])).sum())
    return total


def add_up(parts: Sequence[Sums]) -> tuple[float, int]:
    """Return the sum of losses and the number of correct answers over some batches."""
    if not parts:
        return 0.0, 0
    loss = torch.stack([part.loss.double() for part in parts]).sum()
    return float(loss), count_correct(parts)


class Executor(Protocol):
    """Computes the steps of one network on one node."""

    model: nn.Module
    optimizer: optim.Optimizer
    arithmetic: Arithmetic

    def gradients(self, batch: Batch, divisor: float) -> Sums:
        """Leave the gradient of (sum of losses / divisor) in each parameter's .grad."""
        ...

    def update(self, learning_rate: float) -> None:
        """Apply the gradients to the weights."""
        ...

    def step(self, batch: Batch, divisor: float, learning_rate: float) -> Sums:
        """Do both halves; what is left in .grad is not told."""
        ...

    def evaluate(self, batch: Batch, *, mirrored: bool = False) -> Sums:
        """Run a batch through without learning from it; `mirrored` adds each mirror image."""
        ...


class ExecutorFactory(Protocol):
    """Makes an executor for a network that is already on its device.

    `tell` takes a sentence for the user: why an executor does not do what it was asked for.
    `grain` is for executors that cut a step up.
    """

    def __call__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        arithmetic: Arithmetic,
        *,
        label_smoothing: float,
        tell: Callable[[str], None],
        **more: Any,
    ) -> Executor:
        """Return the executor."""
        ...


AUTO = "auto"
EXECUTORS: Registry[ExecutorFactory] = Registry(
    "executor",
    {
        "eager": Entry(
            "convoy.inner.eager:EagerExecutor", "plain PyTorch, one operation at a time"
        ),
        "tasks": Entry(
            "convoy.inner.tasks.executor:TasksExecutor", "a graph of tasks on all cores (CPU)"
        ),
        "graph": Entry(
            "convoy.inner.graph:GraphExecutor", "one CUDA graph per step: a single launch"
        ),
        "fused": Entry(
            "convoy.inner.fused:FusedExecutor", "the same, after torch.compile has fused kernels"
        ),
    },
)


def make_executor(
    config: Config, model: nn.Module, arithmetic: Arithmetic, tell: Callable[[str], None]
) -> Executor:
    """Return the executor that a config names; where none was chosen yet, the plain one."""
    name = "eager" if config.executor == AUTO else config.executor
    more: dict[str, Any] = {"grain": grain_of(config)} if name == "tasks" else {}
    make = EXECUTORS.get(name)
    optimizer = make_optimizer(model, config)
    smoothing = config.label_smoothing
    return make(model, optimizer, arithmetic, label_smoothing=smoothing, tell=tell, **more)


def grain_of(config: Config) -> "Grain | None":
    """Return how a step is to be cut up; None: as the executor thinks best."""
    from convoy.inner.tasks.step import Grain

    if not config.groups and (config.group_norms, config.priority) == ("batch", "rank"):
        return None
    threads, batch = torch.get_num_threads(), config.batch
    return Grain(config.groups, threads, config.group_norms, config.priority, batch)
