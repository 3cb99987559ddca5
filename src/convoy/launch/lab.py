"""Several unequal machines on one: each node gets a part of a core, and the part can change.

Two mechanisms hold a process to its part. CPU quotas of control groups (version 1 or 2) are exact,
and the kernel does the work; where no group may be made, a thread stops and continues processes.
"""

import atexit
import contextlib
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol

import psutil

from convoy.errors import ConfigError, EnvironmentProblem
from convoy.launch.pinning import assign_cores, pin

Mechanism = Literal["auto", "cgroup", "throttle"]

MOST_NODES = 64
# The kernel takes quotas from 1 ms and periods up to 1 s, so this is the least part of a core.
LEAST_SPEED = 0.001

# Measured with a busy numpy loop at speed 0.2 (2 cores, 250 Hz kernel, 4 runs of 4 s each): all
# periods held the speed to 1.5 %, but the wall time of a step of 20 ms CPU spread by 0.5 % with a
# period of 5 ms, 1 % with 10 ms, 2 % with 20 ms, 6 % with 50 ms and 13 % with 100 ms (the kernel's
# own choice); steps of 5 ms spread by 2, 16, 28, 62 and 140 %. At speed 0.5 it is much alike.
_QUOTA_PERIOD_US = 5_000
_LEAST_QUOTA_US = 1_000

_THROTTLE_PERIOD_S = 0.05
_LEAST_PAUSE_S = 0.001
_CENSUS_S = 0.5
# A throttle that slept too long itself must not freeze a node for long afterwards.
_LONGEST_FREEZE_S = 1.0


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
    means no limit. `mechanism` says, once the lab is entered, by what the speeds are held.
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
        self._holder = _open_holder(self._asked, self.speeds)
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
            self._open().set_speed(node, speed)
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
        return _Throttle(speeds)
    refusals = []
    for hierarchy in _cpu_hierarchies(_read("/proc/self/mountinfo"), _read("/proc/self/cgroup")):
        for base in dict.fromkeys((hierarchy.own, hierarchy.root)):
            try:
                return _QuotaGroups(hierarchy, base, speeds)
            except OSError as error:
                refusals.append(f"{base}: {error.strerror}")
    if asked == "auto":
        return _Throttle(speeds)
    raise EnvironmentProblem(
        "CPU quotas cannot be set here",
        got="; ".join(refusals) or "no cpu controller is mounted",
        hint="The mechanism 'throttle' works without them.",
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0))


# --- control groups ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """A mounted tree of control groups that may limit CPU time, and this process's place in it."""

    version: Literal[1, 2]
    root: Path
    own: Path


def _cpu_hierarchies(mountinfo: str, own_groups: str) -> list[_Hierarchy]:
    """Read the two files of /proc; version 1 comes first: where it has the CPU, version 2 has not.

    >>> _cpu_hierarchies("41 31 0:38 / /cg rw - cgroup2 cgroup2 rw", "0::/a")[0].own
    PosixPath('/cg/a')
    """
    own = {}
    for line in own_groups.splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), path))
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        top, point = before.split()[3:5]
        kind, _, options = after.split()[:3]
        if kind == "cgroup" and "cpu" in options.split(",") and "cpu" in own:
            found.append(_Hierarchy(1, Path(point), _below(Path(point), top, own["cpu"])))
        elif kind == "cgroup2" and "" in own:
            found.append(_Hierarchy(2, Path(point), _below(Path(point), top, own[""])))
    return sorted(found, key=lambda hierarchy: hierarchy.version)


def _below(point: Path, top: str, group: str) -> Path:
    """Return where a group is seen, when the mount shows the tree from `top` downward only."""
    try:
        return point / Path(group).relative_to(top)
    except ValueError:
        return point


def _quota_us(speed: float) -> tuple[int | None, int]:
    """Return quota and period for a speed; no quota when it asks for the whole machine.

    >>> _quota_us(0.2), _quota_us(0.01)
    ((1000, 5000), (1000, 100000))
    """
    if speed >= _cores():
        return None, _QUOTA_PERIOD_US
    quota = max(_LEAST_QUOTA_US, round(speed * _QUOTA_PERIOD_US))
    return quota, round(quota / speed)


class _QuotaGroups:
    """One control group for each node, all in one folder that carries our process number."""

    def __init__(self, hierarchy: _Hierarchy, base: Path, speeds: Sequence[float]) -> None:
        """Make the groups and try them out.

        Raises:
            OSError: the kernel or the container forbids it; nothing is left behind.
        """
        self.name = f"cgroup v{hierarchy.version} CPU quota"
        self._version = hierarchy.version
        self._home = hierarchy.own
        self._base = base
        self._enabled_cpu = False
        _remove_orphans(base)
        self._folder = base / f"convoy-{os.getpid()}-{secrets.token_hex(4)}"
        self._nodes = [self._folder / f"node-{node}" for node in range(len(speeds))]
        try:
            self._make_folders()
            for group, speed in zip(self._nodes, speeds, strict=True):
                self._write_quota(group, speed)
            self._try_out()
        except BaseException:
            self.close()
            raise

    def place(self, node: int, pid: int) -> None:
        """Move a process into a node's group."""
        self._move(pid, self._nodes[node])

    def lift(self, pid: int) -> None:
        """Move a process back to where this one is."""
        self._move(pid, self._home)

    def set_speed(self, node: int, speed: float) -> None:
        """Write another quota."""
        try:
            self._write_quota(self._nodes[node], speed)
        except OSError as error:
            raise EnvironmentProblem(f"the CPU quota was refused: {error}", got=speed) from error

    def close(self) -> None:
        """Free all processes and remove the groups; what cannot be removed stays, empty."""
        for group in self._nodes:
            # A process that is moved while it is held back would not run on for a while.
            with contextlib.suppress(OSError):
                self._write_quota(group, math.inf)
            _empty_and_remove(group, self._home)
        with contextlib.suppress(OSError):
            self._folder.rmdir()
        if self._enabled_cpu:
            # The kernel refuses while another lab's groups need it, and rightly so.
            with contextlib.suppress(OSError):
                _write(self._base / "cgroup.subtree_control", "-cpu")

    def _make_folders(self) -> None:
        self._folder.mkdir()
        if self._version == 2:
            self._pass_cpu_down()
        for group in self._nodes:
            group.mkdir()
            if self._version == 2:
                self._make_threaded(group)

    def _pass_cpu_down(self) -> None:
        """Give our folder and its groups the cpu controller."""
        self._make_threaded(self._folder)
        control = self._base / "cgroup.subtree_control"
        if "cpu" not in _read(control).split():
            _write(control, "+cpu")
            self._enabled_cpu = True
        _write(self._folder / "cgroup.subtree_control", "+cpu")

    def _make_threaded(self, group: Path) -> None:
        # A group with processes (ours has at least this one) may have groups with controllers
        # below it only if they are "threaded". The root alone, which has no type, is free of that.
        if (self._base / "cgroup.type").exists():
            _write(group / "cgroup.type", "threaded")

    def _write_quota(self, group: Path, speed: float) -> None:
        quota, period = _quota_us(speed)
        if self._version == 2:
            _write(group / "cpu.max", f"{'max' if quota is None else quota} {period}")
            return
        # Lifted first: old quota and new period together may be more than the kernel allows.
        _write(group / "cpu.cfs_quota_us", "-1")
        _write(group / "cpu.cfs_period_us", str(period))
        if quota is not None:
            _write(group / "cpu.cfs_quota_us", str(quota))

    def _try_out(self) -> None:
        """Move a real process in and out: some containers let one make groups but not use them."""
        idle = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"]
        with subprocess.Popen(idle, stdin=subprocess.PIPE) as process:  # noqa: S603 - fixed words
            try:
                _write(self._nodes[0] / "cgroup.procs", str(process.pid))
                _write(self._home / "cgroup.procs", str(process.pid))
            finally:
                process.kill()

    def _move(self, pid: int, group: Path) -> None:
        try:
            _write(group / "cgroup.procs", str(pid))
        except ProcessLookupError:
            pass
        except OSError as error:
            raise EnvironmentProblem(
                f"the process cannot be moved between control groups: {error}", got=pid
            ) from error


def _remove_orphans(base: Path) -> None:
    """Remove the groups of labs that were killed, unless processes still live in them."""
    for folder in base.glob("convoy-*-*"):
        owner = folder.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            for group in [*folder.glob("node-*"), folder]:
                with contextlib.suppress(OSError):
                    group.rmdir()


def _empty_and_remove(group: Path, home: Path) -> None:
    # A process may fork while we move it, and one that is just dying stays for a moment.
    deadline = time.monotonic() + 1.0
    while group.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            for pid in _members(group):
                with contextlib.suppress(OSError):
                    _write(home / "cgroup.procs", pid)
            group.rmdir()
            return
        time.sleep(0.005)


def _members(group: Path) -> list[str]:
    """List who is in a group; one thread of a process is enough to move it as a whole."""
    # A threaded group of version 2 refuses to list processes; version 1 has no list of this name.
    threads = group / "cgroup.threads"
    return _read(threads if threads.exists() else group / "cgroup.procs").split()


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _write(path: Path, text: str) -> None:
    # Unbuffered, so that the kernel's refusal is raised here and not when the file is closed.
    handle = os.open(path, os.O_WRONLY)
    try:
        os.write(handle, text.encode())
    finally:
        os.close(handle)


# --- stop and continue ------------------------------------------------------------------------


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
        return bool(self.members) and self.speed < _cores()

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


class _Throttle:
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
                pause_s = min(pause_s, slot.budget_s / _cores())
        return max(_LEAST_PAUSE_S, pause_s)
