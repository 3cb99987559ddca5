"""Whole hybrid runs of real processes: they learn what one process learns."""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from convoy.hybrid import runner
from convoy.hybrid.head import find_parts
from convoy.inner.activations import kept_of_a_sample
from convoy.inner.arithmetic import Arithmetic
from convoy.outer.ledger import Update, find_faults
from convoy.run import Run
from convoy.storage.checkpoint import Checkpoint, load_newest
from convoy.trainer import run_training
from tests.conftest import Outcome
from tests.pipeline.nets import dropping

DROPPING = "tests.pipeline.nets:dropping"
LEAD, LITTLE = "CONVOY_TEST_LEAD", "CONVOY_TEST_LITTLE"  # its process; what one node has
SAMPLES = 10_000


def train(out: str, **options: Any) -> Run:
    run = run_training(
        {
            "data": "fashion-mini",
            "model": DROPPING,
            "epochs": 2,
            "batch": 500,
            "threads": 1,
            "device": "cpu",
            "executor": "eager",
            "precision": "fp64",
            "memory_format": "contiguous",
            "log_interval_s": 0.1,
            "out": out,
            **options,
        }
    )
    assert run.state == ("stopped" if "stop_after" in options else "finished")
    return run


def newest(out: str) -> Checkpoint:
    return load_newest(Path(out) / "checkpoints").checkpoint


def assert_equal(one: str, other: str) -> None:
    a, b = newest(one), newest(other)
    assert a.step == b.step
    for found, expected in ((a.model, b.model), (a.momentum, b.momentum)):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].shape == tensor.shape
            assert (found[name] - tensor).abs().max().item() < 1e-9, name
    for ours, theirs in zip(a.progress["history"], b.progress["history"], strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-9)
        assert ours["train_accuracy"] == theirs["train_accuracy"]
        assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-9)
        assert ours["test_accuracy"] == theirs["test_accuracy"]


def notes(out: str) -> list[str]:
    lines = (Path(out) / "events.jsonl").read_text().splitlines()
    return [r["text"] for r in map(json.loads, lines) if r["event"] == "note"]


def ledger(out: str) -> list[Update]:
    lines = (Path(out) / "ledger.jsonl").read_text().splitlines()
    return [Update.from_line(json.loads(line)) for line in lines]


def dropping_with_little_memory(in_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    """Build the network in a node, and let the first one to do so believe it has little memory."""
    if os.environ[LEAD] != str(os.getpid()):
        with contextlib.suppress(FileExistsError):
            Path(f"{os.environ[LITTLE]}.taken").touch(exist_ok=False)
            vars(runner)["free_memory"] = lambda _: int(os.environ[LITTLE])
    return dropping(in_shape, num_classes)


def test_a_node_with_little_memory_gets_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    trunk = nn.Sequential(*find_parts(dropping((1, 28, 28), 10)).trunk).double()
    arithmetic = Arithmetic(torch.device("cpu"), "fp64", "contiguous")
    each = kept_of_a_sample(trunk, (1, 28, 28), arithmetic)
    monkeypatch.setenv(LEAD, str(os.getpid()))
    # A fifth of it is for samples, and the two nodes of this machine share what is free.
    monkeypatch.setenv(LITTLE, str(2 * 5 * 60 * each))
    net = f"{__name__}:{dropping_with_little_memory.__name__}"
    train("hybrid", strategy="hybrid", nodes=2, model=net)
    together = [update.shares for update in ledger("hybrid") if len(update.shares) == 2]
    fewest = {min(share for _, share in shares) for shares in together}
    assert fewest == {60}  # by speed alone it would be about 250
    train("single", strategy="single", model=net)
    assert_equal("hybrid", "single")


@pytest.mark.parametrize(
    ("options", "cut"),
    [
        ({"nodes": 2, "mirrored_test": True}, 1),
        ({"nodes": 3, "layers": "columns", "boundary": "slices", "label_smoothing": 0.1}, 2),
        ({"speeds": "0.6,0.3", "boundary": "turns", "layers": "columns"}, 2),
    ],
    ids=["as chosen", "published, in slices", "unequal, in turns"],
)
def test_a_hybrid_run_equals_a_single_one(options: dict[str, Any], cut: int) -> None:
    run = train("hybrid", strategy="hybrid", **options)
    same = {name: options[name] for name in ("mirrored_test", "label_smoothing") if name in options}
    train("single", strategy="single", **same)
    assert_equal("hybrid", "single")
    assert run.summary["nodes"] >= 2
    (layout,) = [text for text in notes("hybrid") if "a node receives" in text]
    assert layout.count("by output neurons") == cut
    assert find_faults(ledger("hybrid"), SAMPLES, 2) == []


def test_a_checkpoint_of_one_layout_goes_on_in_any_other() -> None:
    train("single", strategy="single", epochs=3)
    train("moving", strategy="hybrid", nodes=3, epochs=3, stop_after=1)
    assert newest("moving").model.keys() == newest("single").model.keys()
    run_training({"strategy": "lockstep", "nodes": 2, "stop_after": 2}, resume=Path("moving"))
    run_training({"strategy": "hybrid", "nodes": 2, "layers": "columns"}, resume=Path("moving"))
    assert_equal("moving", "single")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model=tests.launch.test_hybrid_run:narrow", "--nodes=12"), "cut over 12 nodes"),
        (("--model=resnet20",), "no fully connected layer"),
        (("--model=tests.launch.test_hybrid_run:shallow",), "nothing is trained before"),
        (("--strategy=lockstep", "--boundary=turns"), "'boundary' needs a hybrid run"),
        (("--layers=rows",), "layers"),
        (("--executor=tasks",), "a hybrid run is computed eagerly"),
        (("--mixing", "--nodes=3"), "butterfly mixing needs a partner for everyone"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_anything_starts(
    convoy: Callable[..., Outcome], arguments: tuple[str, ...], said: str
) -> None:
    chosen = {"--strategy": "hybrid", "--nodes": 2, "--out": "run"}
    flags = [f"{name}={value}" for name, value in chosen.items()]
    given = [flag for flag in flags if not any(flag.split("=")[0] in a for a in arguments)]
    outcome = convoy("train", *given, *arguments)
    assert outcome.code == 2
    assert said in outcome.err
    assert "Traceback" not in outcome.err
    assert not Path("run").exists()


def shallow(in_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, num_classes))


def narrow(in_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(in_shape[0], 2, 3), nn.Flatten(), nn.Linear(1352, num_classes))


def test_nodes_that_mix_learn_as_much_and_save_one_network() -> None:
    options = {"strategy": "hybrid", "nodes": 2, "layers": "columns", "epochs": 3}
    mixed = train("mixed", mixing=True, **options)
    exact = train("exact", **options)
    assert abs(mixed.accuracy - exact.accuracy) < 0.05
    assert newest("mixed").model.keys() == newest("exact").model.keys()
    found, expected = newest("mixed").model["0.weight"], newest("exact").model["0.weight"]
    assert 0 < (found - expected).abs().max().item() < 0.5  # near, but not the same numbers
