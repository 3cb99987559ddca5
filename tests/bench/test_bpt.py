"""The benchmark of BPT-CNN's claims: what it runs, and how it judges."""

import json
from pathlib import Path
from typing import Any

import pytest

from convoy.bench import bpt
from convoy.bench.bpt import IDPA_AGWU, LOCKSTEP, OURS, UNIFORM_SGWU, Outcome, balance_of
from convoy.errors import ConvoyError


def outcome(seconds: float, accuracy: float = 0.8) -> Outcome:
    history = [
        {"seconds": part * seconds, "test_accuracy": part * accuracy} for part in (0.5, 0.75, 1.0)
    ]
    summary = {
        "history": history,
        "seconds": seconds,
        "test_accuracy": accuracy,
        "idle_fraction": 0.1,
        "weight_bytes": 2_000_000,
        "sample_bytes": 1_000_000,
        "submissions": 12,
    }
    return Outcome(summary, balance=0.9)


def test_a_level_is_reached_at_the_first_test_that_shows_it() -> None:
    assert outcome(10.0).reached(0.6) == (7.5, 2.0)
    assert outcome(10.0).reached(0.81) is None


def test_balance_is_the_mean_over_the_longest_of_the_later_iterations(tmp_path: Path) -> None:
    lines = [
        {"event": "submit", "node": node, "report": {"busy_s": seconds}}
        for early, late in [(9.0, 3.0)]
        for node, seconds in ((0, early), (1, 1.0), (0, late), (1, 1.0))
    ]
    record = tmp_path / "record.jsonl"
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert balance_of(record) == pytest.approx(2.0 / 3.0)
    record.write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(ConvoyError, match="too few"):
        balance_of(record)


def test_the_whole_grid_is_run_and_every_claim_has_a_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[tuple[str, int, dict[str, Any]]] = []

    def run(name: str, seed: int, more: dict[str, Any]) -> Outcome:
        ran.append((name, seed, more))
        return outcome(20.0 if name == UNIFORM_SGWU else 10.0)

    monkeypatch.setattr(bpt, "_run", run)
    report = bpt.bench_bpt(quick=False, tell=lambda _: None)
    unequal = [(name, seed) for name, seed, more in ran if more["speeds"] == bpt.SPEEDS]
    assert {(OURS, 2), (LOCKSTEP, 2), (IDPA_AGWU, 2), (UNIFORM_SGWU, 2)} <= set(unequal)
    claims = {bar.name[:2] for bar in report.bars}
    assert claims == {"C1", "C4", "C6", "C8", "C9"}
    assert report.bars[0].value == pytest.approx(2.0)
    tasks = {row.task for row in report.rows}
    assert {"unequal: epochs to 60%", "unequal: weights moved", "stumbling: waiting"} <= tasks


def test_only_what_is_compared_differs() -> None:
    paper = bpt._options("IDPA + AGWU"), bpt._options("uniform + SGWU")
    assert {key for key in paper[0] if paper[0][key] != paper[1][key]} == {"strategy", "holdings"}
