"""Our own convolutions and pools are PyTorch's, and are taken where they are for."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convoy.data.batches import Batch
from convoy.inner.tasks import executor as executor_module
from convoy.inner.tasks.engine import load_engine
from convoy.inner.tasks.executor import TasksExecutor
from convoy.inner.tasks.norms import norm_back_parts, norm_parts
from convoy.inner.tasks.step import Grain
from convoy.models.zoo import build_model
from tests.inner.tasks.nets import CLASSES, Twins, gradients_of, make_batch, make_twins, threads

_OPS = torch.ops.convoy
_LAST = torch.channels_last
_PLAIN = (None, None, None)  # no norm before a convolution
_TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 6e-3}
_TYPES = pytest.mark.parametrize("dtype", list(_TOLERANCE), ids=str)


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    load_engine()


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return made.contiguous(memory_format=_LAST) if len(shape) == 4 else made


def _assert_close(ours: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    assert ours.shape == truth.shape
    assert (ours.double() - truth).norm() <= _TOLERANCE[dtype] * truth.norm()


class _Truth:
    """A convolution and its ways back in float64."""

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, pad: Any
    ) -> None:
        self._args = (list(stride), list(pad), [1, 1], False, [0, 0], 1)
        self._x, self._weight = x.double(), weight.double()
        self.y = torch.ops.aten.convolution(
            self._x, self._weight, None if bias is None else bias.double(), *self._args
        )

    def back(self, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [dy.shape[1]]
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            dy.double(), self._x, self._weight, sizes, *self._args, [True, True, True]
        )
        return found


# ---------------------------------------------------------------- Winograd's

_WINOGRAD = pytest.mark.parametrize(
    ("samples", "inputs", "outputs", "height", "width"),
    [
        (8, 16, 16, 32, 32),
        (3, 32, 32, 16, 16),
        (5, 64, 64, 8, 8),
        (1, 16, 48, 2, 2),
        (2, 48, 16, 6, 10),
        (2, 80, 64, 4, 38),  # wider than a block, a number of inputs that is not a common one
        (2, 16, 128, 2, 130),
    ],
)


@_TYPES
@_WINOGRAD
def test_short_products_give_a_convolution_and_its_ways_back(
    samples: int, inputs: int, outputs: int, height: int, width: int, dtype: torch.dtype
) -> None:
    x = _random(samples, inputs, height, width, dtype=dtype)
    weight = _random(outputs, inputs, 3, 3, dtype=dtype, seed=1)
    bias = _random(outputs, dtype=dtype, seed=2)
    dy = _random(samples, outputs, height, width, dtype=dtype, seed=3)
    truth = _Truth(x, weight, bias, (1, 1), (1, 1))
    dx, dw, _ = truth.back(dy)
    forth, back = (_OPS.winograd_filters(weight, error) for error in (False, True))
    _assert_close(_OPS.winograd(x, forth, bias, *_PLAIN), truth.y, dtype)
    _assert_close(_OPS.winograd(dy, back, None, *_PLAIN), dx, dtype)
    _assert_close(_OPS.winograd_gradient(dy, x, *_PLAIN), dw, dtype)
    y, parts = _OPS.winograd_parts(x, forth, bias, *_PLAIN)
    _assert_close(y, truth.y, dtype)
    for ours, exact in zip(parts, norm_parts(truth.y), strict=True):
        _assert_close(ours, exact, dtype)


@pytest.mark.parametrize("affine", [True, False])
@_TYPES
def test_a_norm_and_a_rectifier_before_a_convolution(dtype: torch.dtype, affine: bool) -> None:
    """Read through, counted on the way back: as if the norm's output had been kept."""
    x = _random(4, 16, 6, 8, dtype=dtype)
    weight = _random(32, 16, 3, 3, dtype=dtype, seed=1)
    dy = _random(4, 32, 6, 8, dtype=dtype, seed=2)
    slope, shift = (_random(16, dtype=torch.float32, seed=s) if affine else None for s in (3, 4))
    total = torch.stack([_random(16, dtype=torch.float64, seed=5), torch.rand(16).double() + 0.5])
    norm = (total, slope, shift)
    ones, zeros = torch.ones(16), torch.zeros(16)
    wide = [t.double().view(1, -1, 1, 1) for t in (total[0], total[1])]
    a, b = (
        g.double().view(1, -1, 1, 1)
        for g in (ones if slope is None else slope, zeros if shift is None else shift)
    )
    made = ((x.double() - wide[0]) * wide[1] * a + b).clamp_min(0)
    truth = _Truth(made, weight, None, (1, 1), (1, 1))
    dx, dw, _ = truth.back(dy)
    forth, back = (_OPS.winograd_filters(weight, error) for error in (False, True))
    _assert_close(_OPS.winograd(x, forth, None, *norm), truth.y, dtype)
    _assert_close(_OPS.winograd_parts(x, forth, None, *norm)[0], truth.y, dtype)
    _assert_close(_OPS.winograd_gradient(dy, x, *norm), dw, dtype)
    flow, parts = _OPS.winograd_back(dy, back, x, *norm)
    _assert_close(flow, torch.where(made > 0, dx, 0.0), dtype)
    exact = norm_back_parts(dx, x.double(), total, made)
    for ours, sums in zip(parts, exact, strict=True):
        _assert_close(ours, sums, dtype)


def test_statistics_survive_numbers_that_are_all_far_from_zero() -> None:
    x = _random(4, 16, 8, 8, dtype=torch.float32)
    weight = _random(16, 16, 3, 3, dtype=torch.float32, seed=1) * 0.01
    bias = torch.full((16,), 1000.0)
    y, parts = _OPS.winograd_parts(x, _OPS.winograd_filters(weight, False), bias, *_PLAIN)
    for ours, exact in zip(parts, norm_parts(y), strict=True):
        assert torch.allclose(ours, exact, rtol=1e-4)


def test_what_is_no_number_stays_none_in_bf16() -> None:
    x = torch.full((1, 16, 2, 2), float("nan"), dtype=torch.bfloat16).contiguous(
        memory_format=_LAST
    )
    filters = _OPS.winograd_filters(_random(16, 16, 3, 3, dtype=torch.bfloat16), False)
    assert _OPS.winograd(x, filters, None, *_PLAIN).isnan().all()


# ---------------------------------------------------------------- few channels, any stride

_DIRECT = pytest.mark.parametrize(
    ("shape", "outputs", "size", "stride", "padding"),
    [
        ((3, 3, 32, 32), 16, (3, 3), (1, 1), (1, 1)),
        ((2, 16, 32, 32), 32, (3, 3), (2, 2), (1, 1)),
        ((2, 32, 16, 16), 64, (3, 3), (2, 2), (1, 1)),
        ((3, 1, 28, 28), 6, (5, 5), (1, 1), (2, 2)),  # two neighbours make a vector
        ((3, 6, 14, 14), 16, (5, 5), (1, 1), (0, 0)),
        ((2, 5, 13, 11), 20, (4, 3), (3, 2), (2, 1)),
        ((2, 16, 9, 9), 32, (1, 1), (2, 2), (0, 0)),  # a stride that skips numbers
        ((2, 48, 7, 8), 10, (3, 3), (1, 1), (1, 1)),
        ((2, 3, 32, 32), 4, (11, 11), (4, 4), (5, 5)),
        ((2, 2, 5, 6), 3, (2, 2), (1, 2), (0, 1)),
        ((2, 4, 4, 4), 1, (4, 4), (1, 1), (0, 0)),
        ((1, 2, 3, 3), 2, (2, 3), (2, 3), (1, 2)),
    ],
)


def _together(channels: int, count: int) -> int:
    return next((n for n in (4, 2) if channels * n <= 16 and count % n == 0), 1)


@_TYPES
@_DIRECT
def test_row_by_row_gives_a_convolution_and_its_ways_back(
    shape: tuple[int, int, int, int],
    outputs: int,
    size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    _, inputs, height, width = shape
    x = _random(*shape, dtype=dtype)
    weight = _random(outputs, inputs, *size, dtype=dtype, seed=1)
    bias = _random(outputs, dtype=dtype, seed=2)
    truth = _Truth(x, weight, bias, stride, padding)
    across = truth.y.shape[3]
    dy = _random(*truth.y.shape, dtype=dtype, seed=3)
    dx, dw, db = truth.back(dy)
    window = [*size, *stride, *padding]
    for many in {1, _together(outputs, across)}:
        filters = _OPS.direct_filters(weight, [*window, many], False)
        y = _OPS.direct(x, filters, bias, outputs, [*window, many])
        _assert_close(y, truth.y, dtype)
        _assert_close(_OPS.direct_gradient(dy, x, [*window, many]), dw, dtype)
    for many in {1, _together(inputs, width) if stride == (1, 1) else 1}:
        filters = _OPS.direct_filters(weight, [*window, many], True)
        found = _OPS.direct_error(dy, filters, inputs, [height, width], [*window, many])
        _assert_close(found, dx, dtype)
    filters = _OPS.direct_filters(weight, [*window, 1], False)
    y, parts = _OPS.direct_parts(x, filters, bias, outputs, [*window, 1])
    _assert_close(y, truth.y, dtype)
    for ours, exact in zip(parts, norm_parts(truth.y), strict=True):
        _assert_close(ours, exact, dtype)
    _assert_close(_OPS.bias_gradient(dy), db, dtype)


# ---------------------------------------------------------------- pools


@_TYPES
@pytest.mark.parametrize("size", [(2, 2), (3, 2), (1, 3)])
@pytest.mark.parametrize("shape", [(2, 6, 28, 28), (3, 16, 7, 9), (1, 20, 5, 6), (2, 1, 4, 3)])
def test_a_pool_is_torchs_also_where_numbers_are_equal(
    shape: tuple[int, ...], size: tuple[int, int], dtype: torch.dtype
) -> None:
    x = _random(*shape, dtype=dtype).mul(2).round()  # many are equal: the first one wins
    x = x.contiguous(memory_format=_LAST).requires_grad_()
    theirs = nn.functional.max_pool2d(x, size)
    dy = _random(*theirs.shape, dtype=dtype, seed=1)
    theirs.backward(dy)
    y, places = _OPS.max_pool(x.detach(), size)
    assert torch.equal(y, theirs)
    assert x.grad is not None
    assert torch.equal(_OPS.max_pool_back(dy, places, x.detach(), size), x.grad)


def test_what_is_no_number_wins_a_pool() -> None:
    x = _random(1, 3, 4, 4, dtype=torch.float32)
    x[0, 1, 0, 1] = float("nan")
    y, places = _OPS.max_pool(x, (2, 2))
    assert y[0, 1, 0, 0].isnan()
    assert places[0, 1, 0, 0] == 1
    assert y.isnan().sum() == 1


# ---------------------------------------------------------------- in a step


def _names(tasks: TasksExecutor) -> set[str]:
    plan = tasks._plan
    assert plan is not None
    return {part.operation.op._schema.name.removeprefix("convoy::") for part in plan.parts}


@pytest.fixture
def _any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use our own convolutions here even if they would not pay."""
    monkeypatch.setattr(executor_module, "vector_lanes", lambda: 16)


def _batch(number: int, count: int, shape: tuple[int, ...]) -> Batch:
    made = make_batch(number, count, shape, torch.float32)
    images = made.images_NCHW.contiguous(memory_format=_LAST)
    return Batch(images, made.labels, made.keys)


_NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, int, int], set[str]]] = {
    "resnet20": (
        lambda: build_model("resnet20", (3, 16, 16), CLASSES, 0),
        (3, 16, 16),
        {"winograd", "winograd_parts", "winograd_back", "winograd_gradient", "direct_parts"}
        | {"direct_error", "direct_gradient", "rectified_parts"},
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
    batch = _batch(0, 6, shape)
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


@pytest.mark.usefixtures("_any_processor")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_bits_on_any_number_of_threads_and_in_every_run(precision: str) -> None:
    make, shape, _ = _NETS["resnet20"]
    found = []
    for count, _ in itertools.product((1, 2, 5), range(2)):
        twins = make_twins(
            make(), Grain(3, count), precision=precision, layout="channels_last", tolerance=0.1
        )
        for number in range(3):
            with threads(count):
                twins.tasks.step(_batch(number, 7, shape), 7, 0.05)
        assert twins.told == []
        found.append(_weights(twins.tasks.model))
    assert all(torch.equal(weights, found[0]) for weights in found[1:])


@pytest.mark.usefixtures("_any_processor")
def test_bf16_is_as_close_to_the_truth_as_pytorchs() -> None:
    make, shape, used = _NETS["resnet20"]
    batch = _batch(0, 8, shape)
    exact = make_twins(make(), None).plain
    exact.gradients(Batch(batch.images_NCHW.double(), batch.labels, batch.keys), 8)
    twins = make_twins(make(), Grain(2, 2), precision="bf16", layout="channels_last", tolerance=0.1)
    for executor in (twins.plain, twins.tasks):
        executor.gradients(batch, 8)
    assert used <= _names(twins.tasks)
    models = (exact.model, twins.plain.model, twins.tasks.model)
    truth, plain, ours = (_all_gradients(model) for model in models)
    assert (ours - truth).norm() <= 1.5 * (plain - truth).norm()


class _Branches(nn.Module):
    """A norm's output that more than one convolution asks for, and a pool whose windows overlap."""

    def __init__(self, branch: Callable[[Tensor, nn.Module, nn.Module], Tensor]) -> None:
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


@pytest.mark.usefixtures("_any_processor")
@pytest.mark.parametrize(
    ("branch", "read_through"),
    [
        (lambda y, one, two: two(torch.relu(one(y))), True),
        (lambda y, one, two: one(y) + two(y), False),
        (lambda y, one, two: one(y) + y, False),
        (lambda y, one, two: one(y.tanh()) + two(y), False),
        (lambda y, one, two: one(nn.functional.max_pool2d(y, 3, 2, 1)), False),
        (lambda y, one, two: nn.functional.conv2d(y, one.weight, dilation=2), False),
    ],
)
def test_a_norms_output_is_kept_unless_one_convolution_alone_asks_for_it(
    branch: Callable[[Tensor, nn.Module, nn.Module], Tensor], read_through: bool
) -> None:
    torch.manual_seed(0)
    model = _Branches(branch)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    for conv in (model.one, model.two):  # a recording wants all weights to learn
        for name, held in list(conv.named_parameters()):
            if held.grad is None:
                delattr(conv, name)
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
    monkeypatch.setattr(executor_module, "vector_lanes", lambda: 0)
    make, shape, used = _NETS["lenet5"]
    twins = make_twins(make(), Grain(2, 2), precision="fp32", layout="channels_last")
    twins.tasks.gradients(_batch(0, 4, shape), 4)
    assert not used & _names(twins.tasks)


# ---------------------------------------------------------------- memory


def test_memory_is_kept_for_the_next_step() -> None:
    x = _random(4, 16, 8, 8, dtype=torch.float32)
    filters = _OPS.winograd_filters(_random(16, 16, 3, 3, dtype=torch.float32, seed=1), False)
    first = _OPS.winograd(x, filters, None, *_PLAIN)
    address, kept = first.data_ptr(), first.clone()
    second = _OPS.winograd(x, filters, None, *_PLAIN)
    assert second.data_ptr() != address  # while the first one lives
    del first
    assert _OPS.winograd(x, filters, None, *_PLAIN).data_ptr() == address
    assert torch.equal(second, kept)
