"""The record of a run: whole lines, in order, also after a kill in the middle of one."""

from pathlib import Path
from typing import Any

import pytest

from convoy.errors import StorageError
from convoy.launch.parameters.record import Record, read_record

PATH = Path("record.jsonl")


def written(*numbers: int) -> None:
    with Record(PATH) as record:
        for number in numbers:
            record.write("submit", number=number, words="ä\n")


def found() -> list[Any]:
    lines = list(read_record(PATH))
    assert all(line["event"] == "submit" and line["words"] == "ä\n" for line in lines)
    return [line["number"] for line in lines]


def test_happenings_come_back_in_their_order_and_a_restart_adds_to_them() -> None:
    written(1, 2)
    written(3)
    assert found() == [1, 2, 3]


def test_each_line_is_in_the_file_at_once() -> None:
    with Record(PATH) as record:
        for number in range(3):
            record.write("submit", number=number, words="ä\n")
            assert found() == list(range(number + 1))


@pytest.mark.parametrize("missing", [1, 2, 10, 40])
def test_a_torn_last_line_is_left_out(missing: int) -> None:
    written(1, 2, 3)
    PATH.write_bytes(PATH.read_bytes()[:-missing])
    assert found() == ([1, 2, 3] if missing == 1 else [1, 2])


def test_a_damaged_line_in_the_middle_is_told_with_its_number() -> None:
    written(1, 2, 3)
    lines = PATH.read_text().splitlines()
    PATH.write_text("\n".join([lines[0], lines[1][:-4], lines[2], ""]))
    with pytest.raises(StorageError, match=r"line 2 of the record is damaged.*record.jsonl"):
        list(read_record(PATH))


def test_a_record_that_is_not_there_is_told() -> None:
    with pytest.raises(StorageError, match=r"the record cannot be read.*record.jsonl"):
        list(read_record(PATH))


def test_what_follows_a_torn_line_after_a_restart_is_whole() -> None:
    written(1, 2, 3)
    PATH.write_bytes(PATH.read_bytes()[:-10])
    written(4, 5)
    assert found() == [1, 2, 4, 5]
    PATH.write_bytes(b'{"event": "su')  # nothing but a torn line
    written(6)
    assert found() == [6]


def test_bytes_that_are_no_text_are_told() -> None:
    written(1)
    PATH.write_bytes(PATH.read_bytes() + b"\xff\xfe\n")
    with pytest.raises(StorageError, match=r"record.*record.jsonl"):
        list(read_record(PATH))
