"""Where no quota may be set: a thread stops and continues processes to hold them to their part."""

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil

from convoy.machine import usable_cores

_THROTTLE_PERIOD_S = 0.05
_LEAST_PAUSE_S = 0.001
_CENSUS_S = 0.5
# A throttle that slept too long itself must not freeze a node for long afterwards.
_LONGEST_FREEZE_S = 1.0


def _cpu_time_s(pid: int) -> float:
    """Return the CPU time of all threads of a process, exact to the nanosecond.

    The number of the clock is what clock_getcpuclockid(3) returns. psutil has these times in
    steps of 10 ms only, which is most of what a slow node may use in one period.
    """
    return time.clock_gettime((~pid << 3) | 2)


@dataclass(slots=True)
class _Member:
    """A process the throttle knows; `frozen` only while we, not somebody else, stopped it."""

    process: psutil.Process
    cpu_s: float
    frozen: bool = False

    def freeze(self) -> None:
        if not self.frozen and self.process.status() != psutil.STATUS_STOPPED:
            self.process.send_signal(signal.SIGSTOP)
            self.frozen = True

    def thaw(self) -> None:
        if self.frozen:
            self.process.send_signal(signal.SIGCONT)
            self.frozen = False


@dataclass(slots=True)
class _Slot:
    """A node's processes and the CPU seconds they may still use in this period."""

    speed: float
    budget_s: float = 0.0
    members: dict[int, _Member] = field(default_factory=dict)

    @property
    def limited(self) -> bool:
        return bool(self.members) and self.speed < usable_cores()

    def refill(self, elapsed_s: float) -> None:
        """Grant what the elapsed time is worth; what was not used is not saved up."""
        most = self.speed * _THROTTLE_PERIOD_S
        least = -self.speed * _LONGEST_FREEZE_S
        self.budget_s = min(max(self.budget_s, least) + self.speed * elapsed_s, most)

    def charge(self) -> None:
        """Take what the members used since the last look from the budget."""
        self._each(self._charge_one)

    def _charge_one(self, member: _Member) -> None:
        now_s = _cpu_time_s(member.process.pid)
        self.budget_s -= max(0.0, now_s - member.cpu_s)
        member.cpu_s = now_s

    def freeze_or_thaw(self) -> None:
        """Stop the members when the budget is used up, else let them run."""
        spent = self.limited and self.budget_s <= 0
        self._each(_Member.freeze if spent else _Member.thaw)

    def adopt(self, pid: int) -> None:
        """Take a process in, if it is there and no member yet."""
        if pid not in self.members:
            with contextlib.suppress(psutil.Error, OSError):
                self.members[pid] = _Member(psutil.Process(pid), _cpu_time_s(pid))

    def adopt_children(self) -> None:
        """Take in what the members have started."""
        self._each(self._adopt_children_of)

    def _adopt_children_of(self, member: _Member) -> None:
        for child in member.process.children(recursive=True):
            self.adopt(child.pid)

    def release(self, pid: int) -> None:
        """Let a process go, and go on."""
        member = self.members.pop(pid, None)
        if member is not None:
            with contextlib.suppress(psutil.Error, OSError):
                member.thaw()

    def _each(self, action: Callable[[_Member], None]) -> None:
        """Do something with every member; one with which it cannot be done is gone."""
        for pid, member in list(self.members.items()):
            try:
                action(member)
            except (psutil.Error, OSError):
                del self.members[pid]


class Throttle:
    """A thread that stops processes for the rest of each period once they used their part.

    Limits: a process that somebody else stops while it happens to be frozen by us is continued
    with the rest; `lift` it before. Children are found within half a second. If this very process
    is killed with -9, the frozen ones stay frozen.
    """

    name = "stop/continue throttle"

    def __init__(self, speeds: Sequence[float]) -> None:
        self._slots = [_Slot(speed) for speed in speeds]
        self._lock = threading.Lock()
        self._closing = False
        self._wake = threading.Event()
        self._refilled = self._counted = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="lab-throttle", daemon=True)
        self._thread.start()
        # For a program that ends without leaving the lab: nobody else would continue the frozen.
        atexit.register(self.close)

    def place(self, node: int, pid: int) -> None:
        """Take a process into a node's slot."""
        assert pid != os.getpid(), "a process that stops itself cannot continue itself"
        with self._lock:
            self._release(pid)
            self._slots[node].adopt(pid)
        # Before the thread would look again, a process may use what it is granted in a second.
        self._wake.set()

    def lift(self, pid: int) -> None:
        """Let a process go on without a limit."""
        with self._lock:
            self._release(pid)

    def set_speed(self, node: int, speed: float) -> None:
        """Grant another budget from the next period on."""
        with self._lock:
            self._slots[node].speed = speed
            self._slots[node].budget_s = 0.0
        self._wake.set()

    def close(self) -> None:
        """Stop the thread and let all processes go on."""
        self._closing = True
        self._wake.set()
        self._thread.join()
        for slot in self._slots:
            for pid in list(slot.members):
                slot.release(pid)
        atexit.unregister(self.close)

    def _release(self, pid: int) -> None:
        for slot in self._slots:
            slot.release(pid)

    def _run(self) -> None:
        # On a full machine a late look lets processes overrun. It counts for this thread alone.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -10)
        while not self._closing:
            with self._lock:
                pause_s = self._look(time.monotonic())
            self._wake.wait(pause_s)
            self._wake.clear()

    def _look(self, now: float) -> float:
        """Charge and refill all slots, act on it, and say when to look again."""
        if now - self._counted >= _CENSUS_S:
            self._counted = now
            for slot in self._slots:
                slot.adopt_children()
        for slot in self._slots:
            slot.charge()
        if now - self._refilled >= _THROTTLE_PERIOD_S:
            for slot in self._slots:
                slot.refill(now - self._refilled)
            self._refilled = now
        pause_s = self._refilled + _THROTTLE_PERIOD_S - now
        for slot in self._slots:
            slot.freeze_or_thaw()
            if slot.limited and slot.budget_s > 0:
                # Not before this can the budget be used up, even on all cores at once.
                pause_s = min(pause_s, slot.budget_s / usable_cores())
        return max(_LEAST_PAUSE_S, pause_s)
