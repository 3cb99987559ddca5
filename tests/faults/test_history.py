"""The checker finds what it is there to find, and nothing in a run without faults."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from convoy.outer.work import Span
from tests.faults.history import (
    History,
    find_faults,
    find_sample_faults,
    find_version_faults,
    marks_in,
)
from tests.faults.light import SIZE, Bench, Client, find_all_faults, running


def made(count: int = 4, acknowledged: tuple[int, ...] = (0, 1, 2)) -> History:
    history = History(10)
    for number in range(count):
        history.attempt(0, "0000-0001", number + 1, 1, [Span(0, number, number + 1)])
    for place in acknowledged:
        history.acknowledge(history.attempts[place], 2)
    return history


def test_what_agrees_has_no_faults() -> None:
    assert find_faults(made(), {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}) == []
    assert find_faults(made(), {0: 1.0, 1: 1.0, 2: 1.0}) == []  # the last was not acknowledged
    assert find_sample_faults([Span(0, 0, 3), Span(0, 3, 5), Span(1, 0, 5)], 5, 2) == []
    assert find_version_faults([1, 2, 3]) == []


@pytest.mark.parametrize(
    ("applied", "words"),
    [
        ({0: 1.0, 1: 1.0}, "1 were acknowledged and are lost"),
        ({0: 1.0, 1: 1.0, 2: 1.0, 7: 1.0}, "never attempted: [7]"),
        ({0: 1.0, 1: 2.0, 2: 1.0}, "not applied exactly once: {1: 2.0}"),
    ],
)
def test_what_does_not_agree_is_told(applied: dict[int, float], words: str) -> None:
    (fault,) = find_faults(made(), applied)
    assert words in fault


def test_a_loss_that_is_allowed_is_none() -> None:
    assert find_faults(made(), {0: 1.0}, lost_at_most=2) == []
    assert len(find_faults(made(), {0: 1.0}, lost_at_most=1)) == 1


def test_what_was_declined_must_not_be_applied() -> None:
    history = made()
    history.decline(history.attempts[3], "behind")
    (fault,) = find_faults(history, dict.fromkeys(range(4), 1.0))
    assert "declined: [3]" in fault


def test_samples_that_are_missing_or_trained_twice_are_told() -> None:
    assert find_sample_faults([Span(0, 0, 4)], 5, 1) == [
        "epoch 0: 1 samples missing, 0 trained twice"
    ]
    assert find_sample_faults([Span(0, 0, 5), Span(0, 1, 3)], 5, 1) == [
        "epoch 0: 0 samples missing, 2 trained twice"
    ]
    assert find_version_faults([1, 2, 4, 4]) == ["version 4 follows 2", "version 4 follows 4"]


def test_marks_are_read_from_weights() -> None:
    assert marks_in(torch.tensor([0.0, 1.0, 0.0, 2.0])) == {1: 1.0, 3: 2.0}


@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": True, "exchange_every": 2}, {"rule": "beat"}, {"rule": "sgwu"}],
    ids=["adding", "ahead", "beat", "sgwu"],
)
def test_a_run_without_faults_has_none(options: dict[str, Any]) -> None:
    history = History(SIZE)
    with Bench(200, **options) as bench:
        clients = [Client(bench, history, node) for node in range(4)]
        with running(clients):
            for client in clients:
                client.join(60)
        if "rule" not in options:
            assert find_all_faults(bench, history, bench.samples) == []
        else:
            marks = {mark for merge in bench.rule.merges for mark in merge.marks}
            assert find_faults(history, dict.fromkeys(marks, 1.0)) == []
        assert bench.rule.find_faults() == []
        story = bench.story()
        assert story.find_faults(bench.samples, 1) == []
        assert (story.version, story.done) == (bench.server.version, bench.server.done)
        assert [m.staleness for m in story.merges] == [m.staleness for m in bench.rule.merges]
        assert len(story.applied) == len(history.acknowledged)


def test_a_record_that_was_changed_is_found_out() -> None:
    history = History(SIZE)
    with Bench(100) as bench:
        clients = [Client(bench, history, node) for node in range(4)]
        with running(clients):
            for client in clients:
                client.join(60)
        assert bench.story().find_faults(bench.samples, 1) == []
        lines = bench.record.read_text().splitlines()
        submits = [n for n, line in enumerate(lines) if json.loads(line)["event"] == "submit"]
        del lines[submits[50]]
        bench.record = Path("changed.jsonl")
        bench.record.write_text("\n".join(lines) + "\n")
        assert "samples missing" in str(bench.story().find_faults(bench.samples, 1))
