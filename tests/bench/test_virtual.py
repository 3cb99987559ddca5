"""Unequal nodes in virtual time: the clock, the waiting, and the arithmetic of one machine."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from convoy.bench.virtual import Images, Outcome, Trial, Workbench, _supplies, simulate
from convoy.outer.rules.beat import Beat
from convoy.outer.rules.delta import Delta, FedBuff
from convoy.outer.rules.rule import Rule
from convoy.outer.rules.sgwu import fedavg, plain_mean
from tests.conftest import make_stripes

COUNT = 64


def images(count: int = COUNT, *, symmetric: bool = False) -> Images:
    """Return two classes; symmetric ones tell top from bottom, so that mirrors change nothing."""
    part = make_stripes(count)
    pixels = part.images_NCHW.clone()
    if symmetric:
        pixels = pixels.transpose(2, 3).contiguous()
        pixels = torch.maximum(pixels, pixels.flip(3))
    return Images(pixels, part.labels.clone())


def bench(*, symmetric: bool = False, norm: bool = False, padding: int = 0) -> Workbench:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        *([nn.BatchNorm2d(3)] if norm else []),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(75, 2),
    )
    part = images(symmetric=symmetric)
    return Workbench(model, part, part, padding=padding)


def final_weights(rule: Rule, trial: Trial) -> Tensor:
    """Return what a trial ends with, on images that no variation changes."""
    workbench = bench(symmetric=True)
    found: list[Tensor] = []
    accuracy = workbench.accuracy

    def noted(weights: Tensor) -> float:
        found.append(weights.clone())
        return accuracy(weights)

    workbench.accuracy = noted  # type: ignore[method-assign]
    simulate(workbench, rule, trial)
    return found[-1]


ALONE = Trial((2.0,), (COUNT,), (1,), epochs=12.0)
PAIR = Trial((1.0, 1.0), (COUNT // 2,) * 2, (1, 1), epochs=12.0)


def test_equal_nodes_in_beats_are_one_machine_of_their_speed() -> None:
    start = bench(symmetric=True).start
    alone, pair = final_weights(fedavg(), ALONE), final_weights(Beat(), PAIR)
    assert (alone - start).abs().max() > 0.05
    torch.testing.assert_close(pair, alone, rtol=0, atol=2e-5)
    assert (final_weights(Delta(), PAIR) - alone).abs().max() > 1e-3


def test_local_steps_are_sgds() -> None:
    workbench = bench(symmetric=True)
    start = workbench.start
    picks = torch.arange(COUNT).reshape(4, 16)
    momentum = torch.zeros_like(start)
    found, correct = workbench.local_steps(start, momentum, picks, 0.1)
    model = workbench._model
    workbench._weights.copy_(start)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    right = 0
    for pick in picks:
        optimizer.zero_grad(set_to_none=False)
        logits = model(workbench._normalise(workbench.train_set.pixels[pick]))
        labels = workbench.train_set.labels[pick]
        nn.functional.cross_entropy(logits, labels).backward()
        optimizer.step()
        right += int((logits.argmax(1) == labels).sum())
    torch.testing.assert_close(found, workbench.start, rtol=0, atol=1e-6)
    assert correct == right
    assert momentum.abs().max() > 0
    assert not torch.equal(found, start)


def test_a_trial_says_how_much_was_trained_and_merged() -> None:
    outcome = simulate(bench(), Beat(), replace(PAIR, epochs=10.0))
    assert outcome == Outcome(outcome.accuracy, versions=11, samples=10 * COUNT, waiting=0.0)
    assert 0.5 <= outcome.accuracy <= 1.0


def test_it_learns() -> None:
    outcome = simulate(bench(), Beat(), replace(PAIR, batch=(8, 8), epochs=40.0))
    assert outcome.accuracy > 0.9


def test_equal_shares_on_unequal_nodes_cost_a_quarter_in_waiting() -> None:
    trial = Trial((1.0, 0.5), (16, 16), (1, 1), epochs=12.0)
    assert simulate(bench(), plain_mean(), trial).waiting == pytest.approx(0.25, abs=0.02)
    by_speed = replace(trial, batch=(20, 10))
    assert simulate(bench(), plain_mean(), by_speed).waiting == pytest.approx(0.0, abs=0.02)
    assert simulate(bench(), Delta(), trial).waiting == pytest.approx(0.0, abs=1e-9)


def test_asynchronous_nodes_hand_in_as_often_as_they_are_fast() -> None:
    trial = Trial((3.0, 1.0), (8, 8), (2, 2), epochs=8.0)
    outcome = simulate(bench(), Delta(), trial)
    assert outcome.versions == 1 + 8 * COUNT // 16
    assert outcome.samples == 8 * COUNT


@pytest.mark.parametrize("rule", [Beat, Delta, fedavg])
def test_the_same_seed_gives_the_same_outcome_and_another_does_not(rule: type[Rule]) -> None:
    trial = Trial((1.0, 0.5), (16, 8), (2, 2), epochs=6.0, jitter=0.3, stumbles=0.2)
    same = [simulate(bench(padding=1), rule(), trial) for _ in range(2)]
    other = simulate(bench(padding=1), rule(), replace(trial, seed=1))
    assert same[0] == same[1]
    assert (other.samples, other.waiting) != (same[0].samples, same[0].waiting)


def test_a_stumbling_node_holds_up_a_barrier_more_than_a_beat() -> None:
    trial = Trial((1.0,) * 4, (8,) * 4, (1,) * 4, epochs=60.0, jitter=0.1, stumbles=0.1)
    beat, barrier = (simulate(bench(), rule(), trial) for rule in (Beat, fedavg))
    assert beat.samples > barrier.samples
    assert beat.waiting < barrier.waiting


def test_stumbling_and_steps_ahead_run_with_every_kind_of_rule() -> None:
    trial = Trial((1.0, 0.5, 0.25), (8, 8, 8), (3, 3, 3), 6.0, ahead=1, jitter=0.2, stumbles=0.1)
    for rule in (Beat(), Delta(), fedavg(), FedBuff(3)):
        outcome = simulate(bench(norm=True), rule, trial)
        assert 0.3 <= outcome.accuracy <= 1.0
        assert outcome.versions >= 3
        assert outcome.samples % 24 == 0


def test_all_steps_ahead_is_a_step_too() -> None:
    trial = replace(PAIR, ahead=1, epochs=4.0)
    assert simulate(bench(), Beat(), trial).samples == 4 * COUNT


def test_a_bound_keeps_a_fast_node_back() -> None:
    trial = Trial((8.0, 1.0), (8, 8), (1, 1), epochs=8.0)
    free, bound = (simulate(bench(), Delta(), replace(trial, bound=b)) for b in (None, 2))
    assert bound.samples < free.samples
    assert bound.waiting > 0.2 > free.waiting


def test_samples_are_dealt_out_by_speed_and_no_sample_twice() -> None:
    workbench = bench()
    supplies = _supplies(workbench, Trial((3.0, 1.0), (8, 8), (1, 1), epochs=1.0))
    passes = [
        supply.take(count // 8, 8).flatten()
        for supply, count in zip(supplies, (48, 16), strict=True)
    ]
    assert sorted(torch.cat(passes).tolist()) == list(range(COUNT))
    again = supplies[0].take(6, 8).flatten()
    assert sorted(again.tolist()) == sorted(passes[0].tolist())
    assert again.tolist() != passes[0].tolist()


def test_variation_shifts_and_mirrors_and_keeps_the_shape() -> None:
    workbench = bench(padding=2)
    torch.manual_seed(0)
    pixels = workbench.train_set.pixels
    varied = workbench._varied(pixels)
    assert varied.shape == pixels.shape
    plain = workbench._normalise(pixels)
    assert not torch.equal(varied, plain)
    flat = Workbench(workbench._model, *(images(symmetric=True),) * 2, padding=0)
    still = flat.train_set.pixels
    assert torch.equal(flat._varied(still), flat._normalise(still))


def test_accuracy_is_measured_with_statistics_of_its_own() -> None:
    workbench = bench(norm=True)
    start = workbench.start
    norm = next(m for m in workbench._model.modules() if isinstance(m, nn.BatchNorm2d))
    assert norm.running_mean is not None
    found = []
    for value in (1e6, -1e6):
        norm.running_mean.fill_(value)
        found.append(workbench.accuracy(start))
    assert found[0] == found[1]
    assert norm.momentum == 0.1
    assert workbench._model.training
    assert torch.equal(workbench.start, start)
