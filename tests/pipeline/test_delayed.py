"""A pipeline's numbers on one device: the paper's vectors, and plain training where it is none."""

import copy
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from convoy.config import Config
from convoy.data.batches import Batch
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.eager import EagerExecutor
from convoy.inner.graph import GraphExecutor
from convoy.inner.optimizer import make_optimizer, momentum_tensors
from convoy.models.blocks import walk_blocks
from convoy.models.zoo import build_model
from convoy.pipeline.delayed import DelayedExecutor, make_delayed
from convoy.pipeline.recipe import Recipe
from convoy.pipeline.schedule import lead_of
from tests.inner.tape import TapeRecorder

_FP64 = Arithmetic(torch.device("cpu"), "fp64")
_X, _T = (1.0, 2.0, -1.0, 0.5), (2.0, 1.0, 0.0, 1.0)


class Scale(nn.Module):
    """One weight."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class Squared(EagerExecutor):
    """Has the vectors' loss instead of cross-entropy."""

    def compute(self, images_nchw: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        y = self.model(images_nchw)
        return ((y - labels) ** 2).sum() / 2, y


def _vector(recipe: Recipe) -> tuple[list[float], list[float]]:
    """Train the net of vector A1; return its weights and the losses that were seen."""
    config = Config(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0)
    model = nn.Sequential(Scale(1.0), Scale(0.5), Scale(1.0))
    leads = [lead_of(recipe.order, 2, stage) for stage in range(2)]
    parts = [list(model)[:2], list(model)[2:]]
    executor = make_delayed(model, parts, leads, recipe, config, _FP64, Squared)
    losses = []
    for x, t in zip(_X, _T, strict=True):
        batch = Batch(torch.tensor([x], dtype=torch.float64), torch.tensor([t]).double())
        losses.append(float(executor.step(batch, 1, 0.1).loss))
    return [float(parameter.detach()) for parameter in model.parameters()], losses


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Recipe("stale"), (1.0475069805, 0.6124978456, 1.0630455418)),
        (Recipe("stale", backward="stashed"), (1.0599745731, 0.6124978456, 1.0630455418)),
        (Recipe("1f1b", backward="stashed"), (1.0363119501, 0.5838453179, 1.0375838284)),
    ],
    ids=["stale", "stashed", "1f1b"],
)
def test_vector_a1(recipe: Recipe, expected: tuple[float, ...]) -> None:
    weights, losses = _vector(recipe)
    assert weights == pytest.approx(expected, abs=1e-10)
    if recipe.order == "stale":
        seen = (1.125, 0.0028125, 0.1424445312, 0.2024809275)
        assert losses == pytest.approx(seen, abs=1e-10)


# ---------------------------------------------------------------- networks


def _batches(count: int, size: int = 6) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [
        Batch(
            torch.randn(size, 3, 32, 32, generator=generator, dtype=torch.float64),
            torch.randint(0, 10, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def _delayed(
    model: nn.Module, bounds: Sequence[int], recipe: Recipe, config: Config
) -> DelayedExecutor:
    blocks = [block for _, block in walk_blocks(model)]
    parts = [blocks[a:b] for a, b in pairwise(bounds)]
    leads = [lead_of(recipe.order, len(parts), stage) for stage in range(len(parts))]
    return make_delayed(model, parts, leads, recipe, config, _FP64)


def _resnet() -> nn.Module:
    return _FP64.place(build_model("resnet20", (3, 32, 32), 10, seed=0))


@pytest.mark.parametrize("nesterov", [True, False])
def test_one_stage_equals_plain_training_bit_for_bit(nesterov: bool) -> None:
    config = Config(lr=0.1, nesterov=nesterov)
    one, two = _resnet(), _resnet()
    plain = EagerExecutor(one, make_optimizer(one, config), _FP64)
    recipe = Recipe("stale", forward="linear", compensated=True, annealed=5.0)
    delayed = _delayed(two, (0, 11), recipe, config)
    for number, batch in enumerate(_batches(4)):
        for executor in (plain, delayed):
            executor.step(batch, len(batch), 0.1 / (1 + number))
    for name, tensor in one.state_dict().items():
        assert torch.equal(two.state_dict()[name], tensor), name
    theirs, ours = momentum_tensors(plain.optimizer, one), momentum_tensors(delayed.optimizer, two)
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


RECIPES = [
    Recipe("stale"),
    Recipe("stale", backward="stashed"),
    Recipe("stale", forward="linear", backward="stashed"),
    Recipe("stale", forward="coasting", backward="stashed", compensated=True),
    Recipe("stale", backward="predicted"),
    Recipe(
        "1f1b", damped=0.5, forward="linear", backward="stashed", compensated=True, annealed=3.0
    ),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_with_a_rate_of_zero_nothing_moves_and_losses_are_those_of_plain_training(
    recipe: Recipe,
) -> None:
    model = _resnet()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain = EagerExecutor(copy.deepcopy(model), make_optimizer(model, Config()), _FP64)
    delayed = _delayed(model, (0, 4, 7, 11), recipe, Config(weight_decay=0.0))
    for batch in _batches(3):
        expected = plain.gradients(batch, 6).loss
        assert float(delayed.step(batch, 6, 0.0).loss) == float(expected)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_batch_in_an_empty_pipeline_is_a_step_of_plain_training(recipe: Recipe) -> None:
    """The first one, and any after the pipeline was drained; the first has no momentum yet."""
    config = Config(lr=0.1, momentum=0.0, nesterov=False)
    one, two = _resnet(), _resnet()
    plain = EagerExecutor(one, make_optimizer(one, config), _FP64)
    recipe = Recipe(recipe.order, recipe.forward, recipe.backward, recipe.compensated)
    delayed = _delayed(two, (0, 4, 7, 11), recipe, config)
    for batch in _batches(3):
        plain.step(batch, 6, 0.1)
        delayed.step(batch, 6, 0.1)
        delayed.optimizer.drain(0.1)
        for name, tensor in one.state_dict().items():
            torch.testing.assert_close(two.state_dict()[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_recorded_pipeline_gives_the_same_numbers(recipe: Recipe) -> None:
    config = Config(lr=0.1)
    one, two = _resnet(), _resnet()
    plain = _delayed(one, (0, 4, 7, 11), recipe, config)
    other = _delayed(two, (0, 4, 7, 11), recipe, config)
    recorders: list[TapeRecorder] = []

    def make_recorder() -> TapeRecorder:
        recorders.append(TapeRecorder())
        return recorders[-1]

    graph = GraphExecutor(two, other.optimizer, _FP64, make_recorder=make_recorder, eager=other)
    for number, batch in enumerate(_batches(6)):
        a = plain.step(batch, 6, 0.1 / (1 + number))
        b = graph.step(batch, 6, 0.1 / (1 + number))
        assert float(a.loss) == pytest.approx(float(b.loss), rel=1e-12)
    assert [tape.replays for recorder in recorders for tape in recorder.tapes] == [5]
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], tensor, rtol=1e-11, atol=1e-11)


def test_a_stage_computes_with_weights_of_so_many_updates_ago() -> None:
    recipe = Recipe("stale", backward="stashed")
    model = _resnet()
    delayed = _delayed(model, (0, 4, 7, 11), recipe, Config(lr=0.1))
    first = delayed.optimizer.stages[0]
    weight = first.parameters[0]
    versions, read = [weight.detach().clone()], []
    weight.register_hook(lambda gradient: read.append(weight.detach().clone()))
    for batch in _batches(7):
        delayed.step(batch, 6, 0.1)
        versions.append(weight.detach().clone())
    for number, found in enumerate(read):
        assert torch.equal(found, versions[max(0, number - 4)]), number
