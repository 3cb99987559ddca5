"""`convoy runs`: tables for people, JSON for programs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from convoy.config import Config
from convoy.storage.runfolder import RunFolder
from tests.conftest import Outcome

Convoy = Callable[..., Outcome]

HISTORY = {
    "epoch": 1,
    "train_loss": 0.5,
    "train_accuracy": 0.75,
    "test_loss": 0.6,
    "test_accuracy": 0.875,
    "samples": 10,
    "seconds": 1.5,
}
SUMMARY = {
    "state": "finished",
    "reason": "all 1 epochs are done",
    "epochs": 1,
    "test_accuracy": 0.875,
    "seconds": 1.5,
    "history": [HISTORY],
}


def make_run(path: Path, summary: object = None, **options: object) -> Path:
    """Make a run's folder by hand."""
    path.mkdir(parents=True)
    folder = RunFolder(path)
    folder.write_config(Config().replaced(options))
    (folder.checkpoints / "step-00000004").mkdir(parents=True)
    if summary is not None:
        folder.summary.write_text(json.dumps(summary))
    return path


def test_list_shows_every_run_in_a_line(convoy: Convoy) -> None:
    make_run(Path("runs/a"), SUMMARY, model="resnet20")
    make_run(Path("runs/b"), data="[red]x[/]")
    outcome = convoy("runs", "list")
    assert (outcome.code, outcome.err) == (0, "")
    first, second = outcome.out.splitlines()[-2:]
    for word in ("a", "finished", "resnet20", "fashion-mini", "1", "87.50%", "1.5"):
        assert word in first.split()
    assert second.split() == ["b", "unfinished", "lenet5", "[red]x[/]", "-", "-", "-"]


def test_list_as_json_is_one_object(convoy: Convoy) -> None:
    make_run(Path("elsewhere/a"), SUMMARY)
    make_run(Path("elsewhere/b"))
    outcome = convoy("runs", "list", "elsewhere", "--json")
    assert outcome.code == 0
    runs = json.loads(outcome.out)["runs"]
    assert [run["run_dir"] for run in runs] == ["elsewhere/a", "elsewhere/b"]
    assert [run["state"] for run in runs] == ["finished", "unfinished"]
    assert runs[0]["test_accuracy"] == 0.875


def test_list_names_a_moved_run_where_it_is_now(convoy: Convoy) -> None:
    make_run(Path("now/a"), {**SUMMARY, "run_dir": "before/a"})
    outcome = convoy("runs", "list", "now", "--json")
    assert json.loads(outcome.out)["runs"][0]["run_dir"] == "now/a"


def test_list_of_an_empty_folder_says_so(convoy: Convoy) -> None:
    Path("[bold]").mkdir()
    assert convoy("runs", "list", "[bold]").out == "no runs in [bold]\n"
    assert json.loads(convoy("runs", "list", "[bold]", "--json").out) == {"runs": []}


def test_show_tells_state_settings_history_and_checkpoints(convoy: Convoy) -> None:
    make_run(Path("a"), SUMMARY, lr=0.25)
    outcome = convoy("runs", "show", "a")
    assert (outcome.code, outcome.err) == (0, "")
    assert "a: finished (all 1 epochs are done)" in outcome.out
    assert "lr=0.25" in outcome.out
    assert "87.50%" in outcome.out
    assert "checkpoints: step-00000004" in outcome.out


def test_show_of_a_run_that_has_not_ended(convoy: Convoy) -> None:
    make_run(Path("a"))
    assert "a: unfinished (it has not ended, or was killed)" in convoy("runs", "show", "a").out


def test_show_as_json_is_one_object(convoy: Convoy) -> None:
    make_run(Path("a"), SUMMARY, milestones=(1.0, 2.0), schedule="step")
    shown = json.loads(convoy("runs", "show", "a", "--json").out)
    assert list(shown) == ["run_dir", "state", "config", "summary", "checkpoints"]
    assert shown["run_dir"] == "a"
    assert shown["config"]["milestones"] == [1.0, 2.0]
    assert shown["summary"]["history"] == [HISTORY]
    assert shown["checkpoints"] == ["step-00000004"]


@pytest.mark.parametrize(
    "summary",
    [
        {"seconds": None},
        {"test_accuracy": "high"},
        {"history": None},
        {"history": [{}]},
        {"state": "[/]"},
    ],
    ids=str,
)
@pytest.mark.parametrize("command", [("list", "runs"), ("show", "runs/a")], ids=lambda c: c[0])
def test_summary_written_by_someone_else_breaks_nothing(
    convoy: Convoy, summary: dict[str, object], command: tuple[str, str]
) -> None:
    make_run(Path("runs/a"), summary)
    outcome = convoy("runs", *command)
    assert outcome.code == 0
    assert "a" in outcome.out


def test_the_names_of_runs_are_never_cut_short(
    convoy: Convoy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    name = "20261116-124201-a-model-with-a-long-name-data"
    with RunFolder(tmp_path / "runs" / name) as folder:
        folder.create()
        folder.write_config(Config())
    assert name in convoy("runs", "list").out
