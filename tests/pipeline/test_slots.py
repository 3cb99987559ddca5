"""Rows that two stages see: found by name, used in turn, gone when nobody has them open."""

from pathlib import Path

import pytest
import torch

from convoy.memory.shared import SharedVector
from convoy.pipeline.slots import Slots, make_slots, open_slots


def test_what_one_side_writes_the_other_reads() -> None:
    made = make_slots(3, 5, torch.float32)
    opened = open_slots(made.names(3), 5, torch.float32)
    assert opened
    for number in range(7):
        made.row(number).fill_(number)
        assert opened.row(number).tolist() == [number] * 5
    assert opened.row(4).tolist() == [4] * 5  # 3 rows: the last three are there
    made.hide()


def test_hidden_rows_are_still_used_but_cannot_be_opened_and_leave_nothing_behind() -> None:
    made = make_slots(2, 4, torch.float64)
    names = made.names(2)
    opened = open_slots(names, 4, torch.float64)
    made.hide()
    made.row(0).fill_(1.0)
    assert opened.row(0).tolist() == [1.0] * 4
    assert not open_slots(names, 4, torch.float64)
    left = {path.name for path in Path("/dev/shm").glob("convoy-*")}
    assert not left & {bytes(name.tolist()).rstrip(b"\0").decode() for name in names}


def test_names_of_nothing_open_nothing() -> None:
    assert not open_slots(Slots(()).names(2), 4, torch.float32)
    made = make_slots(1, 4, torch.float32)
    assert not open_slots(made.names(1), 5, torch.float32)  # another size
    garbage = torch.full((1, 64), 255, dtype=torch.uint8)
    assert not open_slots(garbage, 4, torch.float32)
    made.hide()


def test_a_machine_without_memory_to_share_has_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SharedVector.make
    made: list[SharedVector | None] = []

    def once(size: int, dtype: torch.dtype) -> SharedVector | None:
        if made:
            return None
        made.append(real(size, dtype))
        return made[0]

    monkeypatch.setattr(SharedVector, "make", once)
    assert not make_slots(2, 4, torch.float32)
    assert made[0] is not None
    assert not Path("/dev/shm", made[0].name).exists()
