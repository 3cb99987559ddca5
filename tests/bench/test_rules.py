"""The benchmark of rules: who does what, and what the table says."""

import pytest
import torch

from convoy.bench import rules
from convoy.bench.rules import CONTENDERS, DDP, EIGHT, EXACT, FOUR, OURS, Task, trial_of
from convoy.bench.virtual import Images, Outcome
from convoy.errors import ConfigError


def contender(name: str) -> rules.Contender:
    return next(c for c in CONTENDERS if c.name == name)


def test_every_contender_is_given_the_same_time() -> None:
    for speeds in (FOUR, EIGHT):
        trials = [trial_of(c, Task(c.name, speeds, 0, 8.0), 50_000) for c in CONTENDERS]
        assert {sum(trial.speeds) for trial in trials} == {sum(speeds)}
        assert {trial.epochs for trial in trials} == {8.0}


def test_shares_are_what_the_name_says() -> None:
    task = Task("", FOUR, 0, 8.0)
    assert trial_of(EXACT, task, 50_000).batch == (128,)
    assert trial_of(DDP, task, 50_000).batch == (32, 32, 32, 32)
    assert trial_of(OURS, task, 50_000).batch == (51, 38, 26, 13)
    assert trial_of(DDP, task, 50_000).held == (12_500,) * 4
    assert trial_of(OURS, task, 50_000).held == (20_000, 15_000, 10_000, 5_000)
    published = trial_of(contender("agwu as published, every pass"), task, 50_000)
    assert published.batch == (128,) * 4
    assert published.every == (156, 117, 78, 39)


def test_what_the_bars_compare_has_three_seeds() -> None:
    seeds = {
        (speeds, name): sorted(
            t.seed
            for t in rules.all_tasks()
            if (t.contender, t.speeds, t.unsteady) == (name, speeds, False)
        )
        for speeds in (FOUR, EIGHT)
        for name in (EXACT.name, DDP.name, OURS.name)
    }
    assert set(map(tuple, seeds.values())) == {(0, 1, 2)}


def test_the_bars_are_differences_of_means() -> None:
    found = {
        Task(name, speeds, seed, 8.0): Outcome(accuracy + 0.01 * seed, 1, 1, 0.0)
        for speeds, values in ((FOUR, (0.8, 0.7, 0.79)), (EIGHT, (0.8, 0.6, 0.7)))
        for name, accuracy in zip((EXACT.name, DDP.name, OURS.name), values, strict=True)
        for seed in range(3)
    }
    report = rules.report_of(found)
    assert [bar.value for bar in report.bars] == pytest.approx([80.0, 10.0, 1.0])
    assert [bar.is_met for bar in report.bars] == [False, True, False]


def test_the_quick_one_trains_three_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.arange(128) % 2
    pixels = (labels * 200).to(torch.uint8).reshape(-1, 1, 1, 1).expand(-1, 1, 28, 28).contiguous()
    monkeypatch.setattr(rules, "_quick_images", lambda: (Images(pixels, labels),) * 2)
    said: list[str] = []
    report = rules.bench_rules(quick=True, tell=said.append)
    assert [row.system for row in report.rows] == [EXACT.name, DDP.name, OURS.name]
    assert len(said) == 3


def test_without_a_gpu_or_the_data_the_full_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="GPU"):
        rules.bench_rules(quick=False, tell=lambda _: None)
    with pytest.raises(ConfigError, match="CIFAR-10"):
        rules.cifar_images(None)
