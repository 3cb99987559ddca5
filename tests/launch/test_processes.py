"""Processes of this machine are started in the environment of today."""

import multiprocessing
import os
from multiprocessing.connection import Connection

import pytest

from convoy.launch.processes import how_it_ended, start_process

NAME, OTHER = "CONVOY_TEST_NAME", "CONVOY_TEST_OTHER"


def tell(line: Connection) -> None:
    line.send((os.environ.get(NAME), os.environ.get(OTHER)))


def ask() -> tuple[str | None, str | None]:
    ours, theirs = multiprocessing.Pipe()
    process = start_process(tell, (theirs,))
    theirs.close()
    found: tuple[str | None, str | None] = ours.recv()
    process.join()
    assert process.exitcode == 0
    return found


def test_what_was_set_and_unset_since_the_first_process_reaches_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(NAME, "one")
    assert ask() == ("one", None)
    monkeypatch.setenv(OTHER, "two")
    monkeypatch.delenv(NAME)
    assert ask() == (None, "two")


@pytest.mark.parametrize(
    ("code", "words"), [(3, "ended with exit code 3"), (-9, "killed by signal 9")]
)
def test_ends_are_told_in_words(code: int, words: str) -> None:
    assert how_it_ended(code) == words
