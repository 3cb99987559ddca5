"""What only a GPU can show of the executor `graph`: real captures, real failures, real memory."""

import copy
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from convoy.config import Config
from convoy.data.batches import Batch
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.eager import EagerExecutor
from convoy.inner.fused import FusedExecutor
from convoy.inner.graph import GraphExecutor
from convoy.inner.optimizer import make_optimizer
from tests.inner.test_graph import RATES, Looking, make_batch, make_model, replace_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Noisy(nn.Module):
    """Draws from torch's own generator."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, self.training)


@pytest.fixture
def _steady() -> Iterator[None]:
    former = torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32 = former


def _gpu_pair(
    model: nn.Module, precision: str, layout: str, kind: type[GraphExecutor] = GraphExecutor
) -> tuple[Sequence[EagerExecutor | GraphExecutor], list[str]]:
    arithmetic = Arithmetic(torch.device("cuda"), precision, layout)
    one = arithmetic.place(model)
    two = copy.deepcopy(one)
    told: list[str] = []
    plain = EagerExecutor(one, make_optimizer(one, Config()), arithmetic)
    graph = kind(two, make_optimizer(two, Config()), arithmetic, tell=told.append)
    return (plain, graph), told


def _gpu_batch(number: int, count: int, arithmetic: Arithmetic) -> Batch:
    batch = make_batch(number, count, arithmetic.device)
    images = batch.images_NCHW.to(arithmetic.dtype, memory_format=arithmetic.memory_format)
    return Batch(images, batch.labels, batch.keys)


@pytest.mark.filterwarnings("ignore:::torch")  # its compiler warns of its own parts
@pytest.mark.usefixtures("_steady")
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("precision", "close"), [("fp64", 1e-6), ("fp32", 1e-4), ("bf16", 3e-2)])
@pytest.mark.parametrize("kind", [GraphExecutor, FusedExecutor])
def test_steps_and_halves_equal_eager(
    kind: type[GraphExecutor], precision: str, close: float, layout: str
) -> None:
    fused = kind is FusedExecutor
    executors, told = _gpu_pair(make_model(dropout=not fused), precision, layout, kind)
    for number, rate in enumerate(RATES):
        losses = []
        for executor in executors:
            batch = _gpu_batch(number, 10 if number % 4 else 3, executor.arithmetic)
            torch.cuda.manual_seed(number)
            sums = executor.step(batch, len(batch), rate)
            executor.gradients(batch, len(batch))
            replace_gradients(executor.model, 1.0)
            executor.update(rate)
            losses.append((float(sums.loss), sums.count))
        assert losses[0] == pytest.approx(losses[1], rel=close)
    assert told == []
    plain, graph = executors
    assert isinstance(graph, GraphExecutor)
    assert fused == (getattr(graph._eager, "_compiled", None) is not None)
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(graph.model.state_dict()[name], tensor, rtol=close, atol=close)


@pytest.mark.usefixtures("_steady")
def test_a_capture_that_fails_leaves_no_trace() -> None:
    model = nn.Sequential(Noisy(), Looking(), make_model())
    executors, told = _gpu_pair(model, "fp32", "contiguous")
    stream = torch.cuda.current_stream()
    for number in range(6):
        for executor in executors:
            torch.cuda.manual_seed(number)
            executor.step(_gpu_batch(number, 10, executor.arithmetic), 10, 0.1)
    assert len(told) == 1
    assert "captur" in told[0]
    assert torch.cuda.current_stream() == stream
    torch.cuda.empty_cache()  # refuses where a capture is taken to be under way
    plain, graph = executors
    for name, tensor in plain.model.state_dict().items():
        torch.testing.assert_close(graph.model.state_dict()[name], tensor, rtol=1e-4, atol=1e-4)
    others, told = _gpu_pair(make_model(), "fp32", "contiguous")
    for number in range(3):
        others[1].step(_gpu_batch(number, 10, others[1].arithmetic), 10, 0.1)
    assert told == []  # another network can be recorded all the same


def test_masks_of_torchs_own_generator_follow_the_seed() -> None:
    model = nn.Sequential(Noisy(), make_model(dropout=False))
    executors, told = _gpu_pair(model, "fp32", "contiguous")
    for number in range(6):
        losses = []
        for executor in executors:
            torch.cuda.manual_seed(number)
            losses.append(
                float(executor.step(_gpu_batch(0, 10, executor.arithmetic), 10, 0.0).loss)
            )
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert told == []
