"""Whole runs with a parameter service: what they give, and that they can be done again."""

import json
import math
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch import nn

from convoy.config import Config, read_toml
from convoy.errors import CheckpointError, ConvoyError
from convoy.launch.links import Links
from convoy.launch.parameters.record import read_record
from convoy.launch.parameters.replay import replay
from convoy.run import Run
from convoy.tracking import untracked
from convoy.trainer import run_training
from tests.conftest import Outcome
from tests.faults.history import story_of

SAMPLES = 10_000  # of fashion-mini
SAMPLE_BYTES = 28 * 28


def train(**options: Any) -> Run:
    given = {
        "data": "fashion-mini",
        "model": "lenet5",
        "epochs": 1,
        "nodes": 2,
        "threads": 1,
        "device": "cpu",
        "precision": "fp32",
        "memory_format": "contiguous",
        "batch": 64,
        "out": "run",
        **options,
    }
    return run_training(given)


def assert_the_same_bits(folder: str = "run") -> int:
    config = Config(**read_toml(Path(folder) / "config.toml"))
    found = replay(config, Path(folder) / "record.jsonl", untracked)
    assert found.is_equal, found
    assert found.submissions > 5
    return found.restarts


def events(kind: str) -> list[dict[str, Any]]:
    return [r for r in read_record(Path("run/record.jsonl")) if r["event"] == kind]


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ({"strategy": "server"}, 0.6),
        ({"strategy": "server", "rule": "fedasync:part=0.5", "exchange_every": 4}, 0.4),
        # How far it comes in one epoch depends on who is how fast: 0.38 was seen, 0.1 is chance.
        ({"strategy": "server", "norms": "local", "momentum_on_pull": "reset"}, 0.25),
    ],
    ids=["beat", "fedasync", "reset"],
)
def test_a_run_learns_every_sample_once_and_can_be_done_again(
    options: dict[str, Any], least: float
) -> None:
    run = train(**options)
    assert run.accuracy > least
    assert run.summary["samples"] == SAMPLES
    assert story_of(Path("run"), SAMPLES).find_faults(SAMPLES, epochs=1) == []
    assert run.summary["submissions"] == len(events("submit"))
    assert assert_the_same_bits() == 0


def test_staleness_is_told_while_training_goes_on() -> None:
    run = train(strategy="server", epochs=3, log_interval_s=0.1)
    lines = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    told = [line for line in lines if line["event"] == "staleness"]
    assert told
    counted = sum(sum(line["counts"]) for line in told)
    assert 0 < counted <= run.summary["submissions"]  # the last interval may not be told of
    assert counted > run.summary["submissions"] / 2
    stale = sum(place * n for line in told for place, n in enumerate(line["counts"]))
    assert stale / counted == pytest.approx(run.summary["staleness_mean"], abs=0.3)
    assert {node for line in told for node in line["nodes"]} == {0, 1}


def test_honest_work_behind_links_of_other_rates_is_not_taken_for_nonsense() -> None:
    """In a warm-up, and while intervals grow, increments become hundreds of times longer."""
    if reason := Links.available():
        pytest.skip(reason)
    run = train(
        strategy="server", speeds=(0.8, 0.6, 0.4, 0.2), links=(100.0, 100.0, 20.0, 20.0), nodes=4
    )
    lengths = [s["report"]["rate"] for s in events("submit")]
    assert max(lengths) > 100 * min(lengths)
    assert run.summary["refused"].get("far too long", 0) == 0
    assert run.summary["samples"] == SAMPLES


def test_samples_travel_once_to_the_nodes_that_were_given_them() -> None:
    options: dict[str, Any] = {"epochs": 2, "idpa_batches": 2, "stream_data": True}
    options |= {"cache_dir": str(Path("cache").absolute())}
    run = train(strategy="agwu", **options)
    # Numbers, labels and frames come on top of the pixels.
    assert SAMPLES * SAMPLE_BYTES < run.summary["sample_bytes"] < SAMPLES * (SAMPLE_BYTES + 40)
    assert run.summary["staleness_mean"] > 0
    assert assert_the_same_bits() == 0
    again = train(strategy="agwu", **options, out="again")
    assert again.summary["sample_bytes"] == 0  # all of them are on this machine's disk


def test_several_servers_give_what_one_gives() -> None:
    whole = train(strategy="server", rule="fedavg", exchange_every=2, overlap=False)
    parts = train(
        strategy="server", rule="fedavg", exchange_every=2, overlap=False, servers=3, out="3"
    )
    assert parts.summary["samples"] == whole.summary["samples"] == SAMPLES
    # Who hands in first is chance, and so is how far one epoch gets: 0.1 would be guessing.
    assert min(parts.accuracy, whole.accuracy) > 0.4
    assert parts.summary["weight_bytes"] > 0
    with pytest.raises(ConvoyError, match="several servers"):
        replay(Config(**read_toml(Path("3/config.toml"))), Path("3/record.jsonl"), untracked)


def kill_the_service_after(versions: int) -> threading.Thread:
    """Kill the service's process once it has made some versions, without a word."""

    def strike() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if Path("run/record.jsonl").exists() and len(events("submit")) > versions:
                for child in psutil.Process().children(recursive=True):
                    if "record.jsonl" in _files_of(child):
                        os.kill(child.pid, signal.SIGKILL)
                        struck.append(child.pid)
                        return
            time.sleep(0.05)

    struck: list[int] = []
    thread = threading.Thread(target=strike)
    thread.start()
    thread.struck = struck  # type: ignore[attr-defined]
    return thread


def _files_of(process: psutil.Process) -> set[str]:
    try:
        return {Path(file.path).name for file in process.open_files()}
    except psutil.Error:
        return set()


@pytest.mark.parametrize("durability", ["checkpoint", "journal"])
def test_a_run_whose_service_was_killed_ends_well_and_can_be_done_again(durability: str) -> None:
    thread = kill_the_service_after(20)
    run = train(strategy="server", epochs=2, durability=durability, durable_updates=10)
    thread.join()
    assert len(thread.struck) == 1  # type: ignore[attr-defined]
    assert run.summary["service_restarts"] == 1
    assert run.summary["samples"] == 2 * SAMPLES
    assert assert_the_same_bits() == 1


def test_a_stopped_run_goes_on_from_where_the_service_was() -> None:
    first = train(strategy="server", epochs=2, stop_after=1)
    assert first.state == "stopped"
    second = run_training({}, resume=Path("run"))
    assert second.state == "finished"
    assert len(second.history) == 2
    assert assert_the_same_bits() == 1


def test_the_command_says_that_the_bits_are_the_same(convoy: Any) -> None:
    train(strategy="server")
    outcome: Outcome = convoy("replay", "run", "--json")
    assert outcome.code == 0
    assert json.loads(outcome.out.splitlines()[-1])["equal"] is True


def test_a_record_that_was_changed_is_found_out(convoy: Any) -> None:
    train(strategy="server", exchange_every=8)
    record = Path("run/record.jsonl")
    lines = record.read_text().splitlines()
    swapped = [i for i, line in enumerate(lines) if '"submit"' in line][3]
    changed = json.loads(lines[swapped])
    changed["report"]["samples"] += 7  # it weighs more in the mean
    lines[swapped] = json.dumps(changed)
    record.write_text("\n".join(lines) + "\n")
    outcome: Outcome = convoy("replay", "run")
    assert outcome.code == 1
    assert "the weights differ" in outcome.err


def build_normed(in_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.BatchNorm1d(math.prod(in_shape)),
        nn.Linear(math.prod(in_shape), num_classes),
    )


def test_of_two_states_of_one_version_a_replay_goes_on_from_the_one_that_got_to_the_disk() -> None:
    def replayed(happenings: list[dict[str, Any]]) -> int:
        Path("record.jsonl").write_text("".join(json.dumps(h) + "\n" for h in happenings))
        config = Config(strategy="server", model="tests.launch.test_server_run:build_normed")
        return replay(config, Path("record.jsonl"), untracked).checksum

    who: list[dict[str, Any]] = [
        {"node": node, "incarnation": f"a{node}", "now": 0.0} for node in (0, 1)
    ]
    moment = {"version": 1, "done": 0}
    begun: list[dict[str, Any]] = [
        {"event": "start", **moment, "nodes": 2},
        *({"event": "admit", **node, "speed": 100.0} for node in who),
        *({"event": "pull", **node, "last": 0} for node in who),
        {"event": "saved", **moment, "checksum": 0, "state": 1},
    ]
    report = {"samples": 32, "busy_s": 0.1}
    # It waits for the other node, but the statistics of batch-norm move at once.
    submitted: list[dict[str, Any]] = [
        *begun,
        {"event": "submit", **who[0], "number": 1, "base": 1, "report": report},
        {"event": "saved", **moment, "checksum": 0, "state": 2},
    ]
    assert replayed(submitted) != replayed(begun)
    for state, same_as in ((1, begun), (2, submitted)):
        killed = [*submitted, {"event": "restart", **moment, "state": state}]
        assert replayed(killed) == replayed(same_as)


def test_only_runs_with_a_service_are_replayed(tmp_path: Path) -> None:
    with pytest.raises(ConvoyError, match="parameter service"):
        replay(Config(strategy="lockstep"), tmp_path / "record.jsonl", untracked)


def test_a_record_without_a_beginning_is_refused(tmp_path: Path) -> None:
    record = tmp_path / "record.jsonl"
    record.write_text('{"event": "tick", "now": 1.0}\n')
    with pytest.raises(CheckpointError, match="begin"):
        replay(Config(strategy="server"), record, untracked)
