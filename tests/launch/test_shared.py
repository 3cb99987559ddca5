"""Vectors in shared memory: both sides see the same numbers, and no other block is opened."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from convoy.launch import shared
from convoy.launch.shared import SharedVectors, remove

SIZE = 1000
MEMORY = Path("/dev/shm")


@pytest.fixture
def block() -> Iterator[SharedVectors]:
    made = SharedVectors.make(SIZE, torch.float32)
    assert made is not None
    yield made
    remove(made.name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_one_side_writes_the_other_reads(dtype: torch.dtype) -> None:
    made = SharedVectors.make(SIZE, dtype)
    assert made is not None
    there = SharedVectors.open(made.name, SIZE, dtype)
    remove(made.name)  # it lives as long as somebody uses it
    assert there is not None
    up, down = torch.arange(SIZE).to(dtype), -torch.arange(SIZE).to(dtype)
    made.up.copy_(up)
    there.down.copy_(down)
    assert torch.equal(there.up, up)
    assert torch.equal(made.down, down)
    assert made.up.dtype == dtype


def test_only_its_owner_can_read_it(block: SharedVectors) -> None:
    assert (MEMORY / block.name).stat().st_mode & 0o777 == 0o600


def test_names_differ_and_a_block_vanishes() -> None:
    names = []
    for _ in range(3):
        made = SharedVectors.make(SIZE, torch.float32)
        assert made is not None
        names.append(made.name)
        remove(made.name)
        assert not (MEMORY / made.name).exists()
        remove(made.name)  # nothing is there any more
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    ("size", "dtype"), [(SIZE - 1, torch.float32), (SIZE, torch.float64), (0, torch.float32)]
)
def test_a_block_of_another_size_is_not_opened(
    block: SharedVectors, size: int, dtype: torch.dtype
) -> None:
    assert SharedVectors.open(block.name, size, dtype) is None
    assert SharedVectors.open(block.name, SIZE, torch.float32) is not None


@pytest.mark.parametrize("change", ["/../dev/shm/{}", "{}/", "../shm/{}", "{}x", "X{}", "", "\0"])
def test_a_name_of_another_form_is_not_opened(block: SharedVectors, change: str) -> None:
    assert SharedVectors.open(change.format(block.name), SIZE, torch.float32) is None


def test_files_of_other_names_are_neither_opened_nor_removed(tmp_path: Path) -> None:
    other = MEMORY / f"other-{os.getpid()}"
    other.write_bytes(bytes(8 * SIZE))
    try:
        assert SharedVectors.open(other.name, SIZE, torch.float32) is None
        remove(other.name)
        remove(f"../../{tmp_path}/x")
        assert other.exists()
    finally:
        other.unlink()


def test_a_block_of_another_user_is_not_opened(
    block: SharedVectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.getuid()
    monkeypatch.setattr(shared.os, "getuid", lambda: user + 1)
    assert SharedVectors.open(block.name, SIZE, torch.float32) is None


def test_what_is_no_plain_file_is_not_opened(block: SharedVectors) -> None:
    name = f"convoy-{secrets.token_hex(16)}"
    path = MEMORY / name
    for make in (
        lambda: path.symlink_to(MEMORY / block.name),
        path.mkdir,
        lambda: os.mkfifo(path),
    ):
        make()
        try:
            assert SharedVectors.open(name, SIZE, torch.float32) is None
        finally:
            path.rmdir() if path.is_dir() else path.unlink()


def test_refusing_leaves_no_file_open(block: SharedVectors) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        SharedVectors.open(block.name, SIZE + 1, torch.float32)
        SharedVectors.make(1 << 50, torch.float64)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("size", [0, 1 << 50])
def test_without_room_there_is_no_block_and_nothing_is_left(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = secrets.token_hex(16)
    monkeypatch.setattr(shared.secrets, "token_hex", lambda _: name)
    assert SharedVectors.make(size, torch.float64) is None
    assert not (MEMORY / f"convoy-{name}").exists()


def test_without_shared_memory_there_is_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_FOLDER", tmp_path / "none")
    assert SharedVectors.make(SIZE, torch.float32) is None
    assert SharedVectors.open("convoy-" + "0" * 32, SIZE, torch.float32) is None
