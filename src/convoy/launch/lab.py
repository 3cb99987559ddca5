"""Several unequal machines on one: each node gets a part of a core, and the part can change.

Two mechanisms hold a process to its part: CPU quotas (quotas.py), which are exact, and where none
may be set, a thread that stops and continues processes (throttle.py).
"""

import math
import os
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol

from convoy.errors import ConfigError, EnvironmentProblem
from convoy.launch.pinning import assign_cores, pin
from convoy.launch.quotas import QuotaGroups, mounted_hierarchies
from convoy.launch.throttle import Throttle

Mechanism = Literal["auto", "cgroup", "throttle"]

MOST_NODES = 64
# The kernel takes quotas from 1 ms and periods up to 1 s, so this is the least part of a core.
LEAST_SPEED = 0.001


@dataclass(frozen=True, slots=True)
class SpeedChange:
    """From `at_s` seconds after the clock's start, a node (counted from 0) has another speed."""

    node: int
    at_s: float
    speed: float


def parse_speed_changes(text: str) -> tuple[SpeedChange, ...]:
    """Read "NODE:SPEED@SECONDS,..."; people count nodes from 1.

    >>> parse_speed_changes("1:0.2@30")
    (SpeedChange(node=0, at_s=30.0, speed=0.2),)
    """
    return tuple(_parse_change(part) for part in text.split(",")) if text.strip() else ()


def _parse_change(part: str) -> SpeedChange:
    form = re.fullmatch(r"\s*(\d+)\s*:\s*([^:@\s]+)\s*@\s*([^:@\s]+)\s*", part)
    try:
        if form is None:
            raise ValueError
        change = SpeedChange(int(form[1]) - 1, float(form[3]), float(form[2]))
    except ValueError:
        raise ConfigError(
            "this change of speed cannot be understood",
            got=part,
            allowed="NODE:SPEED@SECONDS",
            hint='For example "1:0.2@30,3:1@45": node 1 gets speed 0.2 after 30 s.',
        ) from None
    if change.node < 0:
        raise ConfigError("nodes are counted from 1", got=part)
    _check_speed(change.speed)
    _check_time(change.at_s)
    return change


def check_speeds(speeds: Sequence[float]) -> None:
    """Refuse speeds that no lab can hold.

    Raises:
        ConfigError: there are none, too many, or one is not a usable number.
    """
    if not 1 <= len(speeds) <= MOST_NODES:
        raise ConfigError("wrong number of nodes", got=len(speeds), allowed=f"1 to {MOST_NODES}")
    for speed in speeds:
        _check_speed(speed)


def _check_speed(speed: float) -> None:
    if not (math.isfinite(speed) and speed >= LEAST_SPEED):
        raise ConfigError(
            "a node's speed is a part of one core",
            got=speed,
            allowed=f"a number from {LEAST_SPEED}; 1 is a whole core, 2 are two",
        )


def _check_time(at_s: float) -> None:
    if not (math.isfinite(at_s) and at_s >= 0):
        raise ConfigError(
            "a speed changes some seconds after the start", got=at_s, allowed="a number from 0"
        )


def _check_changes(changes: Sequence[SpeedChange], nodes: int) -> None:
    for change in changes:
        if not 0 <= change.node < nodes:
            raise ConfigError(
                "a change of speed names a node that is not there",
                got=change.node + 1,
                allowed=f"1 to {nodes}",
            )
        _check_speed(change.speed)
        _check_time(change.at_s)


class _Holder(Protocol):
    """A mechanism: what holds the processes of each node to its speed."""

    name: str

    def place(self, node: int, pid: int) -> None: ...
    def lift(self, pid: int) -> None: ...
    def set_speed(self, node: int, speed: float) -> None: ...
    def close(self) -> None: ...


class Lab:
    """Holds processes to a part of a core each, so that one machine behaves like several.

    A speed is a part of one core: 1.0 is a whole core, 2.0 are two, and as many as the machine has
    means no limit. `mechanism` says, once the lab is entered, by what the speeds are held. A whole
    core that a node has to itself needs no mechanism: its processes can run nowhere else.
    """

    def __init__(
        self,
        speeds: Sequence[float],
        *,
        changes: Sequence[SpeedChange] = (),
        mechanism: Mechanism = "auto",
    ) -> None:
        check_speeds(speeds)
        _check_changes(changes, len(speeds))
        self.speeds = list(speeds)
        self.mechanism = "none yet"
        self._asked = mechanism
        self._changes = sorted(changes, key=lambda change: change.at_s)
        self._holder: _Holder | None = None
        self._clock: threading.Thread | None = None
        self._leaving = threading.Event()
        self._lock = threading.Lock()
        self._free = os.sched_getaffinity(0)
        self._cores = assign_cores(speeds, sorted(self._free))
        self._pinned: set[int] = set()

    check = staticmethod(check_speeds)

    def __enter__(self) -> "Lab":
        limits = [self._limit(node, speed) for node, speed in enumerate(self.speeds)]
        self._holder = _open_holder(self._asked, limits)
        self.mechanism = self._holder.name
        self._leaving.clear()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leaving.set()
        if self._clock is not None:
            self._clock.join()
            self._clock = None
        if self._holder is not None:
            self._holder.close()
            self._holder = None
        for pid in self._pinned:
            pin(pid, self._free)
        self._pinned.clear()

    def place(self, node: int, pid: int) -> None:
        """Hold a process, with its threads and the children it makes later, to a node's speed.

        Several processes may share a node; they share its speed. A process that is gone already is
        no fault: whoever started it will notice.
        """
        assert pid > 0, pid  # control groups take 0 for the process that writes
        with self._lock:
            self._open().place(node, pid)
            core = self._cores[node]
            if core is not None:
                self._pinned.add(pid)
                pin(pid, {core})

    def lift(self, pid: int) -> None:
        """Free one process from its limit; children it made while it was held stay held."""
        with self._lock:
            self._open().lift(pid)
            if pid in self._pinned:
                self._pinned.remove(pid)
                pin(pid, self._free)

    def set_speed(self, node: int, speed: float) -> None:
        """Change a node's speed from now on, also for the processes it has."""
        _check_speed(speed)
        with self._lock:
            self._open().set_speed(node, self._limit(node, speed))
            self.speeds[node] = speed

    def start_clock(self) -> None:
        """Let the timed changes count from now."""
        assert self._clock is None, "the clock runs already"
        if self._changes:
            start = time.monotonic()
            self._clock = threading.Thread(
                target=self._apply_changes, args=(start,), name="lab-clock", daemon=True
            )
            self._clock.start()

    def _limit(self, node: int, speed: float) -> float:
        """Return what a node must be held to besides its core."""
        # Stopping it now and then would only make its steps vary more: by 9 % instead of 6 with
        # the throttle (ResNet-20, two cores); quotas make no difference there.
        return math.inf if speed >= 1.0 and self._cores[node] is not None else speed

    def _open(self) -> _Holder:
        assert self._holder is not None, "a lab works only while it is entered"
        return self._holder

    def _apply_changes(self, start: float) -> None:
        for change in self._changes:
            if self._leaving.wait(max(0.0, start + change.at_s - time.monotonic())):
                return
            self.set_speed(change.node, change.speed)


def _open_holder(asked: Mechanism, speeds: Sequence[float]) -> _Holder:
    if asked == "throttle":
        return Throttle(speeds)
    refusals = []
    for hierarchy in mounted_hierarchies():
        for base in dict.fromkeys((hierarchy.own, hierarchy.root)):
            try:
                return QuotaGroups(hierarchy, base, speeds)
            except OSError as error:
                refusals.append(f"{base}: {error.strerror}")
    if asked == "auto":
        return Throttle(speeds)
    raise EnvironmentProblem(
        "CPU quotas cannot be set here",
        got="; ".join(refusals) or "no cpu controller is mounted",
        hint="The mechanism 'throttle' works without them.",
    )
