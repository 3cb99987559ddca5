"""The service's state on disk: one of two files is whole, whatever is killed or damaged."""

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from convoy.files import FAILPOINTS
from convoy.launch.parameters.keeper import Keeper
from tests.outer.test_server import make_server, pull, submit

FOLDER = Path("service")
PLACES = [name for name in FAILPOINTS if name.startswith("service.")]


def write(keeper: Keeper, number: int) -> None:
    """Write a state that can be told from others."""
    tensors = {"weights": torch.full((1000,), float(number)), "statistics": torch.empty(0)}
    assert keeper.write(tensors, {"version": number, "note": "ä"}) == number


def written(count: int) -> None:
    keeper = Keeper(FOLDER)
    for number in range(1, count + 1):
        write(keeper, number)


def newest() -> int | None:
    """Return the number of the state that would be gone on from, which must be whole."""
    found = Keeper(FOLDER).newest
    if found is None:
        return None
    tensors, values = found
    number: int = values["version"]
    assert values["note"] == "ä"
    assert torch.equal(tensors["weights"], torch.full((1000,), float(number)))
    assert tensors["statistics"].numel() == 0
    return number


def test_nothing_is_found_in_a_new_folder() -> None:
    assert newest() is None
    assert FOLDER.is_dir()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_the_newest_state_is_found_and_only_two_are_kept(count: int) -> None:
    written(count)
    assert newest() == count
    assert len(list(FOLDER.iterdir())) == min(count, 2)


def test_a_keeper_that_is_opened_again_counts_on_and_spares_the_newest() -> None:
    for number in range(1, 6):
        write(Keeper(FOLDER), number)
        assert newest() == number
        if number > 1:
            (FOLDER / f"state-{'ba'[number % 2]}").unlink()  # the newest is lost
            assert newest() == number - 1
            write(Keeper(FOLDER), number)


def kill_at(place: str, passes: int) -> None:
    """Write states in another process until it is killed at a place."""
    program = (
        "from tests.launch.parameters.test_keeper import written\n"
        f"written({passes + 3})\n"
        "raise SystemExit('it was not killed')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "CONVOY_FAILPOINT": f"{place}@{passes}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("passes", [1, 3])
def test_a_kill_costs_at_most_the_state_that_was_being_written(
    place: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    kill_at(place, passes)
    is_there = place == "service.after-rename"
    before = list(FOLDER.glob("*.partial"))
    assert len(before) == (0 if is_there else 1)
    assert newest() == ((passes if is_there else passes - 1) or None)
    assert list(FOLDER.glob("*.partial")) == []
    assert Keeper(FOLDER).damaged == []
    write(Keeper(FOLDER), (newest() or 0) + 1)


@given(place=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_one_changed_byte_anywhere_sends_it_back_to_the_other(place: float, change: int) -> None:
    written(2)
    path = FOLDER / "state-b"
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= change
    path.write_bytes(content)
    assert newest() == 1
    assert Keeper(FOLDER).damaged == ["state-b"]
    write(Keeper(FOLDER), 2)
    assert (newest(), Keeper(FOLDER).damaged) == (2, [])
    for file in FOLDER.iterdir():
        file.unlink()


@pytest.mark.parametrize("length", [0, 10, 32, 40, 500])
def test_a_file_that_was_cut_short_sends_it_back_to_the_other(length: int) -> None:
    written(3)
    os.truncate(FOLDER / "state-a", length)
    assert newest() == 2
    assert Keeper(FOLDER).damaged == ["state-a"]


def test_with_both_damaged_there_is_nothing_and_both_are_told() -> None:
    written(2)
    for name in ("state-a", "state-b"):
        (FOLDER / name).write_bytes(b"")
    assert newest() is None
    assert Keeper(FOLDER).damaged == ["state-a", "state-b"]


def test_a_full_disk_is_told_and_leaves_the_states_that_are_there() -> None:
    written(2)
    keeper = Keeper(FOLDER)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            write(keeper, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert newest() == 2
    write(Keeper(FOLDER), 3)  # there is room again
    assert newest() == 3


def test_a_disk_that_refuses_to_flush_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    written(2)
    keeper = Keeper(FOLDER)
    asked = []

    def refuse(handle: int) -> None:
        asked.append(handle)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            write(keeper, 3)
    assert len(asked) == 1
    assert newest() == 2


@pytest.mark.parametrize("rule", ["beat", "fedbuff", "diloco", "delayed-nesterov:every=9"])
def test_a_servers_state_comes_back_from_the_disk_bit_for_bit(rule: str) -> None:
    server = make_server(rule)
    answers = [pull(server, node) for node in (0, 1)]
    for node in (0, 1) if rule == "diloco" else (0,):
        submit(server, node, answers[node])
    if server.deadline is not None:
        server.tick(server.deadline)
        submit(server, 1, answers[1])
    tensors, values = server.state()
    Keeper(FOLDER).write(tensors, values)
    found = Keeper(FOLDER).newest
    assert found is not None
    assert found[0].keys() == tensors.keys()
    assert all(torch.equal(found[0][name], tensor) for name, tensor in tensors.items())
    assert len(tensors) > 2  # memory, or what is buffered
    after = make_server(rule, admit=False)
    after.restore(*found)
    assert torch.equal(after.vector, server.vector)
    assert after.version == server.version
