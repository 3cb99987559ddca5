"""`convoy train`: what it prints, what it leaves, and where its values come from."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convoy.config import Config
from convoy.outer.job import Job
from convoy.outer.single import train_epoch
from convoy.outer.stop import StopRequest
from convoy.storage.checkpoint import load_newest
from tests.conftest import Outcome, make_stripes

Convoy = Callable[..., Outcome]

# One thread, and nothing left to a probe: what is small must be fast and the same each time.
TINY = (
    *("--epochs", 1, "--batch", 16, "--model", "lenet5", "--threads", 1, "--warmup-epochs", 0),
    *("--precision", "fp32", "--memory-format", "contiguous"),
)
KEYS = {
    *("strategy", "nodes", "model", "data", "epochs", "samples", "seconds", "samples_per_s"),
    *("train_loss", "test_accuracy", "shares", "speeds", "staleness_mean", "idle_fraction"),
    *("faults", "checkpoint", "run_dir", "seed", "versions"),
}


def write_stripes(path: Path, count: int = 64, *, side: int = 12, seed: int = 0) -> Path:
    """Write a small data set that one epoch nearly learns."""
    stripes = make_stripes(count, side=side, seed=seed)
    np.savez(path, images=stripes.images_NCHW.numpy(), labels=stripes.labels.numpy())
    return path


@pytest.fixture
def tiny(convoy: Convoy, tmp_path: Path) -> Convoy:
    """Return a function that trains on stripes.npz and may be given more options."""
    data = write_stripes(tmp_path / "stripes.npz")

    def call(*arguments: object) -> Outcome:
        given = {str(argument) for argument in arguments}
        pairs = list(zip(TINY[::2], TINY[1::2], strict=True))
        kept = [part for pair in pairs if pair[0] not in given for part in pair]
        return convoy("train", *arguments, *kept, "--data", data)

    return call


def summary_of(outcome: Outcome) -> dict[str, Any]:
    """Return the JSON object that a command printed, which must be all it printed."""
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("\n") == 1
    found = json.loads(outcome.out)
    assert isinstance(found, dict)
    return found


def test_json_is_one_object_with_every_key_and_nothing_else(tiny: Convoy) -> None:
    outcome = tiny("--json", "--quiet", "--out", "run")
    summary = summary_of(outcome)
    assert set(summary) >= KEYS
    assert outcome.err == ""
    assert (summary["strategy"], summary["nodes"], summary["model"]) == ("single", 1, "lenet5")
    assert (summary["epochs"], summary["samples"]) == (1, 52)
    assert (summary["run_dir"], summary["seed"], summary["faults"]) == ("run", 0, 0)
    assert (summary["shares"], summary["state"]) == ([1.0], "finished")
    assert summary["samples_per_s"] > 0
    assert 0 <= summary["test_accuracy"] <= 1
    assert Path(summary["checkpoint"]).is_dir()


def test_json_without_quiet_keeps_progress_off_standard_output(tiny: Convoy) -> None:
    outcome = tiny("--json", "--out", "run")
    assert summary_of(outcome)["epochs"] == 1
    assert "test acc" in outcome.err
    assert "finished: all 1 epochs are done" in outcome.err


def test_quiet_without_json_prints_nothing(tiny: Convoy) -> None:
    assert tiny("--quiet", "--out", "run") == Outcome(0, "", "")


def test_table_for_people_names_accuracy_speed_run_and_checkpoint(tiny: Convoy) -> None:
    outcome = tiny("--out", "run")
    assert outcome.code == 0
    for word in ("test accuracy", "speed", "time", "run/checkpoints/step-00000004"):
        assert word in outcome.out


@pytest.mark.parametrize("out", ["[red]run", "run[/]", "[/x]", "naïve run"])
def test_folder_with_an_odd_name_is_shown_as_it_is(tiny: Convoy, out: str) -> None:
    outcome = tiny("--out", out)
    assert outcome.code == 0
    assert f"{out}/checkpoints" in outcome.out


def test_run_folder_holds_config_events_summary_and_checkpoints(tiny: Convoy) -> None:
    summary = summary_of(tiny("--json", "--quiet", "--out", "run"))
    names = {path.name for path in Path("run").iterdir()}
    assert names == {".lock", "config.toml", "events.jsonl", "summary.json", "checkpoints"}
    assert json.loads(Path("run/summary.json").read_text()) == summary
    lines = Path("run/events.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["event"] for line in lines]
    assert kinds == ["start", "step", "evaluation", "checkpoint", "end"]
    assert load_newest(Path("run/checkpoints")).checkpoint.progress["epoch"] == 1


def test_without_out_the_run_lies_in_a_new_folder_below_runs(tiny: Convoy) -> None:
    folders = {summary_of(tiny("--json", "--quiet"))["run_dir"] for _ in range(2)}
    assert {str(path) for path in Path("runs").iterdir()} == folders
    assert len(folders) == 2


def test_saved_config_holds_what_was_given_and_what_was_chosen(tiny: Convoy) -> None:
    tiny("--quiet", "--out", "run", "--lr", 0.25)
    saved = Config(**tomllib.loads(Path("run/config.toml").read_text()))
    assert (saved.lr, saved.batch, saved.device) == (0.25, 16, "cpu")


def test_saved_config_run_again_gives_the_same(tiny: Convoy, convoy: Convoy) -> None:
    first = summary_of(tiny("--json", "--quiet", "--epochs", 2, "--seed", 5))
    second = summary_of(convoy("train", f"{first['run_dir']}/config.toml", "--json", "--quiet"))
    assert second["run_dir"] != first["run_dir"]
    for key in ("test_accuracy", "train_loss", "samples", "seed"):
        assert second[key] == first[key]


def test_file_is_over_defaults_and_flags_are_over_the_file(tiny: Convoy) -> None:
    Path("run.toml").write_text('lr = 0.3\nmomentum = 0.5\nschedule = "constant"\n')
    tiny("run.toml", "--quiet", "--out", "run", "--momentum", 0.8)
    saved = tomllib.loads(Path("run/config.toml").read_text())
    assert (saved["lr"], saved["momentum"], saved["schedule"]) == (0.3, 0.8, "constant")


def test_environment_is_over_the_file_and_under_the_flags(
    tiny: Convoy, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run.toml").write_text("lr = 0.3\nseed = 1\nmomentum = 0.5")
    monkeypatch.setenv("CONVOY_LR", "0.4")
    monkeypatch.setenv("CONVOY_SEED", "2")
    monkeypatch.setenv("CONVOY_NESTEROV", "false")
    tiny("run.toml", "--quiet", "--out", "run", "--seed", 3)
    saved = tomllib.loads(Path("run/config.toml").read_text())
    assert (saved["lr"], saved["seed"], saved["momentum"]) == (0.4, 3, 0.5)
    assert saved["nesterov"] is False


def test_target_accuracy_stops_early(tiny: Convoy) -> None:
    summary = summary_of(
        tiny("--json", "--quiet", "--epochs", 50, "--target-accuracy", 0.01, "--out", "run")
    )
    assert summary["epochs"] == 1
    assert summary["state"] == "stopped"
    assert summary["reason"] == "the test accuracy reached 0.01"


def test_stop_after_leaves_and_resume_goes_on_as_if_never_stopped(
    tiny: Convoy, convoy: Convoy
) -> None:
    whole = summary_of(tiny("--json", "--quiet", "--epochs", 3, "--out", "whole"))
    part = summary_of(tiny("--json", "--quiet", "--epochs", 3, "--stop-after", 1, "--out", "part"))
    assert (part["epochs"], part["state"]) == (1, "stopped")
    assert "--resume goes on" in part["reason"]
    rest = summary_of(convoy("train", "--resume", "part", "--stop-after", 0, "--json", "--quiet"))
    assert (rest["epochs"], rest["state"]) == (3, "finished")
    for key in ("train_loss", "test_accuracy", "samples"):
        assert rest[key] == whole[key]


def test_resume_alone_goes_on_to_the_end(tiny: Convoy, convoy: Convoy) -> None:
    tiny("--quiet", "--epochs", 3, "--stop-after", 1, "--out", "run")
    rest = summary_of(convoy("train", "--resume", "run", "--json", "--quiet"))
    assert (rest["epochs"], rest["state"]) == (3, "finished")


def test_resume_with_more_epochs_goes_on_after_the_end(tiny: Convoy, convoy: Convoy) -> None:
    tiny("--quiet", "--schedule", "constant", "--out", "run")
    rest = summary_of(convoy("train", "--resume", "run", "--epochs", 2, "--json", "--quiet"))
    assert (rest["epochs"], rest["run_dir"]) == (2, "run")
    starts = [
        json.loads(line)
        for line in Path("run/events.jsonl").read_text().splitlines()
        if '"start"' in line
    ]
    assert [start["reason"] for start in starts] == ["a new run", "goes on from step-00000004"]


def test_run_interrupted_after_the_last_step_is_finished_once_it_is_resumed(
    tiny: Convoy, convoy: Convoy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_and_ask_to_stop(job: Job) -> None:
        train_epoch(job)
        assert isinstance(job.stop, StopRequest)
        job.stop.requested = True

    with monkeypatch.context() as patch:
        patch.setattr("convoy.outer.single.train_epoch", train_and_ask_to_stop)
        assert tiny("--quiet", "--out", "run").code == 130
    again = summary_of(convoy("train", "--resume", "run", "--json", "--quiet"))
    assert (again["epochs"], again["state"]) == (1, "finished")
    assert load_newest(Path("run/checkpoints")).checkpoint.progress["epoch"] == 1
    assert "this run is finished" in convoy("train", "--resume", "run").err


def test_divergence_is_told_and_recorded(tiny: Convoy) -> None:
    outcome = tiny("--quiet", "--lr", 1e30, "--out", "run")
    assert outcome.code == 5
    assert outcome.out == ""
    assert "training has diverged. Try a smaller --lr" in outcome.err
    assert json.loads(Path("run/summary.json").read_text())["state"] == "failed"


def test_model_with_tied_weights_is_trained_and_saved(
    tiny: Convoy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    Path("tied_model.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    first, second = nn.Linear(144, 144), nn.Linear(144, 144)\n"
        "    second.weight = first.weight\n"
        "    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second, nn.Linear(144, 2))\n"
    )
    outcome = tiny("--json", "--quiet", "--out", "run", "--model", "tied_model:make")
    assert summary_of(outcome)["epochs"] == 1


@pytest.mark.parametrize("variable", ["NO_COLOR", "TERM"])
def test_no_colour_where_the_user_wants_none(
    tiny: Convoy, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = tiny("--out", "first")
    assert "\x1b[" in coloured.err
    monkeypatch.setenv(variable, "dumb")
    bare = tiny("--out", "second")
    assert bare.code == 0
    assert not any(f"\x1b[{code}m" in bare.err + bare.out for code in (31, 32, 33, 34, 35, 36))


def test_help_and_version_are_not_errors(convoy: Convoy) -> None:
    assert convoy("--version").out.strip() == "0.1.0"
    assert convoy("train", "--help").code == 0
