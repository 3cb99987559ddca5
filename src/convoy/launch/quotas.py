"""CPU quotas of control groups (version 1 or 2): the kernel holds a node to its part of a core."""

import contextlib
import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from convoy.errors import EnvironmentProblem
from convoy.machine import usable_cores

# Measured with a busy numpy loop at speed 0.2 (2 cores, 250 Hz kernel, 4 runs of 4 s each): all
# periods held the speed to 1.5 %, but the wall time of a step of 20 ms CPU spread by 0.5 % with a
# period of 5 ms, 1 % with 10 ms, 2 % with 20 ms, 6 % with 50 ms and 13 % with 100 ms (the kernel's
# own choice); steps of 5 ms spread by 2, 16, 28, 62 and 140 %. At speed 0.5 it is much alike.
_QUOTA_PERIOD_US = 5_000
_LEAST_QUOTA_US = 1_000


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A mounted tree of control groups that may limit CPU time, and this process's place in it."""

    version: Literal[1, 2]
    root: Path
    own: Path


def mounted_hierarchies() -> list[Hierarchy]:
    """Return the trees in which this process may find itself a place, the likeliest first."""
    return cpu_hierarchies(_read("/proc/self/mountinfo"), _read("/proc/self/cgroup"))


def cpu_hierarchies(mountinfo: str, own_groups: str) -> list[Hierarchy]:
    """Read the two files of /proc; version 1 comes first: where it has the CPU, version 2 has not.

    >>> cpu_hierarchies("41 31 0:38 / /cg rw - cgroup2 cgroup2 rw", "0::/a")[0].own
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
            found.append(Hierarchy(1, Path(point), _below(Path(point), top, own["cpu"])))
        elif kind == "cgroup2" and "" in own:
            found.append(Hierarchy(2, Path(point), _below(Path(point), top, own[""])))
    return sorted(found, key=lambda hierarchy: hierarchy.version)


def _below(point: Path, top: str, group: str) -> Path:
    """Return where a group is seen, when the mount shows the tree from `top` downward only."""
    try:
        return point / Path(group).relative_to(top)
    except ValueError:
        return point


def quota_us(speed: float) -> tuple[int | None, int]:
    """Return quota and period for a speed; no quota when it asks for the whole machine.

    >>> quota_us(0.2), quota_us(0.01)
    ((1000, 5000), (1000, 100000))
    """
    if speed >= usable_cores():
        return None, _QUOTA_PERIOD_US
    quota = max(_LEAST_QUOTA_US, round(speed * _QUOTA_PERIOD_US))
    return quota, round(quota / speed)


class QuotaGroups:
    """One control group for each node, all in one folder that carries our process number."""

    def __init__(self, hierarchy: Hierarchy, base: Path, speeds: Sequence[float]) -> None:
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
        quota, period = quota_us(speed)
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
