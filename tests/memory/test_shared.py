"""Vectors in shared memory: both sides see the same numbers, and no other block is opened."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from convoy.memory import shared
from convoy.memory.shared import SharedVector, remove

SIZE = 1000
MEMORY = Path("/dev/shm")


@pytest.fixture
def block() -> Iterator[SharedVector]:
    made = SharedVector.make(SIZE, torch.float32)
    assert made is not None
    yield made
    remove(made.name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_one_side_writes_the_other_reads(dtype: torch.dtype) -> None:
    made = SharedVector.make(SIZE, dtype)
    assert made is not None
    there = SharedVector.open(made.name, SIZE, dtype)
    remove(made.name)  # it lives as long as somebody uses it
    assert there is not None
    numbers = torch.arange(SIZE).to(dtype)
    made.vector.copy_(numbers)
    assert torch.equal(there.vector, numbers)
    there.vector.copy_(-numbers)
    assert torch.equal(made.vector, -numbers)
    assert made.vector.dtype == dtype


def test_who_only_looks_changes_a_copy(block: SharedVector) -> None:
    seen = SharedVector.look_at(block.name, SIZE, torch.float32)
    assert seen is not None
    block.vector.fill_(1.0)
    assert torch.equal(seen.vector, torch.ones(SIZE))
    seen.vector.fill_(2.0)
    assert torch.equal(block.vector, torch.ones(SIZE))


def test_only_its_owner_can_read_it(block: SharedVector) -> None:
    assert (MEMORY / block.name).stat().st_mode & 0o777 == 0o600


def test_names_differ_and_a_block_vanishes() -> None:
    names = []
    for _ in range(3):
        made = SharedVector.make(SIZE, torch.float32)
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
    block: SharedVector, size: int, dtype: torch.dtype
) -> None:
    assert SharedVector.open(block.name, size, dtype) is None
    assert SharedVector.open(block.name, SIZE, torch.float32) is not None


@pytest.mark.parametrize("change", ["/../dev/shm/{}", "{}/", "../shm/{}", "{}x", "X{}", "", "\0"])
def test_a_name_of_another_form_is_not_opened(block: SharedVector, change: str) -> None:
    assert SharedVector.open(change.format(block.name), SIZE, torch.float32) is None


def test_files_of_other_names_are_neither_opened_nor_removed(tmp_path: Path) -> None:
    other = MEMORY / f"other-{os.getpid()}"
    other.write_bytes(bytes(8 * SIZE))
    try:
        assert SharedVector.open(other.name, SIZE, torch.float32) is None
        remove(other.name)
        remove(f"../../{tmp_path}/x")
        assert other.exists()
    finally:
        other.unlink()


def test_a_block_of_another_user_is_not_opened(
    block: SharedVector, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert SharedVector.open(block.name, SIZE, torch.float32) is None


def test_what_is_no_plain_file_is_not_opened(block: SharedVector) -> None:
    name = f"convoy-{secrets.token_hex(16)}"
    path = MEMORY / name
    ways: list[Callable[[], None]] = [
        lambda: path.symlink_to(MEMORY / block.name),
        path.mkdir,
        lambda: os.mkfifo(path),
    ]
    for make in ways:
        make()
        try:
            assert SharedVector.open(name, SIZE, torch.float32) is None
        finally:
            path.rmdir() if path.is_dir() else path.unlink()


def test_refusing_leaves_no_file_open(block: SharedVector) -> None:
    before = _open_blocks()
    for _ in range(20):
        SharedVector.open(block.name, SIZE + 1, torch.float32)
        SharedVector.make(1 << 50, torch.float64)
    assert _open_blocks() <= before  # fewer: one of another test was let go of


def _open_blocks() -> int:
    """Count what is open of shared memory: threads of others open and close sockets meanwhile."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            found += os.readlink(f"/proc/self/fd/{name}").startswith(str(MEMORY))
    return found


@pytest.mark.parametrize("size", [0, 1 << 50])
def test_without_room_there_is_no_block_and_nothing_is_left(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = secrets.token_hex(16)
    monkeypatch.setattr(secrets, "token_hex", lambda _: name)
    assert SharedVector.make(size, torch.float64) is None
    assert not (MEMORY / f"convoy-{name}").exists()


def test_without_shared_memory_there_is_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_FOLDER", tmp_path / "none")
    assert SharedVector.make(SIZE, torch.float32) is None
    assert SharedVector.open("convoy-" + "0" * 32, SIZE, torch.float32) is None
