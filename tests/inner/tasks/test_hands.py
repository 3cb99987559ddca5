"""Steps take our own convolutions and pools where these are for, with PyTorch's results."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from convoy.data.batches import Batch
from convoy.inner.tasks import engines
from convoy.inner.tasks.convolutions import Hands
from convoy.inner.tasks.executor import TasksExecutor
from convoy.inner.tasks.step import Grain
from convoy.models.zoo import build_model
from tests.inner.tasks.nets import CLASSES, Twins, gradients_of, make_batch, make_twins, threads
from tests.inner.tasks.truth import LAST


def _names(tasks: TasksExecutor) -> set[str]:
    plan = tasks._plan
    assert plan is not None
    return {part.operation.op._schema.name.removeprefix("convoy::") for part in plan.parts}


def _give(monkeypatch: pytest.MonkeyPatch, hands: Hands) -> None:
    """Use our own convolutions as on another processor, even if they would not pay here."""
    monkeypatch.setattr(engines, "find_hands", lambda: hands)


@pytest.fixture
def _any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    _give(monkeypatch, Hands(lanes=16))


def _batch(number: int, count: int, shape: tuple[int, ...]) -> Batch:
    made = make_batch(number, count, shape, torch.float32)
    images = made.images_NCHW.contiguous(memory_format=LAST)
    return Batch(images, made.labels, made.keys)


_NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int], set[str]]] = {
    "resnet20": (
        lambda: build_model("resnet20", (3, 16, 16), CLASSES, 0),
        (3, 16, 16),
        {"winograd_parts", "winograd_error", "winograd_back", "winograd_gradient"}
        | {"direct_parts", "direct_error", "direct_gradient", "rectified_parts"},
    ),
    "lenet5": (
        lambda: build_model("lenet5", (1, 28, 28), CLASSES, 0),
        (1, 28, 28),
        {"direct", "direct_error", "direct_gradient", "bias_gradient", "max_pool", "max_pool_back"},
    ),
    "vgg16": (
        lambda: build_model("vgg16", (3, 32, 32), CLASSES, 0),
        (3, 32, 32),
        {"winograd", "winograd_gradient", "direct", "max_pool", "max_pool_back"},
    ),
    "alexnet": (
        lambda: build_model("alexnet", (3, 32, 32), CLASSES, 0),
        (3, 32, 32),
        {"winograd", "winograd_gradient"},
    ),
}


def _all_gradients(model: nn.Module) -> Tensor:
    return torch.cat([g.double().flatten() for g in gradients_of(model).values()])


@pytest.mark.usefixtures("_any_processor")
@pytest.mark.parametrize("name", sorted(_NETS))
def test_gradients_are_as_close_to_the_truth_as_pytorchs(name: str) -> None:
    make, shape, used = _NETS[name]
    batch = _batch(3, 6, shape)  # no rectifier is given a number that rounding could move past 0
    exact = make_twins(make(), None).plain
    exact.gradients(Batch(batch.images_NCHW.double(), batch.labels, batch.keys), 6)
    twins = make_twins(make(), Grain(2, 2), precision="fp32", layout="channels_last")
    for executor in (twins.plain, twins.tasks):
        executor.gradients(batch, 6)
    assert used <= _names(twins.tasks)
    models = (exact.model, twins.plain.model, twins.tasks.model)
    truth, plain, ours = (_all_gradients(model) for model in models)
    assert (ours - truth).norm() <= max(3 * (plain - truth).norm(), 1e-6 * truth.norm())
    assert (ours - truth).norm() <= 1e-5 * truth.norm()
    assert twins.told == []


@pytest.mark.usefixtures("_any_processor")
@pytest.mark.parametrize("name", sorted(_NETS))
def test_ten_steps_are_pytorchs(name: str) -> None:
    make, shape, _ = _NETS[name]
    twins = make_twins(make(), Grain(3, 2), precision="fp32", layout="channels_last")
    for number in range(10):
        batch = _batch(number, 6, shape)
        twins.plain.step(batch, 6, 1e-4)
        with threads(2):
            twins.tasks.step(batch, 6, 1e-4)
    ours, theirs = (_weights(e.model) for e in (twins.tasks, twins.plain))
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    assert twins.told == []


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


_BY_PAIRS = {"pairs_error", "pairs_gradient"}


@pytest.mark.parametrize(
    ("name", "tiles", "used"),
    [
        ("resnet20", False, _NETS["resnet20"][2]),
        ("resnet20", True, {"pairs_parts", "pairs_back", *_BY_PAIRS, "rectified_parts"}),
        ("vgg16", True, {"pairs", *_BY_PAIRS, "direct", "max_pool"}),
    ],
)
def test_bf16_is_as_close_to_the_truth_as_pytorchs(
    name: str, tiles: bool, used: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _give(monkeypatch, Hands(16, tiles))
    make, shape, _ = _NETS[name]
    batch = _batch(0, 8, shape)
    exact = make_twins(make(), None).plain
    exact.gradients(Batch(batch.images_NCHW.double(), batch.labels, batch.keys), 8)
    twins = make_twins(make(), Grain(2, 2), precision="bf16", layout="channels_last", tolerance=0.1)
    for executor in (twins.plain, twins.tasks):
        executor.gradients(batch, 8)
    assert twins.told == []
    assert used <= _names(twins.tasks)
    assert tiles != any(called.startswith("winograd") for called in _names(twins.tasks))
    models = (exact.model, twins.plain.model, twins.tasks.model)
    truth, plain, ours = (_all_gradients(model) for model in models)
    assert (ours - truth).norm() <= 1.5 * (plain - truth).norm()


def test_tiles_are_for_bf16_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _give(monkeypatch, Hands(16, tiles=True))
    make, shape, used = _NETS["resnet20"]
    twins = make_twins(make(), Grain(2, 2), precision="fp32", layout="channels_last")
    twins.tasks.gradients(_batch(0, 4, shape), 4)
    assert used <= _names(twins.tasks)
    assert not {"pairs_parts", *_BY_PAIRS} & _names(twins.tasks)


_Branch = Callable[[Tensor, nn.Module, nn.Module], Tensor]


class _Branches(nn.Module):
    """A norm's output that more than one convolution asks for, and a pool whose windows overlap."""

    def __init__(self, branch: _Branch) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.one = nn.Conv2d(16, 16, 3, padding=1)
        self.two = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.last, self.branch = nn.Linear(16, CLASSES), branch

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(torch.relu(self.norm(self.stem(x))), self.one, self.two)
        logits: Tensor = self.last(y.mean((2, 3)))
        return logits


def _branches(branch: _Branch) -> nn.Module:
    torch.manual_seed(0)
    model = _Branches(branch)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    for conv in (model.one, model.two):  # a recording wants all weights to learn
        for name, held in list(conv.named_parameters()):
            if held.grad is None:
                delattr(conv, name)
    return model


def _chain(y: Tensor, one: nn.Module, two: nn.Module) -> Tensor:
    made: Tensor = two(torch.relu(one(y)))
    return made


@pytest.mark.parametrize(("precision", "tiles"), [("fp32", False), ("bf16", False), ("bf16", True)])
def test_the_same_bits_on_any_number_of_threads_and_in_every_run(
    precision: str, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _give(monkeypatch, Hands(16, tiles))
    found = []
    for count in (1, 2, 5, 2):
        twins = make_twins(
            _branches(_chain),
            Grain(3, count),
            precision=precision,
            layout="channels_last",
            tolerance=0.1,
        )
        for number in range(3):
            with threads(count):
                twins.tasks.step(_batch(number, 7, (3, 16, 16)), 7, 0.05)
        assert twins.told == []
        found.append(_weights(twins.tasks.model))
    assert all(torch.equal(weights, found[0]) for weights in found[1:])


@pytest.mark.parametrize(("precision", "tiles"), [("fp32", False), ("bf16", True)])
def test_a_network_that_has_diverged_says_so(
    precision: str, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _give(monkeypatch, Hands(16, tiles))
    model, grain = _branches(_chain), Grain(2, 2)
    twins = make_twins(model, grain, precision=precision, layout="channels_last", tolerance=0.1)
    assert twins.tasks.step(_batch(0, 6, (3, 8, 8)), 6, 0.0).loss.isfinite()
    with torch.no_grad():
        next(twins.tasks.model.parameters())[0, 0, 0, 0] = float("nan")
    assert twins.tasks.step(_batch(1, 6, (3, 8, 8)), 6, 0.0).loss.isnan()
    assert twins.told == []


@pytest.mark.usefixtures("_any_processor")
@pytest.mark.parametrize(
    ("branch", "read_through"),
    [
        (_chain, True),
        (lambda y, one, two: one(y) + two(y), False),
        (lambda y, one, two: one(y) + y, False),
        (lambda y, one, two: one(y.tanh()) + two(y), False),
        (lambda y, one, two: one(nn.functional.max_pool2d(y, 3, 2, 1)), False),
        (lambda y, one, two: nn.functional.conv2d(y, one.weight, dilation=2), False),
    ],
)
def test_a_norms_output_is_kept_unless_one_convolution_alone_asks_for_it(
    branch: _Branch, read_through: bool
) -> None:
    model = _branches(branch)
    exact = make_twins(copy.deepcopy(model), None).plain
    twins = make_twins(model, Grain(2, 2), precision="fp32", layout="channels_last")
    batch = _batch(0, 6, (3, 8, 8))
    exact.gradients(Batch(batch.images_NCHW.double(), batch.labels, batch.keys), 6)
    twins.tasks.gradients(batch, 6)
    assert twins.told == []
    assert ("winograd_back" in _names(twins.tasks)) == read_through
    truth, ours = _all_gradients(exact.model), _all_gradients(twins.tasks.model)
    assert (ours - truth).norm() <= 1e-5 * truth.norm()


@pytest.mark.usefixtures("_any_processor")
@pytest.mark.parametrize(
    ("precision", "layout", "portable"),
    [
        ("fp64", "channels_last", False),
        ("fp32", "contiguous", False),
        ("fp32", "channels_last", True),
    ],
)
def test_other_numbers_layouts_and_engines_stay_pytorchs(
    precision: str, layout: str, portable: bool
) -> None:
    make, shape, used = _NETS["lenet5"]
    twins: Twins = make_twins(
        make(), Grain(2, 2), precision=precision, layout=layout, portable=portable
    )
    dtype = twins.plain.arithmetic.dtype
    twins.tasks.gradients(make_batch(0, 4, shape, dtype), 4)
    assert not used & _names(twins.tasks)


def test_a_processor_with_short_vectors_stays_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    _give(monkeypatch, Hands())
    make, shape, used = _NETS["lenet5"]
    twins = make_twins(make(), Grain(2, 2), precision="fp32", layout="channels_last")
    twins.tasks.gradients(_batch(0, 4, shape), 4)
    assert not used & _names(twins.tasks)
