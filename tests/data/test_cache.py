"""Decoded images are reused only if every byte is as it was written."""

import dataclasses
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import convoy.data.load
from convoy.config import Config
from convoy.data.cache import ImageCache
from convoy.data.catalog import find_source
from convoy.data.images import TrainTest
from convoy.data.load import load_data
from convoy.data.sources.source import Decoded, Source
from convoy.files import default_cache_dir
from convoy.tracking import Track, untracked
from tests.data.test_folder import write_classes


@pytest.fixture
def decodings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by one name whenever a source is decoded."""
    names: list[str] = []

    def counting(config: Config) -> Source:
        source = find_source(config)

        def decode(track: Track) -> Decoded:
            names.append(source.name)
            return source.decode(track)

        return dataclasses.replace(source, decode=decode)

    monkeypatch.setattr(convoy.data.load, "find_source", counting)
    return names


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_classes(tmp_path / "root" / "train", 3)
    write_classes(tmp_path / "root" / "test", 2, first=50)
    return tmp_path / "root"


def _load(**options: Any) -> TrainTest:
    return load_data(Config(**{"data": "root", "cache_dir": "cache", **options}))


def _entry(cache: str = "cache") -> Path:
    (folder,) = Path(cache).iterdir()
    return folder


def _assert_same(a: TrainTest, b: TrainTest) -> None:
    for one, other in ((a.train, b.train), (a.test, b.test)):
        assert torch.equal(one.images_NCHW, other.images_NCHW)
        assert one.images_NCHW.dtype == other.images_NCHW.dtype
        assert torch.equal(one.labels, other.labels)
        assert one.classes == other.classes
    assert (a.mean, a.std, a.digest, a.skipped) == (b.mean, b.std, b.digest, b.skipped)


def test_the_second_load_decodes_nothing_and_gives_the_same(
    root: Path, decodings: list[str]
) -> None:
    first, second = _load(), _load()
    assert decodings == ["root"]
    _assert_same(first, second)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("with_test", [True, False])
def test_arrays_come_back_as_they_were_stored(
    tmp_path: Path, decodings: list[str], dtype: Any, with_test: bool
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (8, 4, 4)).astype(dtype)
    arrays = {"x_train": images, "y_train": np.arange(8) % 2}
    if with_test:
        arrays |= {"x_test": images[:4], "y_test": np.arange(4) % 2}
    np.savez(tmp_path / "x.npz", allow_pickle=False, **arrays)
    first, second = _load(data="x.npz"), _load(data="x.npz")
    assert len(decodings) == 1
    _assert_same(first, second)


def test_what_is_done_to_loaded_images_never_reaches_the_file(
    root: Path, decodings: list[str]
) -> None:
    former = _load()
    _load().train.images_NCHW.zero_()
    _assert_same(_load(), former)
    assert len(decodings) == 1


def _truncate(folder: Path) -> None:
    path = folder / "train-images.npy"
    path.write_bytes(path.read_bytes()[:-1])


def _flip_bit(folder: Path) -> None:
    path = folder / "test-labels.npy"
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)


def _flip_pixel(folder: Path) -> None:
    path = folder / "train-images.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x80
    path.write_bytes(content)


def _change_manifest(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


_DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": _truncate,
    "flipped-label": _flip_bit,
    "flipped-pixel": _flip_pixel,
    "no-array": lambda folder: (folder / "train-labels.npy").unlink(),
    "no-manifest": lambda folder: (folder / "manifest.json").unlink(),
    "torn-manifest": lambda folder: os.truncate(folder / "manifest.json", 40),
    "manifest-of-bytes": lambda folder: _write(folder / "manifest.json", b"\xff\xfe\x00"),
    "manifest-of-a-list": lambda folder: _write(folder / "manifest.json", b"[]"),
    "empty-manifest": lambda folder: _write(folder / "manifest.json", b"{}"),
    "another-version": _change_manifest(format="convoy-images-0"),
    "another-key": _change_manifest(key="0" * 64),
    "no-statistics": _change_manifest(statistics=None),
}


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_damaged_entry_is_never_used_but_rebuilt(
    root: Path, decodings: list[str], damage: str
) -> None:
    first = _load()
    _DAMAGES[damage](_entry())
    _assert_same(_load(), first)
    assert len(decodings) == 2
    _assert_same(_load(), first)
    assert len(decodings) == 2


def _dead_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_what_a_dead_process_left_half_written_is_removed_and_never_used(
    root: Path, decodings: list[str]
) -> None:
    first = _load()
    entry = _entry()
    partial = entry.with_name(f".partial-{_dead_process()}-{entry.name}")
    entry.rename(partial)
    np.save(partial / "train-images.npy", np.zeros((6, 1, 5, 6), np.uint8))
    _assert_same(_load(), first)
    assert len(decodings) == 2
    assert [path.name for path in Path("cache").iterdir()] == [entry.name]


def test_what_a_living_process_is_writing_is_left_alone(root: Path, decodings: list[str]) -> None:
    partial = Path("cache") / f".partial-{os.getpid()}-other"
    partial.mkdir(parents=True)
    _load()
    assert partial.is_dir()
    assert len(decodings) == 1


@pytest.mark.parametrize("place", ["file/cache", "file"])
def test_an_unwritable_cache_costs_a_warning_only(
    root: Path,
    tmp_path: Path,
    decodings: list[str],
    caplog: pytest.LogCaptureFixture,
    place: str,
) -> None:
    (tmp_path / "file").write_text("no folder")
    expected = _load()
    data = _load(cache_dir=place)
    _assert_same(data, expected)
    assert len(decodings) == 2
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "decoded images could not be cached" in warnings[0].getMessage()
    assert (tmp_path / "file").read_text() == "no folder"


def _change_pixel(root: Path) -> None:
    shutil.copy(root / "train" / "cat" / "1.png", root / "train" / "cat" / "0.png")


def _rename_class(root: Path) -> None:
    for part in ("train", "test"):
        (root / part / "dog").rename(root / part / "eel")


_CHANGES: dict[str, Callable[[Path], None]] = {
    "content": _change_pixel,
    "class": _rename_class,
    "removed": lambda root: (root / "train" / "cat" / "0.png").unlink(),
    "added": lambda root: _write(
        root / "train" / "cat" / "9.png", (root / "train" / "cat" / "0.png").read_bytes()
    ),
    "renamed": lambda root: _rename(root / "train" / "cat" / "0.png", "z.png"),
}


def _rename(path: Path, name: str) -> None:
    path.rename(path.with_name(name))


@pytest.mark.parametrize("change", _CHANGES)
def test_the_key_follows_the_content(root: Path, decodings: list[str], change: str) -> None:
    first = _load()
    _CHANGES[change](root)
    second = _load()
    assert len(decodings) == 2
    assert first.digest != second.digest
    assert len(list(Path("cache").iterdir())) == 2


def test_the_key_does_not_follow_times_or_the_place(
    root: Path, tmp_path: Path, decodings: list[str]
) -> None:
    _load()
    shutil.copytree(root, tmp_path / "moved")
    for path in (tmp_path / "moved").rglob("*.png"):
        os.utime(path, (0, 0))
    _load(data="moved")
    assert len(decodings) == 1


def test_the_key_follows_the_decoding_options(root: Path, decodings: list[str]) -> None:
    _load()
    _load(image_size=4)
    assert len(decodings) == 2


def test_another_split_of_the_same_data_needs_no_decoding(
    tmp_path: Path, decodings: list[str]
) -> None:
    write_classes(tmp_path / "root", 6)
    a, b = _load(seed=1), _load(seed=2)
    assert len(decodings) == 1
    assert a.digest != b.digest
    assert not torch.equal(a.train.images_NCHW, b.train.images_NCHW)


def test_the_cache_lies_below_the_users_cache_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_dir() == tmp_path / "xdg" / "convoy"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_cache_dir() == tmp_path / "home" / ".cache" / "convoy"


def test_without_a_cache_dir_the_users_cache_is_used(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load_data(Config(data="root"))
    assert (_entry(str(tmp_path / "xdg" / "convoy")) / "manifest.json").is_file()


def test_an_absent_entry_is_none(tmp_path: Path) -> None:
    assert ImageCache(tmp_path / "none").load("0" * 64) is None


def test_an_entry_that_is_there_already_stays(root: Path) -> None:
    _load()
    key = find_source(Config(data="root")).fingerprint(untracked)
    assert key is not None
    cache = ImageCache(Path("cache"))
    stored = cache.load(key)
    assert stored is not None
    former = _entry().stat().st_ino
    cache.store(key, stored)
    assert _entry().stat().st_ino == former
