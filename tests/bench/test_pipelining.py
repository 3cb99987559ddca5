"""torch's pipelining as a peer: it learns what one process learns, however it is cut."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.nn import functional

from convoy.bench.peers import Task, ddp, measure_nodes
from convoy.bench.peers.alone import Samples, make_model
from convoy.bench.peers.crew import Crew, Link
from convoy.bench.peers.pipelining import PipelineLoop, PipelineTask, cut_for

PATIENCE_S = 60.0
LENET = PipelineTask(
    "lenet5", (1, 28, 28), 10, 8, (4, 4), precision="fp64", micro=4, bounds=(0, 1, 5)
)
RESNET = replace(LENET, model="resnet20", in_shape=(3, 8, 8), micro=1, bounds=(0, 6, 11))
THREE = replace(LENET, batch=12, shares=(4, 4, 4), bounds=(0, 1, 3, 5))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    ("kind", "task"),
    [(ScheduleGPipe, LENET), (Schedule1F1B, LENET), (ScheduleGPipe, RESNET), (Schedule1F1B, THREE)],
    ids=["gpipe", "1f1b", "batch-norm in one micro-batch", "three stages"],
)
def test_gradients_are_those_of_one_process(
    kind: type[PipelineScheduleSingle], task: PipelineTask, layout: str
) -> None:
    _compare_gradients(kind, replace(task, memory_format=layout))


def test_gradients_of_compiled_stages_are_those_of_one_process() -> None:
    _compare_gradients(Schedule1F1B, replace(LENET, compiled=True))


def _compare_gradients(kind: type[PipelineScheduleSingle], task: PipelineTask) -> None:
    with ddp.open_store() as address:
        given = [(kind, task, stage, address) for stage in range(task.num_nodes)]
        with Crew(_compute_gradients, given) as crew:
            parts = crew.receive(PATIENCE_S)
    found = torch.tensor([number for part in parts for number in part], dtype=torch.float64)
    torch.testing.assert_close(found, _gradients_of_one_process(task), rtol=1e-9, atol=1e-12)


def _compute_gradients(
    link: Link, kind: type[PipelineScheduleSingle], task: PipelineTask, stage: int, address: str
) -> None:
    with ddp.group(address, stage, task.num_nodes):
        loop = PipelineLoop(kind, task, stage)
        loop.gradients()
        link.send(_flat(loop.part).tolist())


def _gradients_of_one_process(task: Task) -> Tensor:
    model = make_model(task).train()
    images, labels = Samples(task, 0, task.batch).take()
    functional.cross_entropy(model(images), labels).backward()
    gradients = _flat(model)
    assert gradients.abs().max() > 0
    return gradients


def _flat(module: torch.nn.Module) -> Tensor:
    found = [weight.grad for weight in module.parameters()]
    return torch.cat([grad.flatten() for grad in found if grad is not None])


@pytest.mark.parametrize("system", ["gpipe", "1f1b"])
def test_the_samples_of_a_pipeline_are_counted_once(system: str) -> None:
    first, last = measure_nodes(system, LENET, None, warm_s=0.0, seconds=0.1)
    assert first == 0
    assert last > 0


def test_a_faster_stage_gets_more_blocks() -> None:
    task = Task("resnet20", (3, 8, 8), 10, 8, (4, 4))
    bounds = [cut_for(task, 2, (1.0, speed), 0.0).bounds for speed in (0.1, 10.0)]
    assert [(first, last) for first, _, last in bounds] == [(0, 11), (0, 11)]
    assert bounds[0][1] > bounds[1][1]


def test_a_task_in_stages_is_the_same_task() -> None:
    task = Task("lenet5", (1, 28, 28), 10, 8, (4, 4), lr=0.3, memory_format="contiguous")
    cut = cut_for(task, 4, (1.0, 1.0), 0.0)
    assert (cut.micro, cut.batch, cut.lr, cut.memory_format) == (4, 8, 0.3, "contiguous")


def test_stages_must_fit_nodes_and_micro_batches_the_batch() -> None:
    with pytest.raises(AssertionError, match="one stage for each node"):
        replace(LENET, bounds=(0, 5))
    with pytest.raises(AssertionError, match="equal micro-batches"):
        replace(LENET, micro=3)
