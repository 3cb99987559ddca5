"""torch.distributed.pipelining over gloo: PyTorch's own pipeline, a process for each stage.

Both schedules do a batch in equal micro-batches and end every step with all of them done, so the
weights are never stale, and stages stand still while a step fills and drains:

    GPipe   all forwards, then all backwards
    1F1B    a backward as soon as there is one to do

Gradients are those of plain training, but batch-norm sees a micro-batch at a time. What costs
the peer time for nothing is avoided: the loss is divided by the batch, so that gradients need no
scaling afterwards; outputs are not gathered; and images that lie channels last travel as they lie.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor, autograd, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn import functional

from convoy.bench.peers import Peer, Step, Task, ddp
from convoy.bench.peers.alone import Samples, arithmetic_of, compiled_if_asked, make_model
from convoy.inner.optimizer import make_optimizer
from convoy.models.blocks import walk_units
from convoy.pipeline.costs import measure_blocks
from convoy.pipeline.partition import Bounds, Worker, cut_by_cost


@dataclass(frozen=True, slots=True)
class PipelineTask(Task):
    """What the stages train; each node is a stage, and the shares say only how many there are.

    Attributes:
        micro: micro-batches of a step.
        bounds: numbers of each stage's first block, and the number of blocks.
    """

    micro: int = 1
    bounds: Bounds = ()

    def __post_init__(self) -> None:
        """Check that there is a stage for each node, and that micro-batches are equal."""
        Task.__post_init__(self)
        assert len(self.bounds) == self.num_nodes + 1, "there is not one stage for each node"
        assert self.batch % self.micro == 0, "the batch cannot be divided into equal micro-batches"


def cut_for(task: Task, micro: int, speeds: Sequence[float], budget_s: float) -> PipelineTask:
    """Return a task in stages of these speeds that take equally long for a micro-batch.

    Each block is timed here, by this process with the threads it has.
    """
    arithmetic = arithmetic_of(task)
    model = make_model(task)
    costs = measure_blocks(model, task.in_shape, task.batch // micro, arithmetic, budget_s)
    workers = [Worker(tuple(s / speed for s in costs.seconds)) for speed in speeds]
    bounds = cut_by_cost(costs.blocks, workers, in_flight=1)
    given = {field.name: getattr(task, field.name) for field in fields(Task)}
    return PipelineTask(**given, micro=micro, bounds=bounds)


class _Arrived(autograd.Function):
    """Sees what came, which may lie as NHWC, as NCHW; its gradient goes back like it, dense."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, channels_last: bool) -> Tensor:  # noqa: ANN401 - torch's own
        ctx.channels_last = channels_last
        return x.permute(0, 3, 1, 2) if channels_last else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        found = gradient.permute(0, 2, 3, 1) if ctx.channels_last else gradient
        return found.contiguous(), None


class Part(nn.Module):
    """A stage's blocks, with a form of what comes and goes that can travel."""

    def __init__(self, task: PipelineTask, stage: int) -> None:
        super().__init__()
        units = [unit for _, unit in walk_units(make_model(task))]
        blocks = nn.Sequential(*units[task.bounds[stage] : task.bounds[stage + 1]])
        self.blocks = compiled_if_asked(task, blocks)
        self._is_first, self._is_last = stage == 0, stage == task.num_nodes - 1
        self._channels_last = task.memory_format == "channels_last"

    def forward(self, x: Tensor) -> Tensor:
        """Compute the stage's part of the network."""
        if not self._is_first:
            x = _Arrived.apply(x, self._channels_last and x.dim() == 4)  # type: ignore[no-untyped-call]
        y: Tensor = self.blocks(x)
        if self._is_last:
            return y
        if self._channels_last and y.dim() == 4:
            y = y.permute(0, 2, 3, 1)
        return y.contiguous()


class PipelineLoop:
    """The training loop of one stage of the group that this process is in."""

    def __init__(self, kind: type[PipelineScheduleSingle], task: PipelineTask, stage: int) -> None:
        self.part = Part(task, stage).train()
        self._batch = task.batch
        self._samples = Samples(task, 0, task.batch)
        self._optimizer = make_optimizer(self.part, task.config)
        device = arithmetic_of(task).device
        self._stage = PipelineStage(self.part, stage, task.num_nodes, device)
        self._schedule = kind(self._stage, task.micro, self._loss, scale_grads=False)

    def step(self) -> int:
        """Take part in a step; the last stage says how many samples it was."""
        self._optimizer.zero_grad()
        self.gradients()
        self._optimizer.step()
        return self._batch if self._stage.is_last else 0

    def gradients(self) -> None:
        """Do all micro-batches of the next batch, forward and backward."""
        images, labels = self._samples.take()
        given = (images,) if self._stage.is_first else ()
        target = labels if self._stage.is_last else None
        self._schedule.step(*given, target=target, return_outputs=False)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits, labels, reduction="sum") / self._batch


def _join_with(
    kind: type[PipelineScheduleSingle],
) -> Callable[[Task, int, str], AbstractContextManager[Step]]:
    @contextmanager
    def join(task: Task, node: int, address: str) -> Iterator[Step]:
        assert isinstance(task, PipelineTask)
        with ddp.group(address, node, task.num_nodes):
            yield PipelineLoop(kind, task, node).step

    return join


@contextmanager
def _meet(num_nodes: int) -> Iterator[str]:
    del num_nodes
    with ddp.open_store() as address:
        yield address


GPIPE = Peer(lockstep=True, meet=_meet, join=_join_with(ScheduleGPipe))
ONE_F_ONE_B = Peer(lockstep=True, meet=_meet, join=_join_with(Schedule1F1B))
