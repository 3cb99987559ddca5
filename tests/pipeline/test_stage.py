"""Stages in one process, each doing its jobs in order: the numbers of the virtual pipeline."""

import copy
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from convoy.config import Config
from convoy.data.batches import Batch
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.eager import EagerExecutor
from convoy.inner.optimizer import make_optimizer, momentum_tensors
from convoy.models.blocks import walk_blocks
from convoy.models.zoo import build_model
from convoy.pipeline.delayed import make_delayed
from convoy.pipeline.recipe import Recipe
from convoy.pipeline.schedule import Job, held_at_most, jobs_of, lead_of, version_read
from convoy.pipeline.stage import Stage
from tests.pipeline.stages import eager_stage, task_stages

_FP64 = Arithmetic(torch.device("cpu"), "fp64")
_STEPS = 4  # of an epoch
_BOUNDS = {1: (0, 4, 11), 2: (0, 4, 7, 11), 3: (0, 1, 4, 7, 11)}


def _rate(update: int) -> float:
    return 0.1 / (1 + update)


def _make_stages(
    parts: Sequence[Sequence[nn.Module]],
    recipe: Recipe,
    config: Config,
    momentum: dict[nn.Parameter, Tensor] | None = None,
    *,
    postpones: bool = True,
) -> list[Stage]:
    return [
        eager_stage(
            part,
            lead_of(recipe.order, len(parts), number),
            recipe,
            config,
            _FP64,
            momentum,
            is_first=number == 0,
            postpones=postpones,
        )
        for number, part in enumerate(parts)
    ]


class Line:
    """A pipeline in one process: of all jobs whose input is there, one is done after the other.

    Args:
        stages: in order.
        end: does the last stage's backward pass of a batch; returns the gradient of its input.
        right_first: which stage comes first where several could go on.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        end: Callable[[int, Tensor], Tensor | None],
        *,
        right_first: bool = False,
    ) -> None:
        self.stages, self._end = stages, end
        self._right_first = right_first
        self.versions: list[list[int]] = [[] for _ in stages]  # that forward passes read
        self.updated: list[list[int]] = [[] for _ in stages]  # that updates were applied to
        self.most_held = [0] * len(stages)

    def run(self, images: Sequence[Tensor], first: int = 0) -> None:
        """Let a segment through, whose first update has this number."""
        last = max(0, first - 1)
        for stage in self.stages:
            stage.fill(_rate(last), last / _STEPS)
        jobs = [deque(jobs_of(stage.lead, len(images))) for stage in self.stages]
        coming: list[dict[int, Tensor]] = [{} for _ in self.stages]  # activations, by batch
        going: list[dict[int, Tensor]] = [{} for _ in self.stages]  # gradients, by batch
        coming[0] = dict(enumerate(images))
        self._outputs: dict[int, Tensor] = {}
        going[-1] = self._outputs
        order = range(len(self.stages))
        while any(jobs):
            able = [
                number
                for number in (reversed(order) if self._right_first else order)
                if jobs[number]
                and jobs[number][0].batch
                in (coming if jobs[number][0].kind == "forward" else going)[number]
            ]
            assert able, "the pipeline stands still"
            number = able[0]
            job = jobs[number].popleft()
            if job.kind == "forward":
                y = self._forward(number, job.batch, coming[number].pop(job.batch))
                (coming[number + 1] if number + 1 < len(jobs) else going[number])[job.batch] = y
                continue
            dx = self._backward(number, job.batch, going[number].pop(job.batch), first)
            assert (dx is None) == (number == 0)
            if dx is not None:
                going[number - 1][job.batch] = dx

    def _forward(self, number: int, batch: int, x: Tensor) -> Tensor:
        stage = self.stages[number]
        y = stage.forward(batch, x, None)
        self.versions[number].append(stage._on_the_way[batch].version)
        assert stage.held <= held_at_most(stage.lead)
        self.most_held[number] = max(self.most_held[number], stage.held)
        return y

    def _backward(self, number: int, batch: int, given: Tensor, first: int) -> Tensor | None:
        stage = self.stages[number]
        self.updated[number].append(stage.version)
        update = first + batch
        if number == len(self.stages) - 1:
            dx = self._end(batch, given)
        else:
            dx = stage.backward(batch, given, update / _STEPS)
        stage.update(_rate(update))
        return dx


# ---------------------------------------------------------------- the paper's vector


class Scale(nn.Module):
    """One weight."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(weight, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


@pytest.mark.parametrize("right_first", [False, True])
@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Recipe("stale"), (1.0475069805, 0.6124978456, 1.0630455418)),
        (Recipe("stale", backward="stashed"), (1.0599745731, 0.6124978456, 1.0630455418)),
        (Recipe("1f1b", backward="stashed"), (1.0363119501, 0.5838453179, 1.0375838284)),
    ],
    ids=["stale", "stashed", "1f1b"],
)
def test_vector_a1(
    recipe: Recipe,
    expected: tuple[float, ...],
    right_first: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{__name__}._rate", lambda update: 0.1)
    config = Config(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0)
    model = nn.Sequential(Scale(1.0), Scale(0.5), Scale(1.0))
    stages = _make_stages([list(model)[:2], list(model)[2:]], recipe, config)
    losses: dict[int, float] = {}
    targets = (2.0, 1.0, 0.0, 1.0)

    def end(batch: int, y: Tensor) -> Tensor | None:
        off = y - targets[batch]
        losses[batch] = float(off**2 / 2)
        return stages[-1].backward(batch, off, 0.0)

    images = [torch.tensor([x], dtype=torch.float64) for x in (1.0, 2.0, -1.0, 0.5)]
    Line(stages, end, right_first=right_first).run(images)
    assert [float(p.detach()) for p in model.parameters()] == pytest.approx(expected, abs=1e-10)
    if recipe.order == "stale":
        seen = (1.125, 0.0028125, 0.1424445312, 0.2024809275)
        assert [losses[batch] for batch in range(4)] == pytest.approx(seen, abs=1e-10)


# ---------------------------------------------------------------- networks


def _resnet() -> nn.Module:
    return _FP64.place(build_model("resnet20", (3, 8, 8), 10, seed=0))


def _parts(model: nn.Module, bounds: Sequence[int]) -> list[list[nn.Module]]:
    blocks = [block for _, block in walk_blocks(model)]
    return [blocks[a:b] for a, b in pairwise(bounds)]


def _batches(count: int, size: int = 4) -> list[Batch]:
    """Return batches of which the last one is short."""
    generator = torch.Generator().manual_seed(0)
    return [
        Batch(
            torch.randn(samples, 3, 8, 8, generator=generator, dtype=torch.float64),
            torch.randint(0, 10, (samples,), generator=generator),
        )
        for samples in [size] * (count - 1) + [size // 2]
    ]


def _run(
    parts: Sequence[Sequence[nn.Module]],
    recipe: Recipe,
    config: Config,
    segments: Sequence[Sequence[Batch]],
    *,
    right_first: bool = False,
    stages: Sequence[Stage] | None = None,
) -> tuple[Line, list[float]]:
    """Train in a line of stages; return it, and the losses of all batches."""
    stages = stages or _make_stages(parts, recipe, config)
    losses: list[float] = []
    first = 0

    def end(batch: int, y: Tensor) -> Tensor | None:
        update, labels = first + batch, segment[batch].labels
        sums, dx = stages[-1].finish(batch, labels, len(labels), update / _STEPS)
        assert sums.logits is not None
        assert torch.equal(sums.logits, y)
        assert sums.count == len(labels)
        losses.append(float(sums.loss))
        return dx

    line = Line(stages, end, right_first=right_first)
    for segment in segments:
        line.run([batch.images_NCHW for batch in segment], first)
        first += len(segment)
        assert all(stage.held == 0 for stage in stages)
    return line, losses


def _run_virtual(
    model: nn.Module,
    parts: Sequence[Sequence[nn.Module]],
    recipe: Recipe,
    config: Config,
    segments: Sequence[Sequence[Batch]],
) -> tuple[dict[str, Tensor], list[float]]:
    """Train in a virtual pipeline; return momentum and losses."""
    leads = [lead_of(recipe.order, len(parts), stage) for stage in range(len(parts))]
    delayed = make_delayed(model, parts, leads, recipe, config, _FP64)
    losses, update = [], 0
    for segment in segments:
        last = max(0, update - 1)
        delayed.optimizer.begin_segment(_rate(last), last / _STEPS)
        delayed.optimizer.drain(_rate(last))
        for batch in segment:
            delayed.optimizer.begin_update(update / _STEPS)
            losses.append(float(delayed.step(batch, len(batch), _rate(update)).loss))
            update += 1
    return momentum_tensors(delayed.optimizer, model), losses


RECIPES = [
    Recipe("stale"),
    Recipe("stale", backward="stashed"),
    Recipe("stale", forward="linear"),
    Recipe("stale", forward="coasting", backward="stashed", compensated=True),
    Recipe("stale", backward="predicted"),
    Recipe("1f1b", backward="stashed"),
    Recipe("1f1b", forward="coasting", backward="stashed"),
    Recipe("1f1b", forward="coasting", backward="predicted", damped=0.5),
    Recipe(
        "1f1b", damped=0.5, forward="linear", backward="stashed", compensated=True, annealed=3.0
    ),
    Recipe("1f1b", backward="predicted", annealed=3.0),
]


@pytest.mark.parametrize("cuts", [1, 2, 3])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_stages_give_the_numbers_of_the_virtual_pipeline_bit_for_bit(
    recipe: Recipe, cuts: int
) -> None:
    config = Config(lr=0.1, label_smoothing=0.1)
    one, two = _resnet(), _resnet()
    batches = _batches(10)
    segments = [batches[:7], batches[7:]]  # the second begins with momentum, and is short
    expected, seen = _run_virtual(one, _parts(one, _BOUNDS[cuts]), recipe, config, segments)
    line, losses = _run(
        _parts(two, _BOUNDS[cuts]), recipe, config, segments, right_first=cuts % 2 == 0
    )
    assert losses == seen
    for name, tensor in one.state_dict().items():
        assert torch.equal(two.state_dict()[name], tensor), name
    ours = [momentum_tensors(stage.optimizer, two) for stage in line.stages]
    found = {name: tensor for of_stage in ours for name, tensor in of_stage.items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("cuts", [1, 3])
@pytest.mark.parametrize(
    "recipe",
    [recipe for recipe in RECIPES if recipe.needs_own_weights]
    + [Recipe("1f1b", forward="linear", backward="stashed", annealed=2.0)],
    ids=str,
)
def test_stages_as_tasks_give_the_numbers_of_the_virtual_pipeline(
    recipe: Recipe, cuts: int
) -> None:
    config = Config(lr=0.1, label_smoothing=0.1)
    one, two = _resnet(), _resnet()
    batches = _batches(9, size=6)
    segments = [batches[:6], batches[6:]]
    expected, seen = _run_virtual(one, _parts(one, _BOUNDS[cuts]), recipe, config, segments)
    parts, told = _parts(two, _BOUNDS[cuts]), list[str]()
    leads = [lead_of(recipe.order, len(parts), number) for number in range(len(parts))]
    stages = task_stages(parts, leads, recipe, config, _FP64, told)
    line, losses = _run(parts, recipe, config, segments, stages=stages)
    assert told == []
    assert losses == pytest.approx(seen, rel=1e-10)
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], tensor, rtol=1e-9, atol=1e-10)
    ours = [momentum_tensors(stage.optimizer, two) for stage in line.stages]
    found = {name: tensor for of_stage in ours for name, tensor in of_stage.items()}
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("order", ["stale", "1f1b"])
@pytest.mark.parametrize("cuts", [1, 2, 3])
def test_batches_read_the_versions_of_the_schedule_and_no_more_are_held_than_said(
    order: Literal["stale", "1f1b"], cuts: int
) -> None:
    model, batches = _resnet(), _batches(9, size=2)
    for right_first in (False, True):
        parts = _parts(model, _BOUNDS[cuts])
        line, _ = _run(parts, Recipe(order), Config(), [batches], right_first=right_first)
        for stage, read, updated, most in zip(
            line.stages, line.versions, line.updated, line.most_held, strict=True
        ):
            expected = [version_read(stage.lead, Job(m, "forward")) for m in range(9)]
            assert read == expected
            assert updated == list(range(9))
            assert most == stage.lead + 1
            assert stage.version == 9


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_one_stage_without_a_lead_is_plain_training_bit_for_bit(
    nesterov: bool, smoothing: float
) -> None:
    config = Config(lr=0.1, nesterov=nesterov, label_smoothing=smoothing)
    one, two = _resnet(), _resnet()
    optimizer = make_optimizer(one, config)
    plain = EagerExecutor(one, optimizer, _FP64, label_smoothing=smoothing)
    batches = _batches(5)
    seen = [
        float(plain.step(batch, len(batch), _rate(number)).loss)
        for number, batch in enumerate(batches)
    ]
    recipe = Recipe("stale", "linear", "predicted", compensated=True, annealed=5.0, damped=0.5)
    line, losses = _run([[two]], recipe, config, [batches[:2], batches[2:]])
    assert losses == seen
    for name, tensor in one.state_dict().items():
        assert torch.equal(two.state_dict()[name], tensor), name
    ours, theirs = momentum_tensors(line.stages[0].optimizer, two), momentum_tensors(optimizer, one)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_one_batch_and_a_drained_pipeline_is_a_step_of_plain_training(recipe: Recipe) -> None:
    config = Config(lr=0.1, momentum=0.0, nesterov=False)
    recipe = Recipe(recipe.order, recipe.forward, recipe.backward, recipe.compensated)
    one, two = _resnet(), _resnet()
    plain = EagerExecutor(one, make_optimizer(one, config), _FP64)
    batches = _batches(2)
    for number, batch in enumerate(batches):
        plain.step(batch, len(batch), _rate(number))
    _run(_parts(two, _BOUNDS[2]), recipe, config, [[batch] for batch in batches])
    for name, tensor in one.state_dict().items():
        assert torch.equal(two.state_dict()[name], tensor), name


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_with_a_rate_of_zero_no_weight_moves_and_losses_are_those_of_plain_training(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}._rate", lambda update: 0.0)
    model = _resnet()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    plain = EagerExecutor(copy.deepcopy(model), make_optimizer(model, Config()), _FP64)
    batches = _batches(4)
    _, losses = _run(_parts(model, _BOUNDS[1]), recipe, Config(), [batches])
    assert losses == [float(plain.gradients(batch, len(batch)).loss) for batch in batches]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


# ---------------------------------------------------------------- one stage by itself


def _pair() -> nn.Sequential:
    """Return two layers, so that the input's gradient depends on the weights in between."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def _drive(
    stage: Stage, net: nn.Module, xs: Tensor, gradients: Tensor
) -> tuple[list[dict[str, Tensor]], list[tuple[Tensor, dict[str, Tensor]]]]:
    """Let some batches through a stage.

    Returns its weights before the first and after every update, and for each batch the gradient
    of the stage's input with those of its weights.
    """
    versions = [{name: p.detach().clone() for name, p in net.named_parameters()}]
    passes = []
    stage.fill(0.1, 0.0)
    for job in jobs_of(stage.lead, len(xs)):
        if job.kind == "forward":
            stage.forward(job.batch, xs[job.batch], None)
            continue
        dx = stage.backward(job.batch, gradients[job.batch], 0.0)
        stage.update(0.1)
        assert dx is not None
        passes.append((dx, {name: _gradient(p).clone() for name, p in net.named_parameters()}))
        versions.append({name: p.detach().clone() for name, p in net.named_parameters()})
    return versions, passes


@pytest.mark.parametrize("backward", ["stashed", "current"])
def test_a_gradient_is_that_of_the_weights_which_the_recipe_says(
    backward: Literal["stashed", "current"],
) -> None:
    net = _pair()
    config = Config(lr=0.1, momentum=0.0, nesterov=False, weight_decay=0.0)
    stage = eager_stage([net], 2, Recipe("stale", backward=backward), config, _FP64, is_first=False)
    generator = torch.Generator().manual_seed(1)
    xs = torch.randn(6, 5, 3, generator=generator, dtype=torch.float64)
    gradients = torch.randn(6, 5, 2, generator=generator, dtype=torch.float64)
    versions, passes = _drive(stage, net, xs, gradients)
    for m, (dx, found) in enumerate(passes):
        read = versions[max(0, m - 2)]
        weights = {name: tensor.clone().requires_grad_() for name, tensor in read.items()}
        x = xs[m].clone().requires_grad_()
        functional_call(net, weights, (x,)).backward(gradients[m])
        assert x.grad is not None
        same = {name: torch.equal(found[name], _gradient(w)) for name, w in weights.items()}
        same["x"] = torch.equal(dx, x.grad)
        # What comes after the last weights that a pass reads is the same in any case.
        own = backward == "stashed" or versions[m]["2.weight"].equal(read["2.weight"])
        expected = {name: own or name.startswith("2.") for name in [*weights, "x"]}
        assert same == expected, m


def _gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def test_the_given_momentum_is_moved_in_place() -> None:
    net = _pair()
    momentum = {p: torch.ones_like(p, requires_grad=False) for p in net.parameters()}
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    config = Config(lr=0.1, momentum=0.5, nesterov=False, weight_decay=0.0)
    stage = eager_stage([net], 0, Recipe(), config, _FP64, momentum, is_first=False)
    _drive(stage, net, torch.ones(1, 5, 3).double(), torch.zeros(1, 5, 2).double())
    for name, parameter in net.named_parameters():
        assert torch.equal(momentum[parameter], torch.full_like(parameter, 0.5))
        torch.testing.assert_close(parameter, before[name] - 0.05, rtol=0, atol=1e-15)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_frozen_weights_stay_and_the_others_move_as_in_the_virtual_pipeline(
    recipe: Recipe,
) -> None:
    one, two = _resnet(), _resnet()
    for model in (one, two):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("conv1" not in name)
    frozen = {n: p.clone() for n, p in one.named_parameters() if not p.requires_grad}
    assert len(frozen) == 9
    batches = _batches(6)
    config = Config(lr=0.1)
    _run_virtual(one, _parts(one, _BOUNDS[2]), recipe, config, [batches])
    _run(_parts(two, _BOUNDS[2]), recipe, config, [batches])
    for name, tensor in one.state_dict().items():
        assert torch.equal(two.state_dict()[name], tensor), name
    found = dict(two.named_parameters())
    assert all(torch.equal(found[name], tensor) for name, tensor in frozen.items())


def test_the_loss_is_smoothed_by_what_the_config_says() -> None:
    net = _pair()
    x, labels = torch.randn(5, 3).double(), torch.tensor([0, 1, 1, 0, 1])
    logits = net(x)
    expected = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.3)
    wanted = torch.autograd.grad(expected / 5, list(net.parameters()))
    stage = eager_stage([net], 0, Recipe(), Config(label_smoothing=0.3), _FP64, is_first=True)
    stage.fill(0.1, 0.0)
    stage.forward(0, x, None)
    sums, dx = stage.finish(0, labels, 5, 0.0)
    assert dx is None  # nobody wants the gradient of images
    assert float(sums.loss) == pytest.approx(float(expected.detach()), rel=1e-12)
    for parameter, gradient in zip(net.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("postpones", [True, False])
def test_weights_get_their_gradients_at_the_update_where_they_can_wait(postpones: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).double()
    stage = eager_stage([net], 0, Recipe(), Config(), _FP64, is_first=False, postpones=postpones)
    before = [p.detach().clone() for p in net.parameters()]
    stage.fill(0.1, 0.0)
    y = stage.forward(0, torch.randn(2, 3, 8, 8).double(), None)
    assert stage.backward(0, torch.ones_like(y), 0.0) is not None
    assert all((p.grad is None) == postpones for p in net.parameters())
    stage.update(0.1)
    assert all(p.grad is not None for p in net.parameters())
    moved = [not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)]
    assert all(moved)


def test_a_first_stage_has_nobody_to_hurry_for() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3)).double()
    stage = eager_stage([net], 0, Recipe(), Config(), _FP64, is_first=True, postpones=True)
    stage.fill(0.1, 0.0)
    y = stage.forward(0, torch.randn(2, 3, 8, 8).double(), None)
    assert stage.backward(0, torch.ones_like(y), 0.0) is None
    assert net[0].weight.grad is not None


# ---------------------------------------------------------------- networks of users


def _twice() -> nn.Sequential:
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 4, 3, padding=1)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        conv,
        nn.Tanh(),
        conv,
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(64, 10),
    ).double()


def _tied() -> nn.Sequential:
    net = _twice()
    net[3] = nn.Conv2d(4, 4, 3, padding=1).double()
    net[3].weight = net[1].weight
    return net


def _frozen_first() -> nn.Sequential:
    net = _twice()
    net[0].requires_grad_(False)
    net[1].requires_grad_(False)
    return net


def _frozen_middle() -> nn.Sequential:
    net = _twice()
    net[4].requires_grad_(False)
    return net


@pytest.mark.parametrize("first", [1, 4], ids=["shared later", "shared first"])
@pytest.mark.parametrize("make", [_twice, _tied, _frozen_first, _frozen_middle])
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_shared_and_frozen_weights_are_read_and_moved_as_in_plain_training(
    make: Callable[[], nn.Sequential], recipe: Recipe, first: int
) -> None:
    """A layer that is used twice, one tied to another, a stage without anything to train."""
    config, batches = Config(lr=0.1), _batches(6)
    one, two, plain = make(), make(), make()
    last = 5 if first == 4 else 4
    parts = [[list(net)[:first], list(net)[first:last], list(net)[last:]] for net in (one, two)]
    _, seen = _run_virtual(one, parts[0], recipe, config, [batches])
    line, losses = _run(parts[1], recipe, config, [batches])
    assert losses == seen
    before = dict(plain.named_parameters())
    for (name, parameter), (_, ours) in zip(
        two.named_parameters(), one.named_parameters(), strict=True
    ):
        assert isinstance(parameter, nn.Parameter), name
        assert torch.equal(parameter, ours), name
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name
    trained = {p for p in two.parameters() if p.requires_grad}
    held = [p for stage in line.stages for g in stage.optimizer.param_groups for p in g["params"]]
    assert set(held) == trained  # the network's own, not copies
    assert len(held) == len(trained)
