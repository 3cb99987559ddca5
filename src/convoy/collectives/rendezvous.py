"""Where the ranks of one host wait for each other.

Each rank counts its steps in a word of shared memory; the others read it. Whoever waits looks a few
times, giving its core to others in between, and then sleeps until a bell is rung: by the rank that
was the last to come, with one call of the system (a futex) for all. So ranks that outnumber the
cores do not burn what the others need, and ranks that have a core each hardly ever sleep.

Words are written by one rank and read by others without a lock. That is right on processors that
show writes to others in the order in which they were made (x86-64), and only there (`is_possible`).
"""

import ctypes
import os
import platform
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from torch import Tensor

from convoy.collectives.wires import PeerLostError

PAGE_BYTES = 4096
MOST_RANKS = 64
_LOOKS = 20  # before a rank goes to sleep: longer than a short sum takes, shorter than a sleep
_NAP_S = 0.05  # after which a sleeper looks whether the others live
_WORD_BYTES = 8
_STEPS, _ASLEEP, _LEFT, _PIDS, _BELL = (MOST_RANKS * place for place in range(5))  # words
_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE, _ALL = 202, 0, 1, 1 << 30

_system_call = ctypes.CDLL(None, use_errno=True).syscall
_system_call.restype = ctypes.c_long


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_NAP = ctypes.byref(_Timespec(0, int(_NAP_S * 1e9)))


def is_possible() -> bool:
    """Tell whether processes can meet in this way on this machine."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # an old kernel
        return False
    return True


class Rendezvous:
    """One rank's side.

    Args:
        page: shared memory, full of zeros at first.
        place: which of the host's ranks this is.
        ranks: the host's ranks, as people know them.
        deadline_s: how long a rank is waited for.
        is_broken: tells, from another thread maybe, that waiting has become useless.
    """

    def __init__(
        self,
        page: Tensor,
        place: int,
        ranks: Sequence[int],
        deadline_s: float,
        is_broken: Callable[[], bool],
    ) -> None:
        words = memoryview(page[:PAGE_BYTES].numpy().data).cast("Q")
        size = len(ranks)
        self._steps = words[_STEPS : _STEPS + size]
        self._asleep = words[_ASLEEP : _ASLEEP + size]
        self._left = words[_LEFT : _LEFT + size]
        self._pids = words[_PIDS : _PIDS + size]
        self._bell = words[_BELL : _BELL + 1].cast("B").cast("I")  # a futex has 32 bits: the lower
        self._bell_at = ctypes.c_void_p(page.data_ptr() + _BELL * _WORD_BYTES)
        self._place, self._ranks = place, tuple(ranks)
        self._deadline_s, self._is_broken = deadline_s, is_broken
        self._fence = threading.Lock()
        self._watched: dict[int, int] = {}  # places by their processes' descriptors
        self._poll = select.poll()
        self._step = 0
        self._pids[place] = os.getpid()

    def watch(self) -> None:
        """Take note of the others' processes; all of them have opened the page by now."""
        for place, pid in enumerate(self._pids):
            if place == self._place:
                continue
            try:
                handle = os.pidfd_open(pid)
            except OSError as error:
                raise self._lost([place]) from error
            self._watched[handle] = place
            self._poll.register(handle, select.POLLIN)

    def post(self) -> int:
        """Say that this rank has done its next step; return that step."""
        self._step += 1
        self._steps[self._place] = self._step
        self._make_seen()
        last = min(self._steps) & 0xFFFFFFFF
        if last != self._bell[0]:
            self._bell[0] = last
            self._make_seen()
            if any(self._asleep):
                self._ring()
        return self._step

    def wait(self, step: int) -> None:
        """Wait until all ranks have done a step.

        Raises:
            PeerLostError: one is gone, or has not come within the deadline.
        """
        steps = self._steps
        if min(steps) >= step:
            return
        for _ in range(_LOOKS):
            os.sched_yield()
            if min(steps) >= step:
                return
        self._sleep_until(step)

    def leave(self) -> None:
        """Come no more: whoever waits for us is told."""
        self._left[self._place] = 1
        self._ring()
        for handle in self._watched:
            with suppress(KeyError):
                self._poll.unregister(handle)
            os.close(handle)
        self._watched.clear()

    def _sleep_until(self, step: int) -> None:
        deadline = time.monotonic() + self._deadline_s
        self._asleep[self._place] = 1
        try:
            while True:
                # The system lets nobody sleep if the bell has been rung since it was read here.
                seen = self._bell[0]
                if min(self._steps) >= step:
                    return
                _system_call(_FUTEX, self._bell_at, _FUTEX_WAIT, ctypes.c_uint32(seen), _NAP)
                if min(self._steps) >= step:
                    return
                self._check(step, deadline)
        finally:
            self._asleep[self._place] = 0

    def _check(self, step: int, deadline: float) -> None:
        """Raise an error if there is no sense in waiting on."""
        ended = {self._watched[handle] for handle, _ in self._poll.poll(0)}
        gone = [place for place, has_left in enumerate(self._left) if has_left or place in ended]
        late = [place for place, done in enumerate(self._steps) if done < step]
        if not late:
            return  # whoever ended had done its part before
        if gone := [place for place in gone if place in late]:
            raise self._lost(gone)
        if self._is_broken():
            raise PeerLostError("the group was broken up")
        if time.monotonic() > deadline:
            who = _named([self._ranks[place] for place in late])
            raise PeerLostError(f"{who} did not come to a sum within {self._deadline_s:g} s")

    def _lost(self, places: Sequence[int]) -> PeerLostError:
        who = _named([self._ranks[place] for place in places])
        return PeerLostError(f"{who} of this machine {'is' if len(places) == 1 else 'are'} gone")

    def _make_seen(self) -> None:
        """Let what was written be seen before anything is read: any lock of the system does it."""
        self._fence.acquire()
        self._fence.release()

    def _ring(self) -> None:
        _system_call(_FUTEX, self._bell_at, _FUTEX_WAKE, _ALL, None)


def _named(ranks: Sequence[int]) -> str:
    """Return ranks in words.

    >>> _named([3]), _named([1, 2])
    ('rank 3', 'ranks 1, 2')
    """
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
