"""A worker's local steps: what a plain loop computes, through a service and its rules too."""

import copy
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from convoy.assembly import Given, make_job
from convoy.config import Config
from convoy.data.batches import join_batches
from convoy.data.images import ImageSet, TrainTest
from convoy.data.load import wrap_data
from convoy.models.dropout import drop_by
from convoy.monitor.events import EventStream
from convoy.outer.job import Job
from convoy.outer.server import Answer, ParameterServer
from convoy.outer.service_plan import make_server
from convoy.outer.stop import StopRequest
from convoy.outer.work import Order, Span
from convoy.outer.worker import Worker, held_samples, pass_order
from convoy.randomness import epoch_order
from convoy.tracking import untracked
from tests.conftest import make_stripes

SAMPLES, BATCH, STEPS = 300, 40, 20  # seven and a half steps an epoch: some reach over its end
SPEEDS = (400.0, 300.0, 200.0, 100.0)  # shares of 16, 12, 8 and 4
DATA = wrap_data(make_stripes(SAMPLES), make_stripes(20, seed=1))


def network(*, norm: bool = False, dropout: bool = True) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        *([nn.BatchNorm2d(4)] if norm else []),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        *([nn.Dropout(0.2)] if dropout else []),
        nn.Linear(100, 2),
    )


def config(**options: Any) -> Config:
    common: dict[str, Any] = {
        "strategy": "server",
        "epochs": 3,
        "batch": BATCH,
        "lr": 0.1,
        "augment": "crop+flip",
        "precision": "fp64",
        "memory_format": "contiguous",
        "device": "cpu",
        "threads": 1,
        "min_share": 1,
        "exchange_every": 1,
        "overlap": False,
    }
    return Config(**{**common, **options})


def job_of(settings: Config, model: nn.Module | None = None, data: TrainTest = DATA) -> Job:
    made = Given(copy.deepcopy(model if model is not None else network()), data)
    nowhere = Path(os.devnull)
    return make_job(settings, made, nowhere, EventStream([]), StopRequest(), untracked)


def plain_training(settings: Config, steps: int, model: nn.Module | None = None) -> list[Tensor]:
    """Return the weights after each step of one machine that has every batch to itself."""
    job = job_of(settings, model)
    optimizer = torch.optim.SGD(
        job.model.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    epochs = [
        job.train.epoch(number, seed=0, augmentation=job.augmentation)
        for number in range(settings.epochs)
    ]
    after = []
    for step in range(steps):
        job.model.train()
        places = range(step * BATCH, (step + 1) * BATCH)
        cuts = [(e, [p % SAMPLES for p in places if p // SAMPLES == e]) for e in range(3)]
        batch = join_batches([epochs[e].batch(p[0], p[-1] + 1) for e, p in cuts if p])
        assert len(batch) == BATCH
        optimizer.param_groups[0]["lr"] = job.schedule.rate(step)
        optimizer.zero_grad()
        with drop_by(batch.keys):
            functional.cross_entropy(job.model(batch.images_NCHW), batch.labels).backward()
        optimizer.step()
        after.append(nn.utils.parameters_to_vector(job.model.parameters()).detach().clone())
    return after


class Team:
    """A service and its nodes in one process; their speeds are what we say."""

    def __init__(
        self, settings: Config, speeds: Sequence[float], model: nn.Module | None = None
    ) -> None:
        self._speeds = speeds
        self.workers = [Worker(job_of(settings, model), node) for node in range(len(speeds))]
        flat = self.workers[0].flat
        self.server: ParameterServer = make_server(
            settings, flat.read(), flat.weights, SAMPLES, len(speeds)
        )
        self.answers: list[Answer | None] = []
        for node, speed in enumerate(speeds):
            self.server.admit(node, "a", speed, now=0.0)
        for node in range(len(speeds)):
            self.server.pull(node, "a", 0, now=0.0)
            self.answers.append(self.server.answer_to(node, "a", 0))
        self.shares: list[tuple[int, ...]] = []

    def exchange(self, number: int, order: Sequence[int] | None = None) -> None:
        """Let every node do its order and hand in, in some sequence."""
        shares = dict.fromkeys(range(len(self.workers)), 0)
        for node in order or range(len(self.workers)):
            answer, worker = self.answers[node], self.workers[node]
            if answer is None or answer.order is None:
                continue
            worker.take(answer.vector, answer.order)
            vector, report = worker.run(answer.order)
            shares[node] = report.samples
            told = replace(report, busy_s=answer.order.samples / self._speeds[node], step_s=0.0)
            self.server.submit(node, "a", number, answer.version, vector, told, now=float(number))
            worker.run_ahead(answer.order)
        for node in range(len(self.workers)):
            self.answers[node] = self.server.answer_to(node, "a", number)
        self.shares.append(tuple(shares.values()))

    @property
    def weights(self) -> Tensor:
        return self.server.vector[: self.workers[0].flat.weights]


def furthest(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


# ------------------------------------------------------------------ exactness


@pytest.mark.parametrize("dropout", [False, True])
def test_unequal_nodes_in_one_beat_are_one_machine_with_momentum(dropout: bool) -> None:
    model = network(dropout=dropout)
    expected = plain_training(config(), STEPS, model)
    team = Team(config(), SPEEDS, model)
    for step in range(STEPS):
        team.exchange(step + 1, order=[(step + k) % 4 for k in range(4)])
        assert furthest(team.weights, expected[step]) < 1e-10, step
    assert set(team.shares) == {(16, 12, 8, 4)}
    assert furthest(team.weights, plain_training(config(lr=0.1001), STEPS, model)[-1]) > 1e-6


def test_without_its_momentum_a_node_is_not_one_machine() -> None:
    team = Team(config(momentum_on_pull="reset"), SPEEDS)
    for step in range(4):
        team.exchange(step + 1)
    assert furthest(team.weights, plain_training(config(), 4)[-1]) > 1e-4


def test_one_nodes_steps_are_a_plain_loops_to_the_bit() -> None:
    expected = plain_training(config(), STEPS)
    team = Team(config(rule="fedavg", exchange_every=STEPS), [1.0])
    team.exchange(1)
    worker = team.workers[0]
    assert torch.equal(worker.flat.read(), expected[-1])
    assert furthest(team.weights, expected[-1]) < 1e-15  # base + (new - base) is rounded


@pytest.mark.parametrize("rule", ["fedavg", "mean", "beat", "delta-poly", "agwu:quality=off"])
@pytest.mark.parametrize("every", [1, 4])
def test_one_node_with_any_rule_is_plain_training(rule: str, every: int) -> None:
    expected = plain_training(config(), STEPS)
    team = Team(config(rule=rule, exchange_every=every, local_batch=BATCH), [1.0])
    for number in range(STEPS // every):
        team.exchange(number + 1)
        done = (number + 1) * every
        assert furthest(team.weights, expected[done - 1]) < 1e-13


@pytest.mark.parametrize("rule", ["fedavg", "beat"])
def test_a_step_ahead_is_in_the_weights_once(rule: str) -> None:
    """Alone, nothing happens while a submission is under way: it is plain training again."""
    expected = plain_training(config(), STEPS)
    team = Team(config(rule=rule, exchange_every=3, overlap=True), [1.0])
    for number, done in enumerate((2, 5, 8, 11, 14, 17, 20), start=1):
        team.exchange(number)
        assert furthest(team.weights, expected[done - 1]) < 1e-13, done
    assert [shares for (shares,) in team.shares] == [80, 120, 120, 120, 120, 120, 120]
    assert team.server.totals.count == team.server.done == 800


def test_with_a_step_ahead_every_sample_is_counted_once_to_the_end() -> None:
    team = Team(config(exchange_every=3, overlap=True), SPEEDS)
    for number in range(1, 100):
        if team.server.is_over:
            break
        team.exchange(number)
    assert team.server.done == team.server.totals.count == 3 * SAMPLES
    assert torch.isfinite(team.weights).all()


# ------------------------------------------------------------------ the same bits


class Noisy(nn.Module):
    """Draws from torch's own generator, as a user's layer may."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.rand_like(x) if self.training else x


ORDERS = (
    Order(1, (Span(0, 0, 40), Span(0, 60, 80)), steps=2, ahead=20, done=0, meanwhile=60),
    Order(2, (Span(0, 280, 300), Span(1, 0, 25)), steps=3, carried=20, done=40, meanwhile=90),
    Order(3, (Span(2, 0, 7),), steps=1, done=150, meanwhile=7, holding=((10, 20), (50, 60))),
)


def do_orders(worker: Worker) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    found = []
    for order in ORDERS:
        vector = worker.flat.read()
        drift = torch.randn(worker.flat.weights, generator=generator, dtype=torch.float64)
        vector[: worker.flat.weights] += 0.01 * drift
        worker.take(vector, order)
        found.append(worker.run(order)[0])
        worker.run_ahead(order)
    return found


def test_the_same_orders_give_the_same_bits_whatever_was_drawn_before() -> None:
    model = nn.Sequential(Noisy(), *network(norm=True))
    runs = []
    for seed in (1, 2):
        worker = Worker(job_of(config(), model), node=3)
        torch.manual_seed(seed)
        runs.append(do_orders(worker))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    other = do_orders(Worker(job_of(config(), model), node=4))
    assert not torch.equal(runs[0][0], other[0])  # its own layers draw other numbers


# ------------------------------------------------------------------ what a report tells


def test_a_report_sums_up_the_samples_the_losses_and_the_rates() -> None:
    job = job_of(config(warmup_epochs=0.0, schedule="constant"), network(dropout=False))
    worker = Worker(job, 0)
    order = Order(1, (Span(0, 0, 30), Span(1, 5, 15)), steps=1)
    worker.take(worker.flat.read(), order)
    epochs = [job.train.epoch(n, seed=0, augmentation=job.augmentation) for n in (0, 1)]
    batch = join_batches([epochs[0].batch(0, 30), epochs[1].batch(5, 15)])
    with torch.no_grad():
        logits = job.model(batch.images_NCHW)
    _, report = worker.run(order)
    assert report.samples == 40
    assert report.correct == int((logits.argmax(1) == batch.labels).sum())
    assert report.loss == pytest.approx(float(functional.cross_entropy(logits, batch.labels)) * 40)
    assert report.rate == pytest.approx(0.1)
    assert report.busy_s > 0
    assert report.step_s == report.busy_s


def test_statistics_are_handed_in_as_they_are() -> None:
    worker = Worker(job_of(config(), network(norm=True)), 0)
    order = Order(1, (Span(0, 0, 40),), steps=2)
    before = worker.flat.read()
    worker.take(before, order)
    vector, _ = worker.run(order)
    after, weights = worker.flat.read(), worker.flat.weights
    assert torch.equal(vector[weights:], after[weights:])
    assert torch.equal(vector[:weights], after[:weights] - before[:weights])
    assert not torch.equal(after[weights:], before[weights:])


def test_steps_of_an_order_are_as_equal_as_can_be_and_none_is_empty() -> None:
    job = job_of(config())
    worker = Worker(job, 0)
    seen: list[int] = []
    gradients = job.executor.gradients

    def noted(batch: Any, divisor: float) -> Any:
        seen.append(len(batch))
        assert divisor == len(batch)
        return gradients(batch, divisor)

    job.executor.gradients = noted  # type: ignore[method-assign]
    for samples, steps in ((10, 3), (2, 5), (12, 3)):
        order = Order(1, (Span(0, 0, samples),), steps=steps)
        worker.take(worker.flat.read(), order)
        worker.run(order)
    assert seen == [4, 3, 3, 1, 1, 4, 4, 4]


def test_an_order_without_samples_hands_in_only_what_was_done_ahead() -> None:
    worker = Worker(job_of(config()), 0)
    start = worker.flat.read()
    first = Order(1, (Span(0, 0, 40), Span(0, 40, 80)), steps=1, ahead=40)
    worker.take(start, first)
    vector, _ = worker.run(first)
    done = worker.flat.read()
    worker.run_ahead(first)
    ahead = worker.flat.read() - done
    last = Order(2, (), steps=0, carried=40)
    worker.take(start + vector, last)
    vector, report = worker.run(last)
    torch.testing.assert_close(vector, ahead, rtol=0, atol=1e-15)
    assert report.samples == 40
    worker.take(start, Order(3, (), steps=0))
    vector, report = worker.run(Order(3, (), steps=0))
    assert report.samples == 0
    assert vector.abs().max() == 0


def ahead_of(worker: Worker) -> None:
    first = Order(1, (Span(0, 0, 40), Span(0, 40, 80)), steps=1, ahead=40)
    worker.take(worker.flat.read(), first)
    worker.run(first)
    worker.run_ahead(first)


def test_what_was_done_ahead_is_dropped_where_the_service_does_not_count_on_it() -> None:
    worker = Worker(job_of(config()), 0)
    ahead_of(worker)
    given_weights = torch.zeros(worker.flat.size, dtype=torch.float64)
    order = Order(2, (Span(0, 80, 90),), steps=1, carried=0)
    worker.take(given_weights, order)
    assert worker.flat.read().abs().max() == 0
    assert worker.run(order)[1].samples == 10


def test_who_starts_over_has_neither_momentum_nor_a_step_ahead() -> None:
    order = Order(2, (Span(0, 80, 90),), steps=1)
    worker, fresh = (Worker(job_of(config()), 0) for _ in range(2))
    start = worker.flat.read()
    ahead_of(worker)
    worker.start_over()
    found = []
    for one in (worker, fresh):
        one.take(start, order)
        found.append(one.run(order)[0])
    assert torch.equal(*found)


def test_the_rate_goes_on_within_an_order_as_all_nodes_do() -> None:
    worker = Worker(job_of(config(schedule="cosine", warmup_epochs=0.0)), 0)
    schedule = worker._job.schedule
    order = Order(1, (Span(0, 0, 30),), steps=3, done=80, meanwhile=120)
    assert [worker._rate(order, number) for number in range(3)] == pytest.approx(
        [schedule.rate(2), schedule.rate(3), schedule.rate(4)]
    )
    after = replace(order, steps=2, ahead=10, carried=10)
    assert [worker._rate(after, number) for number in range(3)] == pytest.approx(
        [schedule.rate(3), schedule.rate(4), schedule.rate(5)]
    )


# ------------------------------------------------------------------ which samples


@given(
    cuts=st.lists(st.integers(1, 99), max_size=6, unique=True).map(sorted),
    seed=st.integers(0, 10**6),
)
def test_holdings_cover_the_data_set_and_no_sample_twice(cuts: list[int], seed: int) -> None:
    edges = [0, *cuts, 100]
    stretches = list(pairwise(edges))
    parts = [stretches[0::2], stretches[1::2]]
    held = torch.cat([held_samples(seed, 100, part) for part in parts if part])
    assert sorted(held.tolist()) == list(range(100))


@given(holding=st.sampled_from([((0, 7),), ((3, 9), (20, 31)), ((0, 100),)]), seed=st.integers(0))
def test_a_pass_has_exactly_what_a_node_holds_in_another_order_each_time(
    holding: tuple[tuple[int, int], ...], seed: int
) -> None:
    passes = [pass_order(seed, number, 100, holding) for number in range(4)]
    held = held_samples(seed, 100, holding)
    for one in passes:
        assert one is not None
        assert sorted(one.tolist()) == sorted(held.tolist())
    assert len({tuple(one.tolist()) for one in passes if one is not None}) > 1
    again = pass_order(seed, 2, 100, holding)
    assert again is not None
    assert passes[2] is not None
    assert torch.equal(again, passes[2])


def test_without_a_holding_a_pass_is_over_everything_as_usual() -> None:
    assert pass_order(0, 0, 100, ()) is None


def test_the_samples_of_an_order_are_those_it_trains() -> None:
    worker = Worker(job_of(config()), 0)
    order = Order(1, (Span(0, 290, 300), Span(1, 0, 5)), steps=1)
    expected = torch.cat([epoch_order(0, 0, SAMPLES)[290:], epoch_order(0, 1, SAMPLES)[:5]])
    assert torch.equal(worker.samples_of(order), expected)
    assert worker.samples_of(Order(2, (), steps=0)).tolist() == []
    held = Order(3, (Span(4, 0, 5),), steps=1, holding=((10, 20), (0, 3)))
    assert torch.equal(worker.samples_of(held), held_samples(0, SAMPLES, ((10, 20), (0, 3))))


def test_samples_that_are_sent_are_trained_as_if_they_had_been_there() -> None:
    whole = DATA.train
    blank = ImageSet(
        torch.zeros_like(whole.images_NCHW), torch.zeros_like(whole.labels), whole.classes
    )
    arriving = Worker(job_of(config(), data=replace(DATA, train=blank)), 0)
    complete = Worker(job_of(config()), 0)
    start = complete.flat.read()
    for number, span in enumerate((Span(0, 0, 40), Span(0, 40, 80)), start=1):
        order = Order(number, (span,), steps=2)
        wanted = arriving.samples_of(order)
        blank.images_NCHW[wanted] = whole.images_NCHW[wanted]
        blank.labels[wanted] = whole.labels[wanted]
        found = []
        for worker in (arriving, complete):
            worker.take(start, order)
            found.append(worker.run(order)[0])
        assert torch.equal(*found)
