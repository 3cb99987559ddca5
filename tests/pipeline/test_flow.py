"""Whole pipelines in threads: the virtual pipeline's weights, early ends, and who was busy."""

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from queue import Queue
from typing import Literal, cast

import pytest
import torch
from torch import Tensor, nn

from convoy.config import Config
from convoy.data.augment import Augmentation
from convoy.data.batches import Batches, Epoch
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.eager import EagerExecutor
from convoy.inner.executor import Sums
from convoy.inner.optimizer import make_optimizer, momentum_tensors
from convoy.models.blocks import walk_units
from convoy.models.dropout import key_dropout
from convoy.outer.membership import Group
from convoy.pipeline.delayed import DelayedExecutor, make_delayed
from convoy.pipeline.flow import Cargo, Flow, Neighbours, Times
from convoy.pipeline.forms import forms_of
from convoy.pipeline.recipe import Recipe
from convoy.pipeline.schedule import lead_of
from convoy.pipeline.traffic import Channel
from tests.conftest import make_stripes
from tests.pipeline.stages import eager_stage

_CPU = torch.device("cpu")
_FP64 = Arithmetic(_CPU, "fp64")
_BOUNDS = {1: (0, 4), 2: (0, 2, 4), 4: (0, 1, 2, 3, 4)}
_SAMPLES, _BATCH = 44, 8  # so five batches and a short one
_STEPS = 6
_SHAPE = (1, 12, 12)
_PATIENCE_S = 30.0

Order = Literal["stale", "1f1b"]


# ---------------------------------------------------------------- a group in memory


@dataclass(eq=False)
class _Work:
    """A message that is sent or wanted."""

    row: Tensor
    queue: "Queue[_Work]"
    is_wanted: bool
    arrived: threading.Event = field(default_factory=threading.Event)

    def is_completed(self) -> bool:
        return self.arrived.is_set()

    def wait(self) -> None:
        if self.is_wanted:
            sent = self.queue.get(timeout=_PATIENCE_S)
            assert sent.row.shape == self.row.shape, "a message of another length was expected"
            self.row.copy_(sent.row)
            sent.arrived.set()
        else:
            # As with gloo, a message counts as sent once its receiver has taken it.
            assert self.arrived.wait(_PATIENCE_S), "a message was sent that nobody took"


Wires = defaultdict[tuple[int, int], "Queue[_Work]"]


class _Member:
    """One rank of a group whose messages go through queues."""

    def __init__(self, rank: int, wires: Wires) -> None:
        self._rank, self._wires = rank, wires

    def start_send(self, row: Tensor, peer: int) -> _Work:
        work = _Work(row, self._wires[self._rank, peer], is_wanted=False)
        work.queue.put(work)
        return work

    def start_receive(self, row: Tensor, peer: int) -> _Work:
        return _Work(row, self._wires[peer, self._rank], is_wanted=True)

    def wait(self, work: _Work) -> None:
        work.wait()


# ---------------------------------------------------------------- networks and batches


def _make_net() -> nn.Module:
    """Return a network of four units, with statistics, and dropout that goes by samples."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        *(nn.Conv2d(4, 6, 3, stride=2), nn.Dropout(0.25), nn.ReLU()),
        *(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout2d(0.25)),
        *(nn.Flatten(), nn.Linear(24, 2)),
    )
    return _FP64.place(key_dropout(net))


def _parts(net: nn.Module, size: int) -> list[list[nn.Module]]:
    units = [unit for _, unit in walk_units(net)]
    return [units[a:b] for a, b in pairwise(_BOUNDS[size])]


def _epoch() -> Epoch:
    images = make_stripes(_SAMPLES, side=12)
    batches = Batches(images, mean=(64.0,), std=(64.0,), device=_CPU, dtype=torch.float64)
    return batches.epoch(0, seed=0, augmentation=Augmentation(padding=1, flip=True))


def _rate(update: int) -> float:
    return 0.1 / (1 + update)


def _cargo(first: int = 0, count: int = _STEPS) -> Cargo:
    return Cargo(_epoch(), first, first, count, _BATCH, _SAMPLES, 7, _rate, _STEPS)


@dataclass(eq=False)
class Run:
    """What a segment gave, stage by stage; `sent_at`: updates that it had had at each sending."""

    counts: list[int]
    times: list[Times]
    sums: list[Sums]
    busy: list[list[float]]
    waiting: list[list[float]]
    noted_by: set[int]
    most_held: list[int]
    sent_at: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))


def _run_flow(
    net: nn.Module,
    size: int,
    recipe: Recipe,
    cargo: Cargo,
    wishes: dict[int, Callable[[], bool]] | None = None,
    momentum: dict[nn.Parameter, Tensor] | None = None,
) -> Run:
    """Let a segment through a pipeline whose stages are threads."""
    wires: Wires = defaultdict(Queue)
    for rank in range(size):  # made before the threads start
        _ = wires[rank, rank + 1], wires[rank + 1, rank]
    forms = forms_of(net, _SHAPE, _FP64)
    bounds = _BOUNDS[size]
    run = Run([0] * size, [Times()] * size, [], [], [], set(), [0] * size)
    failures: list[BaseException] = []

    def channel(rank: int, peer: int, numbers: int) -> Channel | None:
        if not 0 <= peer < size:
            return None
        form = forms[bounds[max(rank, peer)] - 1]
        return Channel(cast(Group, _Member(rank, wires)), peer, form, numbers, _CPU, _CPU)

    def work(rank: int) -> None:
        def note(sums: Sums, busy: list[float], waiting: list[float]) -> None:
            run.noted_by.add(rank)
            run.sums.append(sums)
            run.busy.append(list(busy))
            run.waiting.append(list(waiting))

        def wish() -> bool:
            run.most_held[rank] = max(run.most_held[rank], stage.held)
            run.sent_at[rank].append(stage.version)  # later stages ask when they send back
            return (wishes or {}).get(rank, lambda: False)()

        lead = lead_of(recipe.order, size, rank)
        part = _parts(net, size)[rank]
        try:
            stage = eager_stage(
                part,
                lead,
                recipe,
                Config(lr=0.1),
                _FP64,
                momentum,
                is_first=rank == 0,
                postpones=rank == size - 1,
            )
            ways = Neighbours(
                from_left=channel(rank, rank - 1, 1 + 2 * size),
                to_left=channel(rank, rank - 1, 1),
                from_right=channel(rank, rank + 1, 1),
                to_right=channel(rank, rank + 1, 1 + 2 * size),
            )
            flow = Flow(stage, (rank, size), ways, cargo, wish, note)
            run.counts[rank] = flow.run()
            run.times[rank] = flow.times
            assert stage.held == 0
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _PATIENCE_S)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    assert all(wire.empty() for wire in wires.values())
    return run


def _run_virtual(net: nn.Module, size: int, recipe: Recipe, cargo: Cargo) -> list[float]:
    """Do the same without a pipeline; return the losses."""
    leads = [lead_of(recipe.order, size, stage) for stage in range(size)]
    delayed = make_delayed(net, _parts(net, size), leads, recipe, Config(lr=0.1), _FP64)
    return _feed(delayed, cargo)


def _feed(delayed: DelayedExecutor, cargo: Cargo) -> list[float]:
    """Begin with an empty pipeline, and let a segment through; return the losses."""
    last = max(0, cargo.update - 1)
    delayed.optimizer.begin_segment(_rate(last), last / _STEPS)
    delayed.optimizer.drain(_rate(last))
    losses = []
    for number, batch in zip(range(cargo.count), cargo.images(), strict=False):
        update = cargo.update + number
        delayed.optimizer.begin_update(update / _STEPS)
        losses.append(float(delayed.step(batch, len(batch), _rate(update)).loss))
    return losses


def _assert_equal(one: nn.Module, two: nn.Module) -> None:
    for name, tensor in one.state_dict().items():
        assert torch.equal(two.state_dict()[name], tensor), name


# ---------------------------------------------------------------- what holds


def _recipe(order: Order) -> Recipe:
    """Return a recipe that reads no weights as they are."""
    return Recipe(order, "coasting", "stashed", compensated=True, annealed=2.0)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("order", ["1f1b", "stale"])
@pytest.mark.parametrize(
    ("first", "count"), [(0, 6), (0, 3), (2, 4), (3, 1), (5, 1)], ids=lambda value: str(value)
)
def test_a_segment_gives_the_weights_of_the_virtual_pipeline_bit_for_bit(
    size: int, order: Order, first: int, count: int
) -> None:
    for recipe in (Recipe(order), _recipe(order)):
        one, two = _make_net(), _make_net()
        expected = _run_virtual(one, size, recipe, _cargo(first, count))
        run = _run_flow(two, size, recipe, _cargo(first, count))
        assert run.counts == [count] * size
        assert [float(sums.loss) for sums in run.sums] == expected
        samples = [min(_BATCH, _SAMPLES - start * _BATCH) for start in range(first, first + count)]
        assert [sums.count for sums in run.sums] == samples
        assert run.noted_by == {size - 1}
        _assert_equal(one, two)


def test_one_stage_is_plain_training_with_each_samples_own_dropout() -> None:
    one, two, config = _make_net(), _make_net(), Config(lr=0.1)
    plain = EagerExecutor(one, make_optimizer(one, config), _FP64)
    seen = []
    for update, batch in enumerate(_cargo().images()):
        assert batch.keys is not None
        seen.append(plain.step(batch, len(batch), _rate(update)).logits)
    run = _run_flow(two, 1, Recipe(), _cargo())
    for ours, theirs in zip(run.sums, seen, strict=True):
        assert torch.equal(cast(Tensor, ours.logits), cast(Tensor, theirs))
    _assert_equal(one, two)


@pytest.mark.parametrize("order", ["1f1b", "stale"])
def test_momentum_goes_on_from_one_segment_to_the_next(order: Order) -> None:
    one, two, recipe = _make_net(), _make_net(), _recipe(order)
    leads = [lead_of(order, 2, stage) for stage in range(2)]
    delayed = make_delayed(one, _parts(one, 2), leads, recipe, Config(lr=0.1), _FP64)
    momentum = {p: torch.zeros_like(p, requires_grad=False) for p in two.parameters()}
    for cargo in (_cargo(0, 4), _cargo(4, 2)):
        _feed(delayed, cargo)
        _run_flow(two, 2, recipe, cargo, momentum=momentum)
        _assert_equal(one, two)
    expected = momentum_tensors(delayed.optimizer, one)
    for name, parameter in two.named_parameters():
        assert torch.equal(momentum[parameter], expected[name]), name


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("order", ["1f1b", "stale"])
@pytest.mark.parametrize("who", ["first", "last"])
def test_a_wish_ends_the_segment_early_for_all_alike(size: int, order: Order, who: str) -> None:
    """Batches that are on their way are finished; the weights are those of so many batches."""
    net, asked = _make_net(), 0

    def wish() -> bool:
        nonlocal asked
        asked += 1
        return asked >= 2

    # A wish needs the way back through all stages: the segment must be longer than that.
    cargo = _long_cargo()
    run = _run_flow(net, size, Recipe(order), cargo, {0 if who == "first" else size - 1: wish})
    done = run.counts[0]
    assert run.counts == [done] * size
    assert len(run.sums) == done
    lead = lead_of(order, size, 0)
    if who == "first":
        assert done == 2
    else:
        assert 2 <= done <= 2 + lead + size
    assert done < cargo.count
    other = _make_net()
    _run_virtual(other, size, Recipe(order), _long_cargo(done))
    _assert_equal(net, other)


def _long_cargo(count: int = 22) -> Cargo:
    return Cargo(_epoch(), 0, 0, count, 2, _SAMPLES, 7, _rate, 22)


def test_a_wish_on_one_stage_ends_the_segment_with_the_batch_that_comes_in() -> None:
    run = _run_flow(_make_net(), 1, Recipe(), _cargo(), {0: lambda: True})
    assert run.counts == [1]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("order", ["1f1b", "stale"])
def test_the_last_stage_is_told_how_long_each_was_busy_and_waited(size: int, order: Order) -> None:
    run = _run_flow(_make_net(), size, Recipe(order), _long_cargo())
    assert len(run.busy) == len(run.waiting) == 22
    assert all(len(row) == size for row in [*run.busy, *run.waiting])
    for rank, times in enumerate(run.times):
        told = sum(row[rank] for row in run.busy), sum(row[rank] for row in run.waiting)
        spent = sum(times.busy.values()), times.waiting
        assert set(times.busy) == set(range(22))
        assert 0 < told[0] <= spent[0] + 1e-9
        assert told[1] <= spent[1] + 1e-9
        # What a stage does after its last forward pass is told to nobody.
        if rank == size - 1:
            assert told == pytest.approx(spent)
        assert 0 < times.per_batch < spent[0]
    assert run.times[0].waiting == 0 or size > 1


def test_only_the_last_jobs_are_kept() -> None:
    run = _run_flow(_make_net(), 2, Recipe("stale"), _long_cargo())
    kept = [f"{'FB'[back]}{batch}" for back, batch, _, _ in run.times[0].spans]
    assert kept == [
        *("F17", "B15", "F18", "B16", "F19", "B17"),
        *("F20", "B18", "F21", "B19"),
        "B20",
        "B21",
    ]
    kept = [f"{'FB'[back]}{batch}" for back, batch, _, _ in run.times[1].spans]
    assert kept == [f"{kind}{batch}" for batch in range(16, 22) for kind in "FB"]
    for times in run.times:
        for (*_, start, end), (*_, after, _) in pairwise(times.spans):
            assert 0 <= start <= end <= after


@pytest.mark.parametrize("order", ["1f1b", "stale"])
def test_no_stage_holds_more_batches_than_its_lead_and_one(order: Order) -> None:
    run = _run_flow(_make_net(), 4, Recipe(order), _long_cargo())
    # The first stage is asked when it takes a batch in, the others when they have sent one back.
    for rank, most in enumerate(run.most_held):
        assert most <= lead_of(order, 4, rank) + (rank == 0)
    assert run.most_held[1] == lead_of(order, 4, 1)


def test_what_a_batch_takes_leaves_out_those_that_find_cold_caches() -> None:
    assert Times().per_batch == 0.0
    assert Times(busy={0: 5.0}).per_batch == 5.0
    assert Times(busy={0: 5.0, 1: 3.0}).per_batch == 3.0
    assert Times(busy=dict(enumerate([9.0, 9.0, 9.0, 1.0, 2.0, 7.0]))).per_batch == 2.0


def test_batches_lie_where_the_epoch_has_them() -> None:
    cargo = _cargo(first=4, count=2)
    assert [cargo.span(number) for number in range(2)] == [(32, 40), (40, 44)]
    assert [cargo.size(number) for number in range(2)] == [8, 4]
    assert [len(batch) for batch in cargo.images()] == [8, 4]


def test_gradients_are_sent_before_the_weights_move() -> None:
    cargo = _cargo()
    run = _run_flow(_make_net(), 4, Recipe("1f1b", backward="stashed"), cargo)
    assert all(run.sent_at[rank] == list(range(cargo.count)) for rank in (1, 2, 3))


def test_the_part_of_waiting_is_that_of_the_full_pipeline() -> None:
    assert Times().waiting_part == 0.0
    assert Times(busy={0: 1.0}, done={0: 5.0}).waiting_part == 0.0
    busy = dict.fromkeys(range(6), 0.75)
    done = {0: 50.0, 1: 60.0, 2: 61.0, 3: 62.0, 4: 63.0, 5: 64.0}
    assert Times(busy=busy, done=done).waiting_part == pytest.approx(0.25)
    done = {number: 0.75 * number for number in range(6)}
    assert Times(busy=busy, done=done).waiting_part == 0.0
