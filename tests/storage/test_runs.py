"""The runs below a folder, whatever state they are in."""

from pathlib import Path

import pytest

from convoy.config import Config
from convoy.errors import ConfigError
from convoy.storage.runfolder import RunFolder
from convoy.storage.runs import list_runs, read_run


def make_run(path: Path, summary: str | None = None, **options: object) -> Path:
    """Make a run's folder with a config and perhaps a summary."""
    path.mkdir(parents=True)
    folder = RunFolder(path)
    folder.write_config(Config().replaced(options))
    if summary is not None:
        folder.summary.write_text(summary)
    return path


def test_run_is_read_with_config_summary_and_checkpoints(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", '{"state": "finished", "epochs": 3}', epochs=3)
    for step in (20, 10):
        (path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    (path / "checkpoints" / ".partial-1-step-00000030").mkdir()
    record = read_run(path)
    assert record.path == path
    assert record.config["epochs"] == 3
    assert record.summary["epochs"] == 3
    assert record.state == "finished"
    assert record.checkpoints == ["step-00000010", "step-00000020"]


@pytest.mark.parametrize("summary", [None, "", "{", "[]", "3", "\x00"])
def test_run_without_a_readable_summary_is_unfinished(tmp_path: Path, summary: str | None) -> None:
    record = read_run(make_run(tmp_path / "a", summary))
    assert record.state == "unfinished"
    assert record.summary == {}
    assert record.checkpoints == []


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="this folder holds no run of Convoy; got"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="this folder holds no run of Convoy; got"):
        read_run(tmp_path / "none")


def test_list_is_sorted_and_passes_over_what_is_no_run(tmp_path: Path) -> None:
    for name in ("b", "a"):
        make_run(tmp_path / name)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    broken = make_run(tmp_path / "broken")
    (broken / "config.toml").write_text("epochs = ")
    assert [record.path.name for record in list_runs(tmp_path)] == ["a", "b"]


def test_list_of_an_empty_folder_is_empty(tmp_path: Path) -> None:
    assert list_runs(tmp_path) == []


@pytest.mark.parametrize("name", ["none", "file"])
def test_list_refuses_what_is_no_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=f"no such folder of runs; got .*{name}"):
        list_runs(tmp_path / name)
