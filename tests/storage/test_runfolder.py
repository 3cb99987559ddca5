"""A run's folder: made once, held by one, and no trace of what never came to a run."""

import fcntl
import json
import time
import tomllib
from pathlib import Path

import pytest

from convoy.config import FIELDS, Config
from convoy.errors import CheckpointError, ConfigError, EnvironmentProblem, StorageError
from convoy.storage.runfolder import RunFolder, config_text, is_held, new_run_folder


def make_run(path: Path, config: Config | None = None) -> RunFolder:
    """Make a run's folder with a config, and let it go."""
    with RunFolder(path) as folder:
        folder.create()
        folder.write_config(config or Config())
    return folder


def test_create_makes_the_folder_and_those_above(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a" / "b") as folder:
        folder.create()
        assert folder.path.is_dir()


def test_create_takes_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert make_run(tmp_path / "run").config.is_file()


def test_create_refuses_a_folder_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("x")
    with (
        RunFolder(tmp_path / "run") as folder,
        pytest.raises(ConfigError, match=r"is not empty; got .*run.*--out, or --resume"),
    ):
        folder.create()
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("below", ["", "deeper", "deeper/still"])
def test_create_refuses_a_path_at_or_below_a_file(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("x")
    with (
        RunFolder(tmp_path / "file" / below) as folder,
        pytest.raises(ConfigError, match=r"cannot be written.*Give another --out"),
    ):
        folder.create()
    assert (tmp_path / "file").read_text() == "x"


def test_second_holder_is_refused_until_the_first_lets_go(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as first:
        first.create()
        first.write_config(Config())
        second = RunFolder(tmp_path / "run")
        with pytest.raises(EnvironmentProblem, match="another process is working on this run"):
            second.acquire()
    with second:
        second.acquire()


def test_held_run_cannot_be_opened(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    with (tmp_path / "run" / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(EnvironmentProblem, match="another process"):
            RunFolder(tmp_path / "run").open()


def test_a_run_is_held_as_long_as_its_holder_lives(tmp_path: Path) -> None:
    assert not is_held(tmp_path / "run")
    with RunFolder(tmp_path / "run") as folder:
        folder.create()
        folder.write_config(Config())
        assert is_held(folder.path)
        assert is_held(folder.path)  # looking does not take it away
    assert not is_held(folder.path)
    with folder:
        folder.acquire()  # nor does it keep the run from the next


def test_looking_whether_a_run_is_held_writes_nothing(tmp_path: Path) -> None:
    assert not is_held(tmp_path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".lock").mkdir()  # nobody can tell
    assert is_held(tmp_path)


def test_run_that_cannot_be_locked_is_an_error_of_ours(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run" / ".lock").mkdir()  # as little writable as a file on a read-only disk
    with pytest.raises((EnvironmentProblem, StorageError), match="run"):
        RunFolder(tmp_path / "run").open()


def test_unused_folder_is_removed(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.create()
    assert list(tmp_path.iterdir()) == []


def test_unused_folder_is_removed_after_a_failure_too(tmp_path: Path) -> None:
    def fail() -> None:
        with RunFolder(tmp_path / "run") as folder:
            folder.create()
            raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_folders_above_an_unused_one_are_removed_if_we_made_them(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "runs" / "one") as folder:
        folder.create()
    assert list(tmp_path.iterdir()) == []


def test_empty_folder_that_was_there_before_stays(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with RunFolder(tmp_path / "run") as folder:
        folder.create()
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]
    assert list((tmp_path / "run").iterdir()) == []


def test_used_folder_stays(tmp_path: Path) -> None:
    assert make_run(tmp_path / "run").config.is_file()


def test_unused_folder_with_something_else_in_it_stays(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run") as folder:
        folder.create()
        folder.events.write_text("{}\n")
    assert folder.events.exists()


def test_open_returns_the_saved_config(tmp_path: Path) -> None:
    config = Config(epochs=3, milestones=(1.0, 2.5), schedule="step", data_dir="x")
    make_run(tmp_path / "run", config)
    with RunFolder(tmp_path / "run") as folder:
        assert folder.open() == config


def test_open_refuses_what_is_no_run_and_leaves_it_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(CheckpointError, match=r"holds no run of Convoy; got .*photos"):
        RunFolder(tmp_path / "photos").open()
    assert list((tmp_path / "photos").iterdir()) == []


def test_open_removes_leftovers_of_dead_processes(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    leftover = folder.path / ".partial-99999999-config.toml"
    leftover.write_text("half")
    with RunFolder(folder.path) as again:
        again.open()
    assert not leftover.exists()


def test_summary_is_json_and_a_disk_that_refuses_it_is_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    folder.write_summary({"state": "finished"})
    assert json.loads(folder.summary.read_text()) == {"state": "finished"}
    with pytest.raises(StorageError, match=r"summary\.json could not be written"):
        RunFolder(tmp_path / "gone").write_summary({})


def test_config_that_the_disk_refuses_is_told(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"config\.toml could not be written"):
        RunFolder(tmp_path / "gone").write_config(Config())


def test_saved_text_has_each_value_with_its_meaning() -> None:
    everything = Config(
        data_dir="d", cache_dir="c", devices="cpu", speeds=(1.0,), speed_changes="1:1@1"
    )
    lines = config_text(everything).splitlines()
    expected = [name for name, field in FIELDS.items() if field.metadata["kept"]]
    assert [line.split(" = ")[0] for line in lines] == expected
    for name, line in zip(expected, lines, strict=True):
        assert line.endswith(f"# {FIELDS[name].metadata['help']}")


def test_saved_text_leaves_out_what_is_not_set_and_what_concerns_one_start_only() -> None:
    values = tomllib.loads(config_text(Config(out="here", stop_after=1)))
    assert "out" not in values
    assert "stop_after" not in values
    assert "data_dir" not in values
    assert values["epochs"] == Config().epochs


def test_default_path_names_time_model_and_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "20260102-030405")
    with new_run_folder(Config()) as folder:
        assert folder.path == Path("runs/20260102-030405-lenet5-fashion-mini")


def test_default_path_is_new_even_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda _: "20260102-030405")
    with (
        new_run_folder(Config()) as one,
        new_run_folder(Config()) as two,
        new_run_folder(Config()) as three,
    ):
        assert len({one.path, two.path, three.path}) == 3


@pytest.mark.parametrize(
    "name",
    [
        "/data/my images.tar.gz",
        "../../etc/passwd",
        "..",
        "/",
        "",
        ".",
        "mod.ule:call_able",
        "日本語/",
        "~",
        "-rf",
        "[red]x[/]",
        pytest.param("x" * 240, id="long"),
        pytest.param("日" * 85, id="long in bytes"),
    ],
)
def test_default_path_is_one_plain_folder_below_runs(name: str) -> None:
    with new_run_folder(Config(data=name, model=name)) as folder:
        assert folder.path.parent == Path("runs")
        assert all(c.isalnum() or c == "-" for c in folder.path.name)
        assert folder.path.is_dir()
