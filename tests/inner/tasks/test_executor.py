"""The executor `tasks` keeps to the contract of executors."""

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from convoy.config import Config
from convoy.errors import ConvoyError
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.executor import EXECUTORS, count_correct, grain_of
from convoy.inner.optimizer import make_optimizer, momentum_tensors, restore_momentum
from convoy.inner.tasks import executor as module
from convoy.inner.tasks.executor import TasksExecutor
from convoy.inner.tasks.step import Grain, group_sizes
from convoy.models.dropout import key_dropout
from convoy.trainer import fit
from tests.conftest import make_stripes
from tests.inner.tasks.nets import (
    assert_same,
    chain,
    gradients_of,
    inception,
    make_batch,
    make_twins,
    threads,
)


def test_the_registry_gives_it() -> None:
    arithmetic = Arithmetic(torch.device("cpu"), "fp64")
    model = arithmetic.place(chain())
    make = EXECUTORS.get("tasks")
    told: list[str] = []
    optimizer = make_optimizer(model, Config())
    executor = make(model, optimizer, arithmetic, label_smoothing=0.0, tell=told.append)
    executor.step(make_batch(0), 10, 0.1)
    assert isinstance(executor, TasksExecutor)
    assert executor.why_not is None
    assert told == []


# ---------------------------------------------------------------- two halves


def test_gradients_may_be_replaced_before_the_update() -> None:
    twins = make_twins(inception(), Grain(3, 2))
    for number in range(4):
        twins.gradients(make_batch(number))
        for executor in (twins.plain, twins.tasks):
            parameters = list(executor.model.parameters())
            flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]) * 0.5
            pieces = flat.split([p.numel() for p in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.grad = piece.view_as(parameter)  # as a sum over nodes does
        twins.update(0.1)
        twins.assert_equal()


def test_halves_and_whole_steps_take_turns() -> None:
    twins = make_twins(chain(dropout=True), Grain(2, 2))
    for number in range(6):
        if number % 2:
            twins.step(make_batch(number), 0.1)
        else:
            twins.gradients(make_batch(number))
            twins.update(0.1)
        twins.assert_equal()
    assert twins.told == []


def test_gradients_do_not_pile_up_and_follow_the_divisor() -> None:
    twins = make_twins(chain(), Grain(3, 2))
    batch = make_batch(0)
    first = twins.tasks.gradients(batch, 10)
    once = gradients_of(twins.tasks.model)
    second = twins.tasks.gradients(batch, 20)
    halves = {name: gradient * 2 for name, gradient in gradients_of(twins.tasks.model).items()}
    assert_same(halves, once, 1e-13)
    assert torch.equal(first.loss, second.loss)


def test_sums_can_be_read_many_steps_later() -> None:
    twins = make_twins(chain(), Grain(3, 2))
    pairs = []
    for number in range(5):
        batch = make_batch(number)
        pairs.append((twins.plain.step(batch, 10, 0.1), twins.tasks.step(batch, 10, 0.1)))
    for theirs, ours in pairs:
        assert float(ours.loss) == pytest.approx(float(theirs.loss), rel=1e-11)
        assert count_correct([ours]) == count_correct([theirs])


def test_evaluation_is_that_of_eager_and_learns_nothing() -> None:
    twins = make_twins(inception(), Grain(2, 2))
    for number in range(4):
        twins.step(make_batch(number))
        former = copy.deepcopy(twins.tasks.model.state_dict())
        for mirrored in (False, True):
            ours = twins.tasks.evaluate(make_batch(50), mirrored=mirrored)
            theirs = twins.plain.evaluate(make_batch(50), mirrored=mirrored)
            assert float(ours.loss) == pytest.approx(float(theirs.loss), rel=1e-10)
        for name, tensor in twins.tasks.model.state_dict().items():
            assert torch.equal(tensor, former[name])
    twins.assert_equal()


# ---------------------------------------------------------------- what others put in place


def test_restored_momentum_counts() -> None:
    twins = make_twins(chain(), Grain(3, 2))
    for number in range(2):
        twins.step(make_batch(number))
    saved = {
        name: tensor.clone() + 0.1
        for name, tensor in momentum_tensors(twins.plain.optimizer, twins.plain.model).items()
    }
    for executor in (twins.plain, twins.tasks):
        restore_momentum(executor.optimizer, executor.model, saved)
    for number in range(3):
        twins.step(make_batch(number))
    twins.assert_equal()


def test_dropped_momentum_starts_from_zero() -> None:
    twins = make_twins(chain(), Grain(3, 2))
    for number in range(4):
        twins.plain.optimizer.state.clear()
        twins.tasks.optimizer.state.clear()
        twins.step(make_batch(number))
    twins.assert_equal()


def test_loaded_weights_and_statistics_count() -> None:
    twins, other = make_twins(inception(), Grain(3, 2)), make_twins(inception(), Grain(1, 1))
    for number in range(2):
        twins.step(make_batch(number))
        other.plain.step(make_batch(number + 20), 10, 0.2)
    for executor in (twins.plain, twins.tasks):
        executor.model.load_state_dict(other.plain.model.state_dict())
    for number in range(2):
        twins.step(make_batch(number))
    twins.assert_equal()


@pytest.mark.parametrize("what", ["weight", "buffer", "all"])
def test_tensors_that_lie_elsewhere_are_found(what: str) -> None:
    twins = make_twins(chain(), Grain(3, 2))
    for number in range(4):
        for executor in (twins.plain, twins.tasks) if number == 2 else ():
            norm = executor.model.get_submodule("1")
            assert isinstance(norm, nn.BatchNorm2d)
            if what == "weight":
                norm.weight.data = norm.weight.data * 0.5
            elif what == "buffer":
                assert norm.running_mean is not None
                norm.running_mean = norm.running_mean + 3
            else:
                state = {n: t.clone() for n, t in executor.model.state_dict().items()}
                executor.model.load_state_dict(state, assign=True)
                executor.optimizer = make_optimizer(executor.model, Config())
                if isinstance(executor, TasksExecutor):
                    executor._eager.optimizer = executor.optimizer
        twins.step(make_batch(number))
    twins.assert_equal()


def test_another_executor_goes_on_from_a_saved_state() -> None:
    twins, later = make_twins(chain(), Grain(3, 2)), make_twins(chain(), Grain(2, 1))
    for number in range(2):
        twins.step(make_batch(number))
    momentum = momentum_tensors(twins.tasks.optimizer, twins.tasks.model)
    assert momentum.keys() == dict(twins.tasks.model.named_parameters()).keys()
    for executor in (later.plain, later.tasks):
        executor.model.load_state_dict(twins.tasks.model.state_dict())
        restore_momentum(executor.optimizer, executor.model, momentum)
    for number in range(2, 5):
        twins.step(make_batch(number))
        later.step(make_batch(number))
    later.assert_equal()
    assert_same(later.tasks.model.state_dict(), twins.plain.model.state_dict(), 1e-10)


# ---------------------------------------------------------------- sizes and grains


def test_more_sizes_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STEPS_KEPT", 3)
    twins = make_twins(chain(dropout=True), Grain(3, 2))
    for number in range(14):
        twins.step(make_batch(number, 3 + number % 6))
        assert len(twins.tasks._steps) <= 3
    twins.assert_equal()
    assert twins.told == []


def test_another_grain_may_be_used_from_some_step_on() -> None:
    twins = make_twins(inception(), Grain(1, 1))
    for number, groups in enumerate((1, 4, 2)):
        twins.tasks.use(Grain(groups, 2, priority="level" if groups == 4 else "rank"))
        twins.step(make_batch(number))
    twins.assert_equal()
    with pytest.raises(ValueError, match="part of the recording"):
        twins.tasks.use(Grain(2, 2, norms="group"))


def test_a_share_of_a_batch_is_fewer_groups() -> None:
    config = Config(executor="tasks", groups=8, batch=32)
    grain = grain_of(config)
    assert grain is not None
    twins = make_twins(chain(), replace(grain, threads=1))
    for samples, groups in ((32, 8), (12, 3), (3, 1)):
        twins.step(make_batch(samples, samples))
        step = twins.tasks._steps[samples, True]
        assert len({i.group for i in step._program.instructions if i.group >= 0}) == groups
    twins.assert_equal()


@pytest.mark.parametrize("samples", range(1, 30))
@pytest.mark.parametrize("groups", [1, 2, 3, 7, 40])
def test_groups_are_of_equal_size_up_to_one(samples: int, groups: int) -> None:
    sizes = group_sizes(samples, groups)
    assert sum(sizes) == samples
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) <= groups
    assert min(sizes) >= min(2, samples)


# ---------------------------------------------------------------- what happened


@pytest.mark.parametrize("portable", [False, True])
def test_a_trace_shows_a_step_and_changes_nothing(portable: bool) -> None:
    twins = make_twins(inception(), Grain(3, 2), portable=portable)
    for number in range(3):
        former = copy.deepcopy(twins.tasks.model.state_dict())
        with threads(2):
            timeline = twins.tasks.trace(make_batch(number), 10)
        for name, tensor in twins.tasks.model.state_dict().items():
            assert torch.equal(tensor, former[name]), name
        twins.step(make_batch(number))
        twins.assert_equal()
    assert timeline.threads == 2
    spans = {span.task: span for span in timeline.spans}
    assert sorted(spans) == list(range(len(spans)))
    assert {span.kind for span in timeline.spans} >= {"forward", "error", "gradient", "update"}
    for span in timeline.spans:
        assert 0 <= span.thread < 2
        assert span.ready_s <= span.start_s <= span.end_s
        assert all(spans[other].end_s <= span.start_s for other in span.after)
    by_thread: dict[int, list[tuple[float, float]]] = {}
    for span in timeline.spans:
        by_thread.setdefault(span.thread, []).append((span.start_s, span.end_s))
    for runs in by_thread.values():
        runs.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(runs))


def test_there_is_nothing_to_trace_without_tasks() -> None:
    model = chain()
    for parameter in model.get_submodule("0").parameters():
        parameter.requires_grad_(False)
    twins = make_twins(model, Grain(3, 2))
    with pytest.raises(ConvoyError, match=r"no tasks to trace: .* frozen"):
        twins.tasks.trace(make_batch(0), 10)


# ---------------------------------------------------------------- with the rest


class Small(nn.Sequential):
    """A network for images of 12 x 12."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, stride=2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(96, 2),
        )


@pytest.mark.parametrize(
    "strategy",
    [
        {"strategy": "single"},
        {"strategy": "lockstep", "nodes": 2, "allocation": "uniform"},  # each node its statistics
    ],
)
def test_a_whole_run_gives_the_weights_of_eager(strategy: dict[str, Any], tmp_path: Path) -> None:
    found: dict[str, dict[str, Tensor]] = {}
    for executor in ("eager", "tasks"):
        model = key_dropout(Small())
        run = fit(
            model,
            make_stripes(200),
            make_stripes(40, seed=1),
            quiet=True,
            out=str(tmp_path / executor),
            epochs=2,
            batch=32,
            lr=0.05,
            device="cpu",
            precision="fp64",
            memory_format="contiguous",
            augment="none",
            executor=executor,
            **strategy,
        )
        assert run.state == "finished"
        found[executor] = {name: p.detach() for name, p in model.named_parameters()}
    assert_same(found["tasks"], found["eager"], 1e-9)
