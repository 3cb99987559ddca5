"""The key's file: its owner's alone, and made anew where it is not."""

import os
import stat
from pathlib import Path

import pytest

from convoy.monitor.dashboard.key import key_path, read_or_make_key


def test_it_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "watch" / "a.key"
    key = read_or_make_key(path)
    assert len(key) == 64
    assert read_or_make_key(path) == key
    assert path.read_text() == f"{key}\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o666])
def test_a_key_that_others_may_have_read_is_void(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a.key"
    key = read_or_make_key(path)
    path.chmod(mode)
    assert read_or_make_key(path) != key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 64, b"g" * 64, b"ab" * 33])
def test_what_is_no_key_is_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.key"
    path.write_bytes(content)
    path.chmod(0o600)
    key = read_or_make_key(path)
    assert len(key) == 64
    assert read_or_make_key(path) == key


def test_a_link_to_a_key_of_others_is_not_followed(tmp_path: Path) -> None:
    theirs, path = tmp_path / "theirs", tmp_path / "a.key"
    theirs.write_text("ab" * 32)
    theirs.chmod(0o600)
    path.symlink_to(theirs)
    assert read_or_make_key(path) != "ab" * 32
    assert theirs.read_text() == "ab" * 32


def test_a_disk_that_refuses_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert len(read_or_make_key(tmp_path / "file" / "a.key")) == 64
    assert "cannot be kept" in caplog.text


def test_each_run_has_its_own_whatever_way_leads_there(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (tmp_path / "short").symlink_to(run)
    os.chdir(tmp_path)
    paths = {key_path(tmp_path, way) for way in (run, Path("runs/a"), Path("short"))}
    assert len(paths) == 1
    assert paths != {key_path(tmp_path, tmp_path / "elsewhere" / "a")}
    assert paths.pop().name.startswith("a-")
