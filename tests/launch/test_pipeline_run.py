"""Whole pipelines of real processes: the numbers of a virtual one, bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convoy.config import Config
from convoy.data.load import load_data
from convoy.launch.links import Links
from convoy.run import Run
from convoy.storage.checkpoint import Checkpoint, load_newest
from convoy.tracking import untracked
from convoy.trainer import run_training
from tests.conftest import Outcome

NETS = "tests.pipeline.nets"


@pytest.fixture(autouse=True)
def _few_images() -> None:
    """Take some of the images that come with Convoy: less to train."""
    data = load_data(Config(data="fashion-mini"), untracked)
    train, test = data.train.select(torch.arange(4000)), data.test.select(torch.arange(500))
    np.savez(
        "few.npz",
        x_train=train.images_NCHW.squeeze(1).numpy(),
        y_train=train.labels.numpy(),
        x_test=test.images_NCHW.squeeze(1).numpy(),
        y_test=test.labels.numpy(),
    )


def train(out: str, **options: Any) -> Run:
    return run_training(
        {
            "data": "few.npz",
            "model": "lenet5",
            "epochs": 2,
            "batch": 200,
            "threads": 1,
            "device": "cpu",
            "executor": "eager",
            "precision": "fp32",
            "memory_format": "channels_last",
            "log_interval_s": 0.1,
            "out": out,
            **options,
        }
    )


def newest(out: str) -> Checkpoint:
    return load_newest(Path(out) / "checkpoints").checkpoint


def assert_equal(one: str, other: str) -> None:
    a, b = newest(one), newest(other)
    assert a.step == b.step
    for found, expected in ((a.model, b.model), (a.momentum, b.momentum)):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
    for ours, theirs in zip(a.progress["history"], b.progress["history"], strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-5)
        assert ours["test_accuracy"] == theirs["test_accuracy"]


def events(out: str, kind: str) -> list[dict[str, Any]]:
    lines = (Path(out) / "events.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == kind]


@pytest.mark.parametrize(
    ("recipe", "cuts", "more"),
    [
        ("published", (1, 3), {}),
        ("convoy", (2,), {"checkpoint_steps": 15}),
        ("convoy:compensated,annealed=1,damped=0.5", (1, 3), {"pipelined": "28"}),
        ("published:backward=predicted,forward=linear", (1, 2), {"model": f"{NETS}:dropping"}),
    ],
    ids=["published", "convoy, saved in mid-epoch", "hybrid", "dropout"],
)
def test_a_real_pipeline_equals_the_virtual_one_bit_for_bit(
    recipe: str, cuts: tuple[int, ...], more: dict[str, Any]
) -> None:
    options = {"strategy": "pipeline", "recipe": recipe, "cuts": cuts, **more}
    run = train("real", **options)
    train("virtual", virtual=True, **options)
    assert_equal("real", "virtual")
    assert run.summary["nodes"] == len(cuts) + 1
    assert sum(run.summary["stages"]) == (3 if "model" in more else 5)
    assert events("real", "timeline")[0]["of"] == "cycle"
    assert len(events("real", "timeline")[0]["rows"]) == len(cuts) + 1


def test_a_pipeline_that_is_never_pipelined_is_plain_training() -> None:
    train("staged", strategy="pipeline", cuts=(2, 4), pipelined="0")
    train("plain", strategy="single")
    assert_equal("staged", "plain")


def test_a_pipeline_of_one_stage_is_plain_training_bit_for_bit() -> None:
    train("one", strategy="pipeline", nodes=1)
    train("virtual", strategy="pipeline", stages=1, virtual=True)
    train("plain", strategy="single")
    assert_equal("one", "plain")
    assert_equal("virtual", "plain")


def test_stages_that_wait_for_each_other_send_gradients_first_and_nothing_else_changes() -> None:
    """In turn, one batch at a time, all stages wait for most of the time."""
    options = {"strategy": "pipeline", "cuts": (1, 3), "pipelined": "0.5", "epochs": 4}
    train("real", **options)
    told = [note["text"] for note in events("real", "note") if "gradients are sent" in note["text"]]
    assert 1 <= len(told) <= 2  # of the pipelined part where the machine is busy; of the plain part
    train("virtual", virtual=True, **options)
    assert_equal("real", "virtual")


def train_both_as_tasks(**options: Any) -> None:
    """Train in stages that are computed as tasks, and virtually, and compare."""
    options |= {"strategy": "pipeline", "precision": "fp64", "epochs": 1, "groups": 4}
    train("real", **{**options, "executor": "tasks"})
    train("virtual", virtual=True, **options)
    ours, theirs = newest("real"), newest("virtual")
    for found, expected in ((ours.model, theirs.model), (ours.momentum, theirs.momentum)):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("convoy", {}),
        ("pipedream", {"pipelined": "0.5"}),
        ("convoy", {"model": f"{NETS}:dropping"}),
        ("convoy:order=stale", {"model": f"{NETS}:normed", "batch": 300, "checkpoint_steps": 5}),
    ],
    ids=["convoy", "hybrid", "dropout", "norms, a short last batch, saved in mid-epoch"],
)
def test_stages_as_tasks_train_as_the_virtual_pipeline_does(
    recipe: str, more: dict[str, Any]
) -> None:
    train_both_as_tasks(recipe=recipe, cuts=(1, 2), **more)
    assert events("real", "start")[0]["executor"] == "tasks"
    assert events("real", "warning") == []


def test_a_stage_that_cannot_be_tasks_is_told_by_its_node_and_trained() -> None:
    train_both_as_tasks(cuts=(1,), model=f"{NETS}:deciding")
    reasons = [warning["reason"] for warning in events("real", "warning")]
    told = "node 1: this stage cannot be run as tasks: it decides by the values it computes"
    assert sum(text.startswith(told) for text in reasons) == 1


def test_stages_with_frozen_weights_are_computed_by_pytorch() -> None:
    train_both_as_tasks(cuts=(1, 2), model=f"{NETS}:frozen")
    assert events("real", "leave") == []
    reasons = [warning["reason"] for warning in events("real", "warning")]
    for node in (1, 2):
        told = f"node {node}: this stage cannot be run as tasks: some of its weights are frozen"
        assert sum(text.startswith(told) for text in reasons) == 1


def test_what_passes_an_emulated_link_takes_its_time() -> None:
    if reason := Links.available():
        pytest.skip(reason)
    options = {"strategy": "pipeline", "cuts": (2,), "epochs": 1}
    train("real", speeds=(1.0, 1.0), links=(20.0, 20.0), **options)
    # 20 batches of 320 KB of activations, at 2.5 MB/s; on one machine they would not travel.
    assert newest("real").progress["train_seconds"] > 20 * 0.1
    train("virtual", virtual=True, **options)
    assert_equal("real", "virtual")


def test_a_pipelines_checkpoint_is_the_plain_models_and_goes_on_in_any_strategy() -> None:
    data = "fashion-mini"  # all of it, to learn something
    train("run", data=data, strategy="pipeline", cuts=(2,), epochs=3, stop_after=1)
    assert (
        newest("run").model.keys()
        == train("other", epochs=1, data=data, strategy="single").model.state_dict().keys()
    )
    for strategy, more in (("single", {"cuts": ()}), ("pipeline", {"cuts": (1, 2)})):
        stop = {"stop_after": 2} if strategy == "single" else {}
        again = {"strategy": strategy, **more, **stop}
        if strategy == "single":
            again["nodes"] = 1
        else:
            again["nodes"] = 3
        run = run_training(again, resume=Path("run"))
    assert run.state == "finished"
    assert run.accuracy > 0.7
    assert newest("run").progress["epoch"] == 3


def test_unequal_nodes_get_stages_of_unequal_length() -> None:
    speeds = (0.8, 0.2)
    run = train("run", model=f"{NETS}:deep", strategy="pipeline", speeds=speeds, epochs=1)
    fast, slow = run.summary["stages"]
    assert fast > 1.5 * slow, run.summary["stages"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--cuts", "9"], "allowed: 1, 2, 3, 4"),
        (["--cuts", "2,1"], "must rise"),
        (["--cuts", "1.5"], "whole numbers"),
        (["--stages", "6"], "it can be cut after 1, 2, 3, 4 weight layers"),
        (["--stages", "3", "--cuts", "1"], "disagree"),
        (["--stages", "2", "--nodes", "3"], "disagree on the number of nodes"),
        (["--stages", "2", "--recipe", "publised"], "Did you mean 'published'?"),
        (["--stages", "2", "--recipe", "convoy:forward=guess"], "current, linear, coasting"),
        (["--stages", "2", "--pipelined", "never"], "a part below 1 or a number of steps"),
        (["--stages", "2", "--recipe", "published", "--precision", "bf16"], "backward=stashed"),
        (["--stages", "2", "--recipe", "published", "--executor", "tasks"], "backward=stashed"),
        (["--stages", "2", "--executor", "graph"], "allowed: auto, eager, tasks"),
        (["--virtual", "--speeds", "1,1"], "one device"),
        (["--stages", "2", "--model", "tests.inner.branches:build"], "cannot be"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(
    flags: list[str], words: str, convoy: Callable[..., Outcome]
) -> None:
    outcome = convoy("train", "--strategy", "pipeline", "--quiet", *flags)
    assert outcome.code == 2
    assert words in " ".join(outcome.err.split())
    assert "Traceback" not in outcome.err


def test_stages_need_the_strategy(convoy: Callable[..., Outcome]) -> None:
    outcome = convoy("train", "--stages", "2")
    assert outcome.code == 2
    assert "--strategy pipeline" in outcome.err
