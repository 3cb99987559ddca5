"""The lead's ledger file: each update once, also where a run goes back to a checkpoint."""

import json
from pathlib import Path
from typing import Any

from convoy.launch.ledger_file import LedgerFile
from convoy.outer.ledger import Update, find_faults

SAMPLES, BATCH = 100, 10


def line(step: int, quorum: int) -> list[Any]:
    epoch, within = divmod(step, SAMPLES // BATCH)
    start = within * BATCH
    return [step, epoch, start, start + BATCH, quorum, [[0, BATCH]]]


def lines(first: int, stop: int, quorum: int) -> list[list[Any]]:
    return [line(step, quorum) for step in range(first, stop)]


def open_ledger() -> LedgerFile:
    return LedgerFile(Path("ledger.jsonl"))


def written() -> list[Update]:
    text = Path("ledger.jsonl").read_text()
    return [Update.from_line(json.loads(one)) for one in text.splitlines()]


def test_what_a_new_teller_tells_again_is_not_written_again() -> None:
    with open_ledger() as ledger:
        ledger.write(lines(0, 6, 1))
        ledger.write(lines(0, 10, 1))
    assert len(written()) == 10
    assert find_faults(written(), SAMPLES, 1) == []


def test_a_step_that_is_done_again_makes_what_followed_void() -> None:
    with open_ledger() as ledger:
        ledger.write(lines(0, 8, 1))
        ledger.write(lines(5, 6, 2))
        ledger.write(lines(6, 8, 1))  # equal to what was void: it counts anew
        ledger.write(lines(8, 10, 2))
    assert find_faults(written(), SAMPLES, 1) == []


def test_going_back_to_a_checkpoint_puts_its_updates_back() -> None:
    """Nodes that had fetched an older state train for a while and die, then others start."""
    with open_ledger() as ledger:
        ledger.write(lines(0, 7, 1))
        ledger.keep(6)
        ledger.write(lines(0, 3, 2))  # from the state before that checkpoint
        ledger.go_back()
        ledger.write(lines(6, 10, 3))  # from the checkpoint
    assert find_faults(written(), SAMPLES, 1) == []


def test_going_back_where_nothing_else_happened_writes_nothing() -> None:
    with open_ledger() as ledger:
        ledger.write(lines(0, 6, 1))
        ledger.keep(6)
        ledger.go_back()
    assert len(written()) == 6
