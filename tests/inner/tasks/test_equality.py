"""A step as tasks gives the numbers of plain PyTorch, however it is cut up.

The deepest ResNets do two steps instead of ten: each takes many seconds to be recorded.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from convoy.data.batches import Batch
from convoy.inner.tasks.step import Grain
from convoy.models.zoo import ZOO, build_model
from tests.inner.tasks.nets import (
    CLASSES,
    SHAPE,
    Twins,
    chain,
    gradients_of,
    hourglass,
    inception,
    make_batch,
    make_twins,
    threads,
)

USERS = {"inception": inception, "hourglass": hourglass}
SHAPES = {"lenet5": (1, 14, 14), "alexnet": (3, 15, 15), "vgg16": (3, 32, 32)}
SHAPES |= {"vgg16-bn": (3, 32, 32)}
DEEP = ("resnet110", "resnet224", "resnet362")


def _train(
    twins: Twins,
    count: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    steps: int = 10,
    rate: float = 0.05,
) -> None:
    """Ask for gradients once and do some steps."""
    twins.gradients(make_batch(99, count, shape, dtype))
    for number in range(steps):
        twins.step(make_batch(number, count, shape, dtype), rate)
    twins.assert_equal()
    assert twins.told == []
    assert twins.tasks.why_not is None


def _train_float32(twins: Twins, count: int, shape: tuple[int, ...], rate: float) -> None:
    """Do ten steps and compare all numbers together.

    A rectifier's sign flips by rounding, which changes gradients of single layers in the third
    digit, with plain PyTorch as well; what has become of the weights differs by far less.
    """
    first = _numbers(twins.plain.model)
    for number in range(10):
        batch = make_batch(number, count, shape, torch.float32)
        twins.plain.step(batch, len(batch), rate)
        with threads(twins.pool):
            twins.tasks.step(batch, len(batch), rate)
    ours, theirs = _numbers(twins.tasks.model), _numbers(twins.plain.model)
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()
    assert (ours - theirs).norm() <= 1e-2 * (theirs - first).norm()  # far less than was learnt
    assert twins.told == []


def _numbers(model: nn.Module) -> Tensor:
    return torch.cat([tensor.double().flatten() for tensor in model.state_dict().values()])


# ---------------------------------------------------------------- the zoo


@pytest.mark.parametrize("name", sorted(ZOO))
def test_gradients_and_ten_steps_of_every_network_in_float64(name: str) -> None:
    shape = SHAPES.get(name, SHAPE)
    twins = make_twins(build_model(name, shape, CLASSES, 0), Grain(3, 1 if name in DEEP else 2))
    count = 2 if name.startswith("vgg") else 7
    _train(twins, count, shape, torch.float64, steps=2 if name in DEEP else 10, rate=0.01)


@pytest.mark.parametrize("name", ["lenet5", "alexnet", "vgg16", "resnet20"])
def test_ten_steps_of_networks_in_float32(name: str) -> None:
    shape = SHAPES.get(name, SHAPE)
    twins = make_twins(build_model(name, shape, CLASSES, 0), Grain(2, 2), precision="fp32")
    _train_float32(twins, 2 if name == "vgg16" else 8, shape, 1e-4)


@pytest.mark.parametrize("name", ["vgg16-bn", "resnet56"])
def test_in_float32_deep_networks_are_as_close_to_the_truth_as_plain_pytorch(name: str) -> None:
    """Rounding grows through so many norms that two right ways differ in the third digit."""
    shape = SHAPES.get(name, SHAPE)
    model = build_model(name, shape, CLASSES, 0)
    exact = make_twins(copy.deepcopy(model), None).plain
    exact.gradients(make_batch(0, 4, shape), 4)
    twins = make_twins(model, Grain(2, 2), precision="fp32")
    twins.plain.gradients(make_batch(0, 4, shape, torch.float32), 4)
    twins.tasks.gradients(make_batch(0, 4, shape, torch.float32), 4)
    truth, plain, ours = (
        torch.cat([g.double().flatten() for g in gradients_of(m).values()])
        for m in (exact.model, twins.plain.model, twins.tasks.model)
    )
    assert (ours - truth).norm() <= 3 * (plain - truth).norm()
    assert (ours - truth).norm() <= 0.02 * truth.norm()
    assert twins.told == []


# ---------------------------------------------------------------- any model


@pytest.mark.parametrize("name", sorted(USERS))
def test_models_with_branches_in_float64(name: str) -> None:
    twins = make_twins(USERS[name](), Grain(1, 1))
    for groups, num_threads in itertools.product((1, 2, 3, 7), (1, 2, 5)):
        twins.pool = num_threads
        twins.tasks.use(Grain(groups, num_threads))
        _train(twins, 13, SHAPE, torch.float64, steps=10 if num_threads == 2 else 3)


@pytest.mark.parametrize("name", sorted(USERS))
def test_models_with_branches_in_float32(name: str) -> None:
    twins = make_twins(USERS[name](), Grain(3, 2), precision="fp32")
    _train_float32(twins, 13, SHAPE, 1e-3)


@pytest.mark.parametrize("name", sorted(USERS))
def test_the_portable_engine_gives_the_same(name: str) -> None:
    twins = make_twins(USERS[name](), Grain(3, 2), portable=True)
    _train(twins, 8, SHAPE, torch.float64)


@pytest.mark.parametrize("portable", [False, True])
def test_images_with_the_channels_last(portable: bool) -> None:
    twins = make_twins(chain(), Grain(2, 2), layout="channels_last", portable=portable)
    for number in range(10):
        batch = make_batch(number, 9)
        images = batch.images_NCHW.contiguous(memory_format=torch.channels_last)
        twins.step(Batch(images, batch.labels, batch.keys))
    twins.assert_equal()
    assert twins.told == []


def test_a_residual_network_with_the_channels_last() -> None:
    model = build_model("resnet20", SHAPE, CLASSES, 0)
    twins = make_twins(model, Grain(2, 2), layout="channels_last")
    for number in range(3):
        batch = make_batch(number, 6)
        images = batch.images_NCHW.contiguous(memory_format=torch.channels_last)
        twins.step(Batch(images, batch.labels, batch.keys), 0.01)
    twins.assert_equal()
    assert twins.told == []


class _ByColumns(nn.Module):
    """Two layers whose weights lie in memory column by column, one of them very large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.some = nn.Parameter(torch.randn(192, 256, dtype=torch.float64).t() / 16)
        self.many = nn.Parameter(torch.randn(256, 4200, dtype=torch.float64).t() / 16)
        self.last = nn.Linear(4200, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = torch.tanh(functional.linear(x.flatten(1), self.some))
        logits: Tensor = self.last(torch.tanh(functional.linear(features, self.many)))
        return logits


@pytest.mark.parametrize("portable", [False, True])
def test_weights_that_lie_column_by_column(portable: bool) -> None:
    twins = make_twins(_ByColumns(), Grain(8, 2), portable=portable)
    _train(twins, 16, SHAPE, torch.float64, steps=2)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16])
def test_any_size_of_batch(count: int) -> None:
    twins = make_twins(chain(dropout=True), Grain(4, 2))
    for number in range(3):
        twins.step(make_batch(number, count))
    twins.assert_equal()
    assert twins.told == []


@pytest.mark.parametrize("norm", [False, True])
def test_an_empty_batch(norm: bool) -> None:
    twins = make_twins(chain(norm=norm))
    for number, count in enumerate((6, 0, 6, 0)):
        for executor in (twins.plain, twins.tasks):
            executor.step(make_batch(number, count), 6, 0.1)
    twins.assert_equal()
    assert twins.told == []


def test_a_short_last_batch() -> None:
    twins = make_twins(inception(), Grain(3, 2))
    for number in range(9):
        twins.step(make_batch(number, 5 if number % 3 == 2 else 12))
    twins.assert_equal()
    assert twins.told == []


def test_how_a_step_is_cut_up_is_chosen_by_default() -> None:
    twins = make_twins(inception(), None)
    for number in range(4):
        twins.step(make_batch(number, 20))
    twins.assert_equal()
    assert twins.told == []


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.0, "nesterov": False},
        {"momentum": 0.8, "nesterov": False, "weight_decay": 0.0},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    ],
)
def test_ways_to_update_and_smoothed_labels(smoothing: float, options: dict[str, Any]) -> None:
    twins = make_twins(chain(dropout=True), Grain(3, 2), smoothing=smoothing, **options)
    for number, rate in enumerate((0.1, 0.05, 0.2, 0.0, 0.1)):
        twins.step(make_batch(number, 11), rate)
    twins.assert_equal()
    assert twins.told == []


def test_dropout_goes_by_the_keys_of_the_samples() -> None:
    twins = make_twins(chain(dropout=True), Grain(3, 2))
    batch = make_batch(0)
    twins.gradients(batch)
    first = twins.tasks.gradients(batch, 10).loss
    assert batch.keys is not None
    other = Batch(batch.images_NCHW, batch.labels, batch.keys + 1)
    twins.gradients(other)
    assert not torch.equal(twins.tasks.gradients(other, 10).loss, first)
    assert torch.equal(twins.tasks.gradients(batch, 10).loss, first)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_bf16_comes_close(layout: str) -> None:
    twins = make_twins(inception(), Grain(2, 2), precision="bf16", layout=layout, tolerance=0.1)
    for number in range(3):
        batch = make_batch(number, 12, dtype=torch.float32)
        theirs = float(twins.plain.step(batch, 12, 0.01).loss)
        assert float(twins.tasks.step(batch, 12, 0.01).loss) == pytest.approx(theirs, rel=0.03)
    ours, plain = _numbers(twins.tasks.model), _numbers(twins.plain.model)
    assert (ours - plain).norm() <= 0.01 * plain.norm()
    assert all(p.dtype == torch.float32 for p in twins.tasks.model.parameters())
    assert twins.told == []


class Shortcut(nn.Module):
    """Adds something to what a norm gives, before or after a rectifier."""

    def __init__(self, add: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.last, self.add = nn.Linear(192, CLASSES), add

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.add(self.norm(self.conv(x)), x).flatten(1))
        return logits


@pytest.mark.parametrize("precision", ["fp64", "bf16"])  # in which a shortcut is not rounded
@pytest.mark.parametrize(
    "add",
    [
        lambda y, x: torch.relu(y + x),
        lambda y, x: torch.relu(x + y),
        lambda y, x: torch.relu(y + y),
        lambda y, x: torch.relu(y + x) + y,
        lambda y, x: torch.relu(y + x[:, :1]),
        lambda y, x: torch.relu(torch.add(y, x, alpha=2)),
        lambda y, x: torch.relu(y + 1) * x,
        lambda y, x: torch.relu(y) + y.tanh(),
        lambda y, x: torch.relu(torch.relu(y) + x),
    ],
)
def test_shortcuts_of_all_kinds(add: Callable[[Tensor, Tensor], Tensor], precision: str) -> None:
    torch.manual_seed(0)
    tolerance = 1e-10 if precision == "fp64" else 0.1
    twins = make_twins(Shortcut(add), precision=precision, tolerance=tolerance)
    for number in range(3):
        twins.step(make_batch(number, 9, dtype=twins.plain.arithmetic.dtype), 0.01)
    if precision == "fp64":
        twins.assert_equal()
    assert twins.told == []


# ---------------------------------------------------------------- large layers


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("portable", [False, True])
def test_large_layers_are_cut_by_neurons(
    groups: int, portable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoy.inner.tasks.wide.WIDE", 500)
    monkeypatch.setattr("convoy.inner.tasks.program._TILE", 300)
    monkeypatch.setattr("convoy.inner.tasks.program._ADDED", 100)
    monkeypatch.setattr("convoy.inner.tasks.program._FEWEST", 100)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.Flatten(),
        nn.Linear(216, 23),
        nn.BatchNorm1d(23),
        nn.ReLU(),
        nn.Linear(23, 31, bias=False),
        nn.Tanh(),
        nn.Linear(31, CLASSES),
    )
    twins = make_twins(model, Grain(groups, 2), portable=portable)
    _train(twins, 11, SHAPE, torch.float64)


# ---------------------------------------------------------------- bit by bit


@pytest.mark.parametrize("name", sorted(USERS))
def test_runs_and_numbers_of_threads_agree_bit_by_bit(name: str) -> None:
    """Each run starts afresh; what differs is who does what when."""
    twins = make_twins(USERS[name](), Grain(1, 1), precision="fp32")
    model, start = twins.tasks.model, copy.deepcopy(twins.tasks.model.state_dict())
    for groups in (1, 3):
        results = []
        for num_threads in (1, 1, 2, 5, 5):
            model.load_state_dict(start)
            twins.tasks.optimizer.state.clear()
            twins.tasks.use(Grain(groups, num_threads))
            with threads(num_threads):
                for number in range(4):
                    twins.tasks.step(make_batch(number, 13, dtype=torch.float32), 13, 0.05)
            results.append(copy.deepcopy(model.state_dict()))
        for other in results[1:]:
            for key, tensor in results[0].items():
                assert torch.equal(tensor, other[key]), (key, groups)
    assert twins.told == []


def test_two_executors_agree_bit_by_bit() -> None:
    def trained() -> dict[str, Tensor]:
        twins = make_twins(inception(), Grain(3, 2), precision="fp32")
        with threads(2):
            for number in range(4):
                twins.tasks.step(make_batch(number, 13, dtype=torch.float32), 13, 0.05)
        return dict(twins.tasks.model.state_dict())

    first, second = trained(), trained()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
