"""Files that are either whole or not there."""

import hashlib
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from convoy.files import (
    FAILPOINTS,
    digest_of,
    failpoint,
    new_folder,
    remove_folder,
    remove_partials,
    sync_file,
    sync_folder,
    write_atomically,
)


def dead_process() -> int:
    """Return the number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    return process.pid


def test_written_file_holds_the_text_and_nothing_else_is_left(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.txt", "naïve\n")
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == "naïve\n"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_written_file_replaces_the_whole_former_content(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.txt", "long former content")
    write_atomically(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "new"


@pytest.mark.parametrize("umask", [0o000, 0o077])
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_written_file_has_the_mode_that_is_asked_for(tmp_path: Path, umask: int, mode: int) -> None:
    former = os.umask(umask)
    try:
        write_atomically(tmp_path / "a.txt", "text", mode=mode)
    finally:
        os.umask(former)
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == mode


def test_failed_write_keeps_the_former_content_and_leaves_no_trace(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.txt", "former")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "a.txt", "\udc80")
    assert (tmp_path / "a.txt").read_text() == "former"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_reader_of_the_former_file_keeps_what_it_opened(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a.txt", "former")
    with (tmp_path / "a.txt").open() as reader:
        write_atomically(tmp_path / "a.txt", "new")
        assert reader.read() == "former"


def test_folder_has_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "folder"
    with new_folder(target) as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
        assert folder.parent == target.parent
    assert (target / "a").read_text() == "1"
    assert list(target.parent.iterdir()) == [target]


def test_failed_folder_leaves_no_trace(tmp_path: Path) -> None:
    def fill() -> None:
        with new_folder(tmp_path / "folder") as folder:
            (folder / "a").write_text("1")
            raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_folder_that_another_made_meanwhile_stays(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with new_folder(target) as folder:
        (folder / "a").write_text("ours")
        target.mkdir()
        (target / "a").write_text("theirs")
    assert (target / "a").read_text() == "theirs"
    assert list(tmp_path.iterdir()) == [target]


def test_removed_folder_is_gone_with_all_it_held(tmp_path: Path) -> None:
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    (tmp_path / "folder" / "deep" / "a").write_text("1")
    remove_folder(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


def test_partials_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path: Path) -> None:
    dead, living = dead_process(), os.getpid()
    for owner in (dead, living):
        (tmp_path / f".partial-{owner}-folder").mkdir()
        (tmp_path / f".partial-{owner}-folder" / "a").write_text("1")
        (tmp_path / f".partial-{owner}-file").write_text("1")
    remove_partials(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        f".partial-{living}-file",
        f".partial-{living}-folder",
    ]
    assert (tmp_path / f".partial-{living}-folder" / "a").exists()


@pytest.mark.parametrize("name", ["step-00000001", "partial-1-x", ".partial-x-y", ".lock"])
def test_what_is_no_partial_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("1")
    remove_partials(tmp_path)
    assert (tmp_path / name).exists()


@pytest.mark.parametrize("name", FAILPOINTS)
def test_failpoint_does_nothing_unless_it_is_armed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CONVOY_FAILPOINT", raising=False)
    killed: list[int] = []
    monkeypatch.setattr("convoy.files.os.kill", lambda pid, number: killed.append(pid))
    failpoint(name)
    monkeypatch.setenv("CONVOY_FAILPOINT", "elsewhere")
    failpoint(name)
    assert killed == []
    monkeypatch.setattr("convoy.files._passes", Counter())
    monkeypatch.setenv("CONVOY_FAILPOINT", f"{name}@2")
    failpoint(name)
    assert killed == []
    failpoint(name)
    assert killed == [os.getpid()]


def test_failpoint_must_be_a_known_one() -> None:
    with pytest.raises(AssertionError, match="nowhere"):
        failpoint("nowhere")


def test_digest_is_the_sha256_of_the_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert digest_of(tmp_path / "a") == hashlib.sha256(b"abc").hexdigest()


def test_sync_of_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sync_file(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "none")


def _fill(path: Path, text: str, *, replace: bool) -> None:
    with new_folder(path, replace=replace) as folder:
        (folder / "content").write_text(text)


@pytest.mark.parametrize(("replace", "kept"), [(False, "old"), (True, "new")])
def test_a_folder_that_is_there_stays_or_is_replaced_whole(
    tmp_path: Path, replace: bool, kept: str
) -> None:
    _fill(tmp_path / "x", "old", replace=replace)
    _fill(tmp_path / "x", "new", replace=replace)
    assert (tmp_path / "x" / "content").read_text() == kept
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_replacement_that_fails_is_told_and_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(tmp_path / "x", "old", replace=True)
    rename = Path.rename
    fired = []

    def refuse(self: Path, target: Path) -> Path:
        if target == tmp_path / "x" and "old-x" not in self.name:
            fired.append(self)
            raise OSError(39, "Directory not empty")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="not empty"):
        _fill(tmp_path / "x", "new", replace=True)
    assert len(fired) == 1
    assert (tmp_path / "x" / "content").read_text() == "old"
