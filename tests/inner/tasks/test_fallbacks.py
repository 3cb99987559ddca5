"""What cannot be done as tasks is told in one sentence, once, and done as plain PyTorch does it."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from convoy.data.batches import Batch
from convoy.inner.tasks import engines
from convoy.inner.tasks.engine import NativeEngine, NoEngineError
from convoy.inner.tasks.portable import PortableEngine
from convoy.inner.tasks.step import Grain
from tests.inner.tasks.nets import (
    CLASSES,
    Twins,
    assert_same,
    chain,
    make_batch,
    make_twins,
    threads,
)

ENDING = "; training goes on with the executor 'eager'"


class Between(nn.Module):
    """Does something to an image's features between two layers."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3), nn.Linear(144, CLASSES)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.function(self.first(x)).flatten(1))
        return logits


def _between(function: Callable[[Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Between(function)


def _assert_goes_on(twins: Twins, reason: str) -> None:
    """Train both and see that one sentence was said."""
    for number in range(4):
        batch = make_batch(number)
        torch.manual_seed(number)
        theirs = twins.plain.step(batch, 10, 0.05)
        torch.manual_seed(number)
        ours = twins.tasks.step(batch, 10, 0.05)
        assert torch.equal(ours.loss, theirs.loss)
        for executor in (twins.plain, twins.tasks):
            torch.manual_seed(number)
            executor.gradients(batch, 10)
            executor.update(0.01)
    ours_state, theirs_state = twins.tasks.model.state_dict(), twins.plain.model.state_dict()
    for name, tensor in theirs_state.items():
        assert torch.equal(ours_state[name], tensor), name
    (sentence,) = twins.told
    assert reason in sentence
    assert sentence.endswith(ENDING)
    assert "\n" not in sentence
    assert twins.tasks.why_not == sentence.removesuffix(ENDING)


# ---------------------------------------------------------------- networks


TABLE = torch.linspace(0, 1, 6, dtype=torch.float64)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x if x.sum().item() > 0 else -x, "it decides by the values it computes"),
        (lambda x: x if bool((x > 0).any()) else -x, "it decides by the values it computes"),
        (lambda x: x + torch.rand(6, dtype=x.dtype), "random numbers of its own (aten.rand"),
        (lambda x: functional.dropout(x, 0.5), "random numbers of its own (aten.bernoulli"),
        (lambda x: x * TABLE, "holds tensors that are neither weights nor buffers"),
        (lambda x: x - x.mean(0), "aten.mean.dim mixes samples"),
        (lambda x: x - x.sum(0), "needs a sum over all samples in mid-step"),
        (lambda x: x / x.abs().max(), "mixes samples"),
        (lambda x: x.softmax(0), "its gradients would differ from PyTorch's"),
        (lambda x: x.roll(1, 0), "its gradients would differ from PyTorch's"),
        (lambda x: x.flip(0), "its gradients would differ from PyTorch's"),
        (lambda x: x / len(x), "its gradients would differ from PyTorch's"),
        (lambda x: x if len(x) > 2 else -x, "other things for another number of samples"),
        (lambda x: (x.flatten(1) @ x.flatten(1).T).tanh() @ x.flatten(1), "compares samples"),
        (lambda x: torch.cat(x.unbind(0)[::-1]).view_as(x), "another number of samples"),
        (lambda x: torch.cat(x.chunk(2, 0)[::-1]), "this network cannot be run as tasks"),
    ],
)
def test_a_network_that_is_no_list_of_operations_on_samples(
    function: Callable[[Tensor], Tensor], reason: str
) -> None:
    twins = make_twins(_between(function))
    _assert_goes_on(twins, reason)


def test_statistics_over_all_steps() -> None:
    model = chain()
    norm = model.get_submodule("1")
    assert isinstance(norm, nn.BatchNorm2d)
    norm.momentum = None
    _assert_goes_on(make_twins(model), "'1' averages its statistics over all steps")


def test_frozen_weights() -> None:
    model = chain()
    model.get_parameter("0.weight").requires_grad_(False)
    _assert_goes_on(make_twins(model), "some of its weights are frozen")


def test_weights_that_are_not_reached_stay_as_they_are() -> None:
    _assert_goes_on(make_twins(_Partly()), "its gradients would differ")


class _Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(192, CLASSES), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.used(x.flatten(1))
        return logits


class _Fixed(nn.BatchNorm2d):
    """Uses the statistics it came with, in training as well."""

    def train(self, mode: bool = True) -> "_Fixed":
        del mode
        super().train(False)
        return self


def test_a_norm_that_does_not_learn_its_statistics() -> None:
    model = chain()
    setattr(model, "1", _Fixed(5).eval())
    _assert_goes_on(make_twins(model), "a batch-norm learns without its own statistics")


def test_a_network_that_cannot_be_copied() -> None:
    twins = make_twins(chain())
    twins.tasks.model.lock = threading.Lock()  # type: ignore[assignment]
    _assert_goes_on(twins, "a step as tasks failed: TypeError cannot pickle '_thread.lock' object")


def test_a_network_that_fails_fails_as_with_eager() -> None:
    twins = make_twins(chain())
    batch = make_batch(0, shape=(7, 8, 8))
    with pytest.raises(RuntimeError, match="expected input"):
        twins.tasks.step(batch, 10, 0.1)
    assert len(twins.told) == 1


def test_statistics_of_a_single_number_are_refused_as_with_eager() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
    twins = make_twins(model)
    twins.step(make_batch(0))
    for executor in (twins.plain, twins.tasks):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            executor.step(make_batch(1, 1), 1, 0.1)


def test_dropout_without_keys_draws_anew_as_with_eager() -> None:
    twins = make_twins(chain(dropout=True))
    batch = make_batch(0)
    batch = Batch(batch.images_NCHW, batch.labels)
    for number in range(3):
        torch.manual_seed(number)
        theirs = twins.plain.step(batch, 10, 0.1).loss
        torch.manual_seed(number)
        assert torch.equal(twins.tasks.step(batch, 10, 0.1).loss, theirs)


# ---------------------------------------------------------------- no compiler


def test_without_a_compiler_tasks_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NoEngineError("the task engine could not be compiled (no g++)")

    monkeypatch.setattr(engines, "load_engine", missing)
    twins = make_twins(chain(dropout=True))
    for number in range(4):
        twins.step(make_batch(number))
        twins.gradients(make_batch(number))
        twins.update(0.1)
    twins.assert_equal()
    (sentence,) = twins.told
    assert "could not be compiled (no g++)" in sentence
    assert "no faster than eager" in sentence
    assert twins.tasks.why_not is None
    (step, *_) = twins.tasks._steps.values()
    assert isinstance(step._engine, PortableEngine)


def test_a_compiler_that_fails_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.utils import cpp_extension

    from convoy.inner.tasks import engine

    def fails(**options: Any) -> None:
        raise RuntimeError("Error building extension\nmany lines")

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "load", fails)
    engine.load_engine.cache_clear()
    try:
        with pytest.raises(NoEngineError, match=r"compiled \(Error building extension\)$"):
            engine.load_engine()
    finally:
        monkeypatch.undo()
        engine.load_engine.cache_clear()


def test_a_lock_of_a_process_that_was_killed_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch.utils import cpp_extension

    from convoy.inner.tasks import engine

    seen: list[bool] = []

    def load(build_directory: str, **options: Any) -> None:
        seen.append(Path(build_directory, "lock").exists())
        Path(build_directory, "lock").touch()  # and is killed

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(cpp_extension, "load", load)
    engine._build()
    engine._build()
    assert seen == [False, False]


def test_what_the_engine_cannot_take_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(instruction: object) -> str:
        raise NoEngineError("an argument cannot be handed over to the task engine (sparse)")

    monkeypatch.setattr("convoy.inner.tasks.engine.encode", refuse)
    _assert_goes_on(make_twins(chain()), "an argument cannot be handed over")


# ---------------------------------------------------------------- failures in a step


class Failing:
    """Lets an engine fail from its n-th run on, in the middle of the work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception, after: int) -> None:
        self.count, run = 0, NativeEngine.run

        def fail(engine: NativeEngine, threads: int, section: int) -> None:
            self.count += 1
            run(engine, threads, section)  # weights and statistics have moved already
            if self.count > after:
                raise error

        monkeypatch.setattr(NativeEngine, "run", fail)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            RuntimeError("not enough memory: you tried to allocate 9 bytes\nmore"),
            "not enough memory: you",
        ),
        (MemoryError(), "MemoryError"),
        (NotImplementedError("Could not run 'aten::foo' on CPU"), "Could not run 'aten::foo'"),
    ],
)
@pytest.mark.parametrize("after", [0, 1, 2])  # in the check, while measuring, in the step
def test_a_failure_at_the_start_leaves_everything_as_it_was(
    error: Exception, reason: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(monkeypatch, error, after)
    twins = make_twins(chain())
    _assert_goes_on(twins, f"a step as tasks failed: {reason}")
    assert failing.count == after + 1


def test_too_little_memory_for_a_later_size(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = make_twins(chain())
    for number in range(3):
        twins.step(make_batch(number))
    former = copy.deepcopy(twins.tasks.model.state_dict())
    failing = Failing(monkeypatch, RuntimeError("not enough memory"), 0)
    batch = make_batch(9, 20)
    with threads(2):
        twins.tasks.step(batch, 20, 0.0)
    twins.plain.step(batch, 20, 0.0)
    assert failing.count == 1
    twins.assert_equal()
    for name, parameter in twins.tasks.model.named_parameters():
        assert torch.equal(parameter, former[name])
    for number in range(3):
        twins.step(make_batch(number))
    twins.assert_equal()
    assert twins.told == [f"a step as tasks failed: not enough memory{ENDING}"]


def test_a_wrong_label_is_the_users_mistake_and_changes_nothing() -> None:
    twins = make_twins(chain(norm=False))
    batch = make_batch(0)
    batch.labels[3] = CLASSES + 5
    former = copy.deepcopy(twins.tasks.model.state_dict())
    with pytest.raises(IndexError, match="out of bounds"):
        twins.tasks.step(batch, 10, 0.1)
    assert_same(twins.tasks.model.state_dict(), former, 0.0)


# ---------------------------------------------------------------- operations of the user


@torch.library.custom_op("convoy_tests::doubled", mutates_args=())
def _doubled(x: Tensor) -> Tensor:
    return x * 2


@_doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _back(context: Any, pull: Tensor) -> Tensor:
    del context
    return _doubled(pull)  # type: ignore[no-any-return]


_doubled.register_autograd(_back)


def test_an_operation_with_a_gradient_written_in_python() -> None:
    _assert_goes_on(make_twins(_between(lambda x: _doubled(x)), Grain(3, 2)), "cannot be traced")
