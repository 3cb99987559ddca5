"""The executor `graph` computes what `eager` computes, from recordings.

Without a GPU a stand-in records (tests/inner/tape.py): operations at fixed addresses, which are
replayed without any Python. What only a GPU can show is in test_graph_gpu.py.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convoy.config import Config
from convoy.data.batches import Batch
from convoy.inner import fixed
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.eager import EagerExecutor
from convoy.inner.executor import EXECUTORS, SUMS_KEPT, Sums, add_up, count_correct
from convoy.inner.graph import GraphExecutor
from convoy.inner.optimizer import make_optimizer, momentum_tensors, restore_momentum
from convoy.inner.recorder import Recorder
from convoy.models.dropout import key_dropout
from convoy.randomness import sample_keys
from tests.inner.tape import Tape, TapeRecorder

_CPU = torch.device("cpu")
RATES = (0.1, 0.1, 0.05, 0.2, 0.0, 0.1, 0.3, 0.1, 0.02, 0.1)


def make_model(*, norm: bool = True, dropout: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(2, 4, 3)]
    layers += [nn.BatchNorm2d(4)] if norm else []
    layers += [nn.Tanh(), nn.Flatten()]
    layers += [nn.Dropout(0.5)] if dropout else []
    return key_dropout(nn.Sequential(*layers, nn.Linear(36, 3)))


def make_batch(number: int, count: int = 10, device: torch.device = _CPU) -> Batch:
    generator = torch.Generator().manual_seed(number)
    images = torch.randn(count, 2, 5, 5, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 3, (count,), generator=generator)
    keys = sample_keys(0, number, torch.arange(count))
    return Batch(images.to(device), labels.to(device), keys.to(device))


@dataclass(eq=False)
class Pair:
    """The same network twice: one trained operation by operation, one from recordings."""

    plain: EagerExecutor
    graph: GraphExecutor
    recorders: list[TapeRecorder] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    @property
    def tapes(self) -> list[Tape]:
        return [tape for recorder in self.recorders for tape in recorder.tapes]

    def step(self, batch: Batch, rate: float) -> tuple[Sums, Sums]:
        a = self.plain.step(batch, len(batch), rate)
        b = self.graph.step(batch, len(batch), rate)
        assert float(a.loss) == pytest.approx(float(b.loss), rel=1e-12)
        assert count_correct([a]) == count_correct([b]) == int(b.count_correct())
        assert a.count == b.count
        return a, b

    def assert_equal(self) -> None:
        mine, theirs = self.graph, self.plain
        _assert_close(mine.model.state_dict(), theirs.model.state_dict())
        _assert_close(
            momentum_tensors(mine.optimizer, mine.model),
            momentum_tensors(theirs.optimizer, theirs.model),
        )


def _pair(model: nn.Module | None = None, **options: Any) -> Pair:
    arithmetic = Arithmetic(_CPU, "fp64")
    one = arithmetic.place(make_model() if model is None else model)
    two = copy.deepcopy(one)
    plain = EagerExecutor(one, make_optimizer(one, Config(**options)), arithmetic)
    recorders: list[TapeRecorder] = []
    told: list[str] = []

    def make_recorder() -> Recorder:
        recorders.append(TapeRecorder())
        return recorders[-1]

    optimizer = make_optimizer(two, Config(**options))
    graph = GraphExecutor(two, optimizer, arithmetic, tell=told.append, make_recorder=make_recorder)
    return Pair(plain, graph, recorders, told)


def _assert_close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-12, atol=1e-12, msg=name)


# ---------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_ten_steps_equal_those_of_eager(nesterov: bool, momentum: float) -> None:
    pair = _pair(nesterov=nesterov and momentum > 0, momentum=momentum, weight_decay=0.01)
    for number, rate in enumerate(RATES):
        pair.step(make_batch(number), rate)
        pair.assert_equal()
    (tape,) = pair.tapes
    assert tape.replays == 9  # all but the first, which was done directly
    assert int(pair.graph.model.get_buffer("1.num_batches_tracked")) == 10
    assert pair.told == []


def test_each_size_of_batch_has_a_recording_of_its_own() -> None:
    pair = _pair()
    for number in range(12):
        pair.step(make_batch(number, 10 if number % 4 else 3), 0.1)
    pair.assert_equal()
    assert [tape.replays for tape in pair.tapes] == [8, 2]


def test_a_size_that_is_seen_once_is_not_recorded() -> None:
    pair = _pair()
    for count in (10, 10, 7):
        pair.step(make_batch(count, count), 0.1)
    pair.assert_equal()
    assert len(pair.tapes) == 1


def test_the_size_that_was_not_used_for_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed, "_SLOTS_AT_MOST", 2)
    pair = _pair()
    sizes = (4, 4, 5, 5, 4, 6, 6, 4, 5, 5)  # 5 goes when 6 comes, and is recorded anew
    for number, count in enumerate(sizes):
        pair.step(make_batch(number, count), 0.1)
    pair.assert_equal()
    assert len(pair.tapes) == 4


def test_batches_without_keys_have_a_recording_of_their_own() -> None:
    pair = _pair(make_model(dropout=False))
    for number in range(4):
        batch = make_batch(number)
        if number % 2:
            batch = Batch(batch.images_NCHW, batch.labels)
        pair.step(batch, 0.1)
    assert len(pair.tapes) == 1  # without dropout nobody asks for keys
    pair = _pair()
    for number in range(4):
        batch = make_batch(number)
        if number % 2:
            pair.graph.step(Batch(batch.images_NCHW, batch.labels), 10, 0.1)
        else:
            pair.graph.step(batch, 10, 0.1)
    assert len(pair.tapes) == 2


def test_what_a_network_draws_itself_follows_the_generator() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand_like(x) if self.training else x

    pair = _pair(nn.Sequential(Noisy(), make_model()))
    for number in range(4):
        for executor in (pair.plain, pair.graph):
            torch.manual_seed(number)
            executor.step(make_batch(number), 10, 0.1)
    pair.assert_equal()
    assert len(pair.tapes) == 1


def test_evaluation_is_that_of_eager_and_training_goes_on_after_it() -> None:
    pair = _pair()
    for number in range(4):
        pair.step(make_batch(number), 0.1)
        for mirrored in (False, True):
            a = pair.plain.evaluate(make_batch(99), mirrored=mirrored)
            b = pair.graph.evaluate(make_batch(99), mirrored=mirrored)
            assert float(a.loss) == pytest.approx(float(b.loss), rel=1e-12)
        assert not pair.graph.model.training
        pair.graph.step(make_batch(50), 10, 0.0)
        pair.plain.step(make_batch(50), 10, 0.0)
        assert pair.graph.model.training
    pair.assert_equal()


# ---------------------------------------------------------------- the two halves


def replace_gradients(model: nn.Module, factor: float) -> None:
    """Put gradients into a buffer of one's own, as a sum over nodes does."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * factor


@pytest.mark.parametrize("replaced", [False, True])
def test_the_halves_equal_those_of_eager(replaced: bool) -> None:
    pair = _pair()
    for number, rate in enumerate(RATES):
        batch = make_batch(number, 10 if number % 3 else 4)
        for executor in (pair.plain, pair.graph):
            executor.gradients(batch, 20)
            if replaced:
                replace_gradients(executor.model, 2.0)
            executor.update(rate)
        pair.assert_equal()
    assert [tape.replays for tape in pair.tapes] == [9, 5, 3]  # the update, and two sizes


def test_gradients_are_left_for_whoever_exchanges_them() -> None:
    pair = _pair()
    for number in range(4):
        a = pair.plain.gradients(make_batch(number), 7)
        b = pair.graph.gradients(make_batch(number), 7)
        assert float(a.loss) == pytest.approx(float(b.loss), rel=1e-12)
        for mine, theirs in zip(
            pair.graph.model.parameters(), pair.plain.model.parameters(), strict=True
        ):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)
            assert mine.grad.stride() == mine.stride()


def test_whoever_waits_for_gradients_is_never_called() -> None:
    pair = _pair()
    calls: list[Tensor] = []
    for parameter in pair.graph.model.parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)
    for number in range(4):
        pair.graph.gradients(make_batch(number), 10)
        pair.graph.update(0.1)
        pair.graph.step(make_batch(number), 10, 0.1)
    assert calls == []


def test_a_weight_that_is_not_reached_has_no_gradient_and_stays() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(50, 3), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.used(x.flatten(1))
            return logits

    pair = _pair(Partly())
    for number in range(4):
        pair.step(make_batch(number), 0.1)
        for executor in (pair.plain, pair.graph):
            executor.gradients(make_batch(number), 10)
            assert executor.model.get_parameter("unused.weight").grad is None
            executor.update(0.1)
    _assert_close(pair.graph.model.state_dict(), pair.plain.model.state_dict())


# ---------------------------------------------------------------- what others put in place


def test_restored_momentum_counts_and_needs_no_new_recording() -> None:
    pair = _pair()
    for number in range(3):
        pair.step(make_batch(number), 0.1)
    saved = {
        name: tensor.clone() + 0.5
        for name, tensor in momentum_tensors(pair.plain.optimizer, pair.plain.model).items()
    }
    for executor in (pair.plain, pair.graph):
        restore_momentum(executor.optimizer, executor.model, saved)
    for number in range(3):
        pair.step(make_batch(number), 0.1)
        pair.assert_equal()
    assert len(pair.tapes) == 1


def test_momentum_that_was_dropped_starts_from_zero() -> None:
    pair = _pair()
    for number in range(6):
        if number % 2:
            pair.plain.optimizer.state.clear()
            pair.graph.optimizer.state.clear()
        pair.step(make_batch(number), 0.1)
        pair.assert_equal()
    assert len(pair.tapes) == 1


def test_loaded_weights_and_statistics_count() -> None:
    pair, other = _pair(), _pair()
    for number in range(3):
        pair.step(make_batch(number), 0.1)
        other.step(make_batch(number + 50), 0.1)
    for executor in (pair.plain, pair.graph):
        executor.model.load_state_dict(other.plain.model.state_dict())
    for number in range(3):
        pair.step(make_batch(number), 0.1)
    pair.assert_equal()
    assert len(pair.tapes) == 1


def test_weights_that_lie_elsewhere_are_recorded_anew() -> None:
    pair = _pair()
    for number in range(6):
        if number == 3:
            for executor in (pair.plain, pair.graph):
                weight = executor.model.get_parameter("0.weight")
                weight.data = weight.data * 0.5
        pair.step(make_batch(number), 0.1)
        pair.assert_equal()
    assert len(pair.recorders) == len(pair.tapes) == 2


def test_another_executor_goes_on_from_a_saved_state() -> None:
    pair, later = _pair(), _pair()
    for number in range(3):
        pair.step(make_batch(number), 0.1)
    for executor in (later.plain, later.graph):
        executor.model.load_state_dict(pair.graph.model.state_dict())
        momentum = momentum_tensors(pair.graph.optimizer, pair.graph.model)
        restore_momentum(executor.optimizer, executor.model, momentum)
    for number in range(3, 7):
        pair.step(make_batch(number), 0.1)
        later.step(make_batch(number), 0.1)
    later.assert_equal()
    _assert_close(later.graph.model.state_dict(), pair.plain.model.state_dict())


# ---------------------------------------------------------------- sums that are read late


def test_sums_may_be_read_until_256_more_steps_were_done() -> None:
    pair = _pair(make_model(norm=False, dropout=False))
    batches = [make_batch(number, 2) for number in range(7)]
    expected, pending = [], []
    for number in range(3 * SUMS_KEPT):
        batch = batches[number % 7]
        plain = pair.plain.step(batch, 2, 0.01)
        expected.append((float(plain.loss), count_correct([plain])))
        pending.append(pair.graph.step(batch, 2, 0.01))
        if len(pending) > SUMS_KEPT:
            late, (loss, correct) = pending.pop(0), expected.pop(0)
            assert float(late.loss) == pytest.approx(loss, rel=1e-9)
            assert count_correct([late]) == correct
    loss, correct = add_up(pending)
    assert loss == pytest.approx(sum(value for value, _ in expected), rel=1e-9)
    assert correct == sum(count for _, count in expected)


def test_counted_and_uncounted_sums_add_up_together() -> None:
    pair = _pair()
    a, b = zip(*(pair.step(make_batch(number), 0.1) for number in range(4)), strict=True)
    assert count_correct([*a, *b]) == 2 * count_correct(a) == 2 * count_correct(b)


# ---------------------------------------------------------------- where it cannot be done


def test_without_a_gpu_it_computes_as_eager_does_and_says_so_once() -> None:
    arithmetic = Arithmetic(_CPU, "fp64")
    model = arithmetic.place(make_model())
    told: list[str] = []
    make = EXECUTORS.get("graph")
    optimizer = make_optimizer(model, Config())
    executor = make(model, optimizer, arithmetic, label_smoothing=0.0, tell=told.append)
    for number in range(3):
        executor.step(make_batch(number), 10, 0.1)
        executor.gradients(make_batch(number), 10)
        executor.update(0.1)
    assert isinstance(executor, GraphExecutor)
    assert told == ["the executor 'graph' computes as 'eager' does: it needs a GPU"]


class Looking(nn.Module):
    """Does something else when a number says so, which Python must read."""

    def forward(self, x: Tensor) -> Tensor:
        return -x if x.sum().item() > 0 else x


def test_what_cannot_be_recorded_is_computed_as_eager_does() -> None:
    pair = _pair(nn.Sequential(Looking(), make_model()))
    for number in range(4):
        pair.step(make_batch(number), 0.1)
        for executor in (pair.plain, pair.graph):
            executor.gradients(make_batch(number), 10)
            executor.update(0.1)
        pair.assert_equal()
    assert pair.told == [
        "the executor 'graph' computes as 'eager' does: "
        "operation not permitted when stream is capturing"
    ]
    assert pair.tapes == []


def test_no_memory_to_record_in_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(recorder: TapeRecorder, work: Callable[[], None]) -> Tape:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB")
        finally:
            raise RuntimeError("the capture failed")  # as its end does, after the first failure

    monkeypatch.setattr(TapeRecorder, "record", full)
    pair = _pair()
    for number in range(4):
        pair.step(make_batch(number), 0.1)
    pair.assert_equal()
    (sentence,) = pair.told
    assert sentence.endswith("CUDA out of memory. Tried 2 GiB")


def test_batch_norm_that_counts_steps_is_not_recorded() -> None:
    model = make_model()
    norm = model.get_submodule("1")
    assert isinstance(norm, nn.BatchNorm2d)
    norm.momentum = None
    pair = _pair(model)
    for number in range(3):
        pair.step(make_batch(number), 0.1)
    pair.assert_equal()
    (sentence,) = pair.told
    assert "the batch-norm '1' averages over all steps" in sentence


def test_an_error_of_the_network_is_the_users() -> None:
    pair = _pair()
    with pytest.raises(RuntimeError, match="expected input"):
        pair.graph.step(Batch(torch.zeros(2, 7, 5, 5).double(), torch.zeros(2).long()), 2, 0.1)
    assert pair.told == []
    pair.step(make_batch(0), 0.1)
    pair.assert_equal()
