"""A busy process gets the part of a core that the lab says, whatever holds it."""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import psutil
import pytest

from convoy.errors import ConfigError, EnvironmentProblem
from convoy.launch import lab as lab_module
from convoy.launch import quotas
from convoy.launch.lab import Lab, SpeedChange, check_speeds, parse_speed_changes
from convoy.launch.quotas import Hierarchy, QuotaGroups, cpu_hierarchies, quota_us
from tests.faults.light import wait_until

MechanismName = Literal["cgroup", "throttle"]
Start = Callable[..., "subprocess.Popen[str]"]

BUSY = "print('ready', flush=True)\nwhile True: pass"
# Starts a busy child of its own when told to, and passes on that it is ready.
PARENT = f"""
import subprocess, sys
print('ready', flush=True)
sys.stdin.readline()
child = subprocess.Popen([sys.executable, '-c', {BUSY!r}])
print(child.pid, flush=True)
child.wait()
"""


def _cgroup_refusal() -> str | None:
    try:
        with Lab([1.0], mechanism="cgroup"):
            return None
    except EnvironmentProblem as error:
        return str(error)


@pytest.fixture(params=["cgroup", "throttle"])
def mechanism(request: pytest.FixtureRequest) -> MechanismName:
    name: MechanismName = request.param
    if name == "cgroup" and (refusal := _cgroup_refusal()):
        pytest.skip(refusal)
    return name


@pytest.fixture
def needs_cgroup() -> None:
    if refusal := _cgroup_refusal():
        pytest.skip(refusal)


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a Python program and waits until it says a first line."""
    started = []

    def call(program: str = BUSY, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield call
    for process in started:
        process.kill()
        process.communicate()


def share_of(*pids: int, for_s: float = 1.0) -> float:
    """Measure which part of a core processes get together."""
    processes = [psutil.Process(pid) for pid in pids]

    def used_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    begin, begin_s = time.monotonic(), used_s()
    time.sleep(for_s)
    return (used_s() - begin_s) / (time.monotonic() - begin)


def holds(share: float, speed: float) -> bool:
    """Tell whether a share can be that of a speed while other tests keep the cores busy."""
    return 0.5 * speed < share < 1.25 * speed + 0.03


def is_free(share: float) -> bool:
    """Tell whether a process that was held to 0.05 no longer is, on a busy machine too."""
    return share > 0.12


def groups_of(pid: int) -> list[Path]:
    return list(Path("/sys/fs/cgroup").glob(f"**/convoy-{pid}-*"))


def is_stopped(pid: int) -> bool:
    return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def test_a_core_to_oneself_needs_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[list[float]] = []

    class Holder:
        name = "a holder"

        def __init__(self, limits: list[float]) -> None:
            self.limits = limits
            held.append(limits)

        def set_speed(self, node: int, speed: float) -> None:
            self.limits[node] = speed

        def close(self) -> None: ...

    monkeypatch.setattr(lab_module, "_open_holder", lambda _, limits: Holder(limits))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with Lab([1.0, 0.25]) as lab:
        assert held[-1] == [math.inf, 0.25]
        lab.set_speed(0, 0.5)
        assert held[-1] == [0.5, 0.25]
        lab.set_speed(0, 1.0)
        assert held[-1] == [math.inf, 0.25]
        assert lab.speeds == [1.0, 0.25]
    with Lab([1.0, 1.0, 1.0]):  # more than there are cores: nobody has one to itself
        assert held[-1] == [1.0, 1.0, 1.0]


def test_a_busy_process_gets_its_part_of_a_core(mechanism: MechanismName, start: Start) -> None:
    with Lab([1.0, 0.25], mechanism=mechanism) as lab:
        words = r"cgroup v[12] CPU quota" if mechanism == "cgroup" else r"stop/continue throttle"
        assert re.fullmatch(words, lab.mechanism)
        pid = start().pid
        # So that it can use its part although other tests keep the cores busy.
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, pid, -10)
        lab.place(1, pid)

        # A busy machine may give it less, never more.
        assert 0.15 <= share_of(pid, for_s=1.5) <= 0.3


def test_processes_in_one_slot_share_its_speed(mechanism: MechanismName, start: Start) -> None:
    with Lab([0.3], mechanism=mechanism) as lab:
        pids = [start().pid, start().pid]
        for pid in pids:
            lab.place(0, pid)

        assert holds(share_of(*pids), 0.3)


def test_a_new_speed_holds_at_once_and_lift_ends_all_limits(
    mechanism: MechanismName, start: Start
) -> None:
    with Lab([0.3], mechanism=mechanism) as lab:
        pid = start().pid
        lab.place(0, pid)
        medium = share_of(pid, for_s=0.6)
        lab.set_speed(0, 0.05)
        slow = share_of(pid, for_s=0.8)
        lab.lift(pid)
        free = share_of(pid, for_s=0.3)

    assert lab.speeds == [0.05]
    assert holds(medium, 0.3)
    assert holds(slow, 0.05)
    assert is_free(free)


def test_children_made_later_are_held_too(mechanism: MechanismName, start: Start) -> None:
    with Lab([0.2], mechanism=mechanism) as lab:
        parent = start(PARENT)
        lab.place(0, parent.pid)
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write("go\n")
        parent.stdin.flush()
        child = int(re.findall(r"\d+", parent.stdout.readline() + parent.stdout.readline())[0])
        try:
            time.sleep(0.6)  # the throttle counts children twice a second
            share = share_of(child)
        finally:
            os.kill(child, signal.SIGKILL)

    assert holds(share, 0.2)


def test_timed_changes_count_from_the_start_of_the_clock(start: Start) -> None:
    changes = [SpeedChange(0, 2.0, 0.3), SpeedChange(1, 0.1, 0.5)]
    with Lab([0.05, 0.1], changes=changes) as lab:
        pid = start().pid
        lab.place(0, pid)
        assert lab.speeds == [0.05, 0.1]
        lab.start_clock()
        before = share_of(pid, for_s=0.6)
        assert lab.speeds == [0.05, 0.5]
        wait_until(lambda: lab.speeds == [0.3, 0.5], "the second change")
        after = share_of(pid, for_s=0.6)

    assert before < 0.12
    assert holds(after, 0.3)


def test_leaving_does_not_wait_for_changes_that_are_not_due() -> None:
    begin = time.monotonic()
    with Lab([1.0], changes=[SpeedChange(0, 1000.0, 0.5)]) as lab:
        lab.start_clock()
    assert time.monotonic() - begin < 10
    assert lab.speeds == [1.0]


def test_as_many_cores_as_there_are_is_no_limit(mechanism: MechanismName, start: Start) -> None:
    cores = len(os.sched_getaffinity(0))
    assert quota_us(cores)[0] is None
    with Lab([cores], mechanism=mechanism) as lab:
        pid = start().pid
        lab.place(0, pid)
        assert is_free(share_of(pid, for_s=0.3))


def test_leaving_frees_the_living_and_forgives_the_dead(
    mechanism: MechanismName, start: Start
) -> None:
    with Lab([0.05, 0.05], mechanism=mechanism) as lab:
        killed, reaped, living = start(), start(), start()
        for process in (killed, reaped, living):
            lab.place(0, process.pid)
        assert bool(groups_of(os.getpid())) == (mechanism == "cgroup")
        killed.kill()  # and stays a zombie
        reaped.kill()
        reaped.wait()
        lab.place(1, reaped.pid)
        lab.lift(reaped.pid)

    assert not groups_of(os.getpid())
    assert not is_stopped(living.pid)
    assert is_free(share_of(living.pid, for_s=0.3))


@pytest.mark.usefixtures("needs_cgroup")
def test_the_groups_of_a_killed_lab_are_removed_once_they_are_empty(start: Start) -> None:
    held = start()
    killed = start(
        "import sys, os, signal\n"
        "from convoy.launch.lab import Lab\n"
        "with Lab([0.5, 0.5], mechanism='cgroup') as lab:\n"
        "    lab.place(1, int(sys.argv[1]))\n"
        "    print('ready', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)",
        str(held.pid),
    )
    assert killed.wait() == -signal.SIGKILL
    with Lab([1.0], mechanism="cgroup"):
        (folder,) = groups_of(killed.pid)  # a process lives in it
        assert not (folder / "node-0").exists()
    held.kill()
    held.wait()
    with Lab([1.0], mechanism="cgroup"):
        assert not groups_of(killed.pid)


def test_the_throttle_leaves_alone_what_somebody_else_stopped(start: Start) -> None:
    stopped, busy = start(), start()
    os.kill(stopped.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
    with Lab([0.1], mechanism="throttle") as lab:
        lab.place(0, stopped.pid)
        lab.place(0, busy.pid)
        assert share_of(busy.pid, for_s=0.3) < 0.25  # the throttle was at work
        assert is_stopped(stopped.pid)
    assert is_stopped(stopped.pid)


def test_a_program_that_never_leaves_its_lab_leaves_nobody_frozen(start: Start) -> None:
    busy = start()
    program = start(
        "import sys, time, psutil\n"
        "from convoy.launch.lab import Lab\n"
        "lab = Lab([0.01], mechanism='throttle').__enter__()\n"
        "lab.place(0, int(sys.argv[1]))\n"
        "while psutil.Process(int(sys.argv[1])).status() != 'stopped': time.sleep(0.001)\n"
        "print('ready', flush=True)",
        str(busy.pid),
    )
    assert program.wait() == 0
    assert not is_stopped(busy.pid)


def test_without_any_hierarchy_auto_throttles_and_cgroup_says_why_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lab_module, "mounted_hierarchies", lambda: [])
    with Lab([0.5]) as lab:
        assert lab.mechanism == "stop/continue throttle"
    with pytest.raises(EnvironmentProblem, match="no cpu controller is mounted"):
        Lab([0.5], mechanism="cgroup").__enter__()


def test_a_hierarchy_that_refuses_quotas_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # A plain folder takes the new folders but has no quota files, as a group without cpu has none.
    fake = Hierarchy(2, tmp_path, tmp_path)
    monkeypatch.setattr(lab_module, "mounted_hierarchies", lambda: [fake])
    with Lab([0.5]) as lab:
        assert lab.mechanism == "stop/continue throttle"
    assert not list(tmp_path.iterdir())


def test_version_2_groups_are_threaded_below_a_group_with_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written: list[tuple[str, str]] = []

    def note(path: Path, text: str) -> None:
        written.append((re.sub(r"convoy-[^/]*", "ours", str(path.relative_to(tmp_path))), text))

    (tmp_path / "cgroup.type").write_text("domain\n")
    monkeypatch.setattr(quotas, "_write", note)
    groups = QuotaGroups(Hierarchy(2, tmp_path, tmp_path), tmp_path, [0.2])
    groups.set_speed(0, 1e6)
    groups.close()

    assert [line for line in written if "procs" not in line[0]] == [
        ("ours/cgroup.type", "threaded"),
        ("cgroup.subtree_control", "+cpu"),
        ("ours/cgroup.subtree_control", "+cpu"),
        ("ours/node-0/cgroup.type", "threaded"),
        ("ours/node-0/cpu.max", "1000 5000"),
        ("ours/node-0/cpu.max", "max 5000"),
        ("ours/node-0/cpu.max", "max 5000"),  # lifted again before processes are moved out
        ("cgroup.subtree_control", "-cpu"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["cgroup.type"]


def test_hierarchies_are_found_in_containers_and_beside_each_other() -> None:
    mounts = (
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
        "32 31 0:29 /docker/ab /sys/fs/cgroup/cpu,cpuacct rw shared:9 - "
        "cgroup cgroup rw,cpu,cpuacct\n"
        "33 31 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    )
    own = "3:cpuset:/\n2:cpu,cpuacct:/docker/ab/x\n0::/user\n"
    one, two = cpu_hierarchies(mounts, own)

    assert (one.version, str(one.own)) == (1, "/sys/fs/cgroup/cpu,cpuacct/x")
    assert (two.version, str(two.own)) == (2, "/sys/fs/cgroup/unified/user")
    assert not cpu_hierarchies("", own)


@pytest.mark.parametrize("speed", [0.001, 0.013, 0.1, 0.2, 0.37, 0.99])
def test_quotas_are_ones_the_kernel_takes_and_hold_the_speed(speed: float) -> None:
    quota, period = quota_us(speed)
    assert quota is not None
    assert quota >= 1_000
    assert period <= 1_000_000
    assert quota / period == pytest.approx(speed, rel=1e-3)


def test_changes_are_read_with_nodes_counted_from_one() -> None:
    assert parse_speed_changes("1:0.2@30, 3:1@45.5") == (
        SpeedChange(0, 30.0, 0.2),
        SpeedChange(2, 45.5, 1.0),
    )
    assert parse_speed_changes("  ") == ()


@pytest.mark.parametrize(
    "text",
    [
        *("1", "1:0.2", "0.2@30", "1:x@30", "1:0.2@x", "1:0.2@30,", "-1:0.2@3", "1:0.2@30@4"),
        *("1@2:3", "0:0.2@30", "1:0@30", "1:-1@3", "1:nan@3", "1:inf@3", "1:0.2@-1", "1:0.2@inf"),
    ],
)
def test_changes_in_another_form_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="got"):
        parse_speed_changes(text)


@pytest.mark.parametrize(
    "speeds", [[], [0.0], [1.0, -0.5], [float("nan")], [float("inf")], [0.0001], [1.0] * 65]
)
def test_speeds_no_lab_can_hold_are_refused(speeds: list[float]) -> None:
    with pytest.raises(ConfigError, match="got"):
        check_speeds(speeds)
    with pytest.raises(ConfigError, match="got"):
        Lab(speeds)


def test_a_change_for_a_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="names a node that is not there; got 3; allowed: 1 to 2"):
        Lab([1.0, 1.0], changes=[SpeedChange(2, 1.0, 0.5)])
