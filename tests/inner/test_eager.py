"""The plain executor computes what the formulas say."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from convoy.config import Config
from convoy.data.batches import Batch
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.eager import EagerExecutor
from convoy.inner.executor import EXECUTORS, Executor, count_correct
from convoy.inner.optimizer import make_optimizer
from convoy.models.dropout import key_dropout
from convoy.randomness import sample_keys

_CPU = torch.device("cpu")


def _model(*, norm: bool = False, dropout: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(2, 4, 3)]
    layers += [nn.BatchNorm2d(4)] if norm else []
    layers += [nn.Tanh(), nn.Flatten()]
    layers += [nn.Dropout(0.5)] if dropout else []
    return key_dropout(nn.Sequential(*layers, nn.Linear(36, 3)))


def _batch(count: int = 10, dtype: torch.dtype = torch.float64, *, keyed: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 2, 5, 5, dtype=torch.float64, generator=generator).to(dtype)
    keys = sample_keys(0, 0, torch.arange(count)) if keyed else None
    return Batch(images, torch.randint(0, 3, (count,), generator=generator), keys)


def _part(batch: Batch, span: slice) -> Batch:
    keys = None if batch.keys is None else batch.keys[span]
    return Batch(batch.images_NCHW[span], batch.labels[span], keys)


def _executor(
    model: nn.Module, precision: str = "fp64", smoothing: float = 0.0, **options: Any
) -> Executor:
    arithmetic = Arithmetic(_CPU, precision)
    arithmetic.place(model)
    optimizer = make_optimizer(model, Config(**options))
    make = EXECUTORS.get("eager")
    return make(model, optimizer, arithmetic, label_smoothing=smoothing, tell=print)


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad.clone()
    return found


def _assert_close(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=tolerance, atol=tolerance), name


def test_the_registry_gives_the_eager_executor() -> None:
    assert isinstance(_executor(_model()), EagerExecutor)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradients_over_the_batch_size_are_those_of_the_mean_loss(
    norm: bool, smoothing: float
) -> None:
    model, batch = _model(norm=norm), _batch()
    executor = _executor(model, smoothing=smoothing)
    twin = copy.deepcopy(model).train()
    executor.gradients(batch, len(batch))
    loss = functional.cross_entropy(
        twin(batch.images_NCHW), batch.labels, label_smoothing=smoothing
    )
    loss.backward()
    _assert_close(_gradients(model), _gradients(twin))


def test_gradients_of_two_halves_add_up_to_those_of_the_whole() -> None:
    model, batch = _model(dropout=True), _batch(keyed=True)
    executor = _executor(model)
    whole_sums = executor.gradients(batch, len(batch))
    whole = _gradients(model)
    halves, sums = [], []
    for span in (slice(0, 3), slice(3, 10)):
        sums.append(executor.gradients(_part(batch, span), len(batch)))
        halves.append(_gradients(model))
    _assert_close({name: halves[0][name] + halves[1][name] for name in whole}, whole)
    assert float(sums[0].loss + sums[1].loss) == pytest.approx(float(whole_sums.loss), rel=1e-12)
    assert count_correct(sums) == count_correct([whole_sums])
    assert sums[0].count + sums[1].count == whole_sums.count == 10


def test_gradients_do_not_pile_up_over_calls() -> None:
    model, batch = _model(), _batch()
    executor = _executor(model)
    executor.gradients(batch, 10)
    first = _gradients(model)
    executor.gradients(batch, 10)
    _assert_close(_gradients(model), first, 0.0)


def test_the_divisor_divides_the_gradients_but_not_the_sums() -> None:
    model, batch = _model(), _batch()
    executor = _executor(model)
    plain = executor.gradients(batch, 1)
    first = _gradients(model)
    divided = executor.gradients(batch, 4)
    _assert_close({name: grad / 4 for name, grad in first.items()}, _gradients(model))
    assert torch.equal(plain.loss, divided.loss)


def test_loss_and_counts_are_sums_over_the_samples() -> None:
    model, batch = _model(), _batch()
    executor = _executor(model)
    logits = model(batch.images_NCHW).detach()
    expected = sum(
        -float(torch.log_softmax(row, 0)[label])
        for row, label in zip(logits, batch.labels.tolist(), strict=True)
    )
    correct = sum(
        int(row.argmax()) == label for row, label in zip(logits, batch.labels.tolist(), strict=True)
    )
    for sums in (executor.gradients(batch, 10), executor.evaluate(batch)):
        assert float(sums.loss) == pytest.approx(expected, rel=1e-12)
        assert count_correct([sums]) == correct
        assert sums.count == 10
        assert not sums.loss.requires_grad


def test_label_smoothing_spreads_part_of_the_target_in_training_only() -> None:
    model, batch = _model(), _batch()
    executor = _executor(model, smoothing=0.3)
    logs = torch.log_softmax(model(batch.images_NCHW).detach(), 1)
    target = functional.one_hot(batch.labels, 3).double() * 0.7 + 0.3 / 3
    assert float(executor.gradients(batch, 10).loss) == pytest.approx(
        float(-(target * logs).sum()), rel=1e-12
    )
    plain = functional.nll_loss(logs, batch.labels, reduction="sum")
    assert float(executor.evaluate(batch).loss) == pytest.approx(float(plain), rel=1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
def test_updates_follow_the_formula_of_sgd_with_momentum(nesterov: bool) -> None:
    momentum, decay = 0.8, 0.01
    model = _model()
    executor = _executor(model, momentum=momentum, weight_decay=decay, nesterov=nesterov)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    buffers = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for rate in (0.1, 0.05, 0.2):
        executor.gradients(_batch(), 10)
        for name, gradient in _gradients(model).items():
            slope = gradient + decay * weights[name]
            buffers[name] = momentum * buffers[name] + slope
            move = slope + momentum * buffers[name] if nesterov else buffers[name]
            weights[name] = weights[name] - rate * move
        executor.update(rate)
        _assert_close({name: p.detach() for name, p in model.named_parameters()}, weights)


def test_a_step_with_a_rate_of_zero_moves_nothing() -> None:
    model = _model()
    executor = _executor(model)
    former = copy.deepcopy(model.state_dict())
    executor.gradients(_batch(), 10)
    executor.update(0.0)
    _assert_close(dict(model.state_dict()), dict(former), 0.0)


def test_training_and_evaluation_switch_the_networks_mode() -> None:
    model = _model(norm=True)
    executor = _executor(model)
    executor.evaluate(_batch())
    assert not any(module.training for module in model.modules())
    executor.gradients(_batch(), 10)
    assert all(module.training for module in model.modules())


def test_evaluation_changes_neither_weights_nor_statistics_nor_gradients() -> None:
    model = _model(norm=True, dropout=True)
    executor = _executor(model)
    former = copy.deepcopy(model.state_dict())
    executor.evaluate(_batch(keyed=True))
    _assert_close(dict(model.state_dict()), dict(former), 0.0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_mirrored_evaluation_is_the_mean_over_image_and_mirror_image() -> None:
    model, batch = _model(norm=True), _batch()
    executor = _executor(model)
    model.eval()
    images = batch.images_NCHW
    mirror = torch.stack([image[:, :, [4, 3, 2, 1, 0]] for image in images])
    logits = (model(images) + model(mirror)).detach() / 2
    sums = executor.evaluate(batch, mirrored=True)
    expected = functional.cross_entropy(logits, batch.labels, reduction="sum")
    assert float(sums.loss) == pytest.approx(float(expected), rel=1e-12)
    assert count_correct([sums]) == int((logits.argmax(1) == batch.labels).sum())
    assert float(sums.loss) != pytest.approx(float(executor.evaluate(batch).loss), rel=1e-6)


def test_dropout_goes_by_the_keys_of_the_batch() -> None:
    model = _model(dropout=True)
    executor = _executor(model)
    batch = _batch(keyed=True)
    first = executor.gradients(batch, 10).loss
    torch.rand(5)
    assert torch.equal(executor.gradients(batch, 10).loss, first)
    other = Batch(batch.images_NCHW, batch.labels, sample_keys(0, 1, torch.arange(10)))
    assert not torch.equal(executor.gradients(other, 10).loss, first)


def test_bf16_keeps_fp32_weights_and_comes_close_to_fp32() -> None:
    exact, rough = _model(), _model()
    batch = _batch(dtype=torch.float32)
    plain, autocast = _executor(exact, "fp32"), _executor(rough, "bf16")
    for ask in ("train", "test"):
        a, b = (
            executor.gradients(batch, 10) if ask == "train" else executor.evaluate(batch)
            for executor in (plain, autocast)
        )
        assert float(b.loss) == pytest.approx(float(a.loss), rel=0.02)
        assert float(b.loss) != float(a.loss)
    for one, other in zip(_gradients(exact).values(), _gradients(rough).values(), strict=True):
        assert other.dtype == torch.float32
        assert float((one - other).norm()) < 0.05 * float(one.norm())
    autocast.update(0.1)
    assert all(parameter.dtype == torch.float32 for parameter in rough.parameters())
