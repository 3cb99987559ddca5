"""Emulated nodes get cores so that each has what it was promised."""

import os
import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from convoy.launch.lab import Lab
from convoy.launch.pinning import assign_cores, pin


@given(
    speeds=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12),
    count=st.integers(1, 8),
)
def test_no_core_is_promised_twice(speeds: list[float], count: int) -> None:
    chosen = assign_cores(speeds, range(count))
    if None in chosen:
        assert set(chosen) == {None}
        return
    for core in range(count):
        given = (s for s, c in zip(speeds, chosen, strict=True) if c == core)
        assert sum(given) <= 1.0 + 1e-6


def test_more_than_a_core_is_pinned_nowhere() -> None:
    assert assign_cores([2.0, 0.1], [0, 1, 2]) == (None, None)


def test_a_placed_process_keeps_to_its_core_and_is_freed_again() -> None:
    free = os.sched_getaffinity(0)
    words = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        try:
            with Lab([0.5]) as lab:
                lab.place(0, process.pid)
                assert os.sched_getaffinity(process.pid) == {min(free)}
                lab.lift(process.pid)
                assert os.sched_getaffinity(process.pid) == free
                lab.place(0, process.pid)
            assert os.sched_getaffinity(process.pid) == free
        finally:
            process.kill()


def test_a_process_that_is_gone_is_forgiven() -> None:
    gone = 2**22 - 1
    assert not Path(f"/proc/{gone}").exists()
    pin(gone, {0})
