"""What do unequal nodes train together? Lockstep beside DDP, torchft, hivemind and the limit.

Four processes are held to 0.8, 0.6, 0.4 and 0.2 of a core. The limit is the sum of the nodes
when each trains by itself, all at the same time on the same cores; the oracle is DDP with the
shares set by hand to the nodes' true proportions. All systems get the same network, optimizer,
precision, memory layout and malloc setting. Ours is a whole run through `convoy train`'s door;
it knows nothing of the speeds and is measured from the step on at which shares have settled. Where
tasks have convolutions of their own, it is measured once more with them, as long runs are trained.
"""

from collections.abc import Callable

from convoy.bench.ours import record_lockstep, speed_between
from convoy.bench.peers import Task, available, measure_crew
from convoy.bench.report import Bar, Report, Row, median_ratio
from convoy.inner.way import has_own_convolutions
from convoy.launch.lab import Lab
from convoy.outer.allocation.shares import apportion

SPEEDS = (0.8, 0.6, 0.4, 0.2)
TASK = Task("resnet20", (3, 32, 32), 10, 256, apportion(SPEEDS, 256))
_WARM_STEPS = 20  # until memory, kernels and shares have settled
_LIMIT, _OURS = "nodes alone, summed", "convoy lockstep"
_TASKS = f"{_OURS}, tasks"
# The machine's own speed drifts: those compared most closely are measured last, next to ours.
_PEERS = {
    "torchft DDP": "torchft",
    "hivemind": "hivemind",
    "DDP, equal shares": "ddp",
    "DDP, shares by hand": "ddp-oracle",
    _LIMIT: "alone",
}


def bench_unequal(*, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure all systems in turn, several times."""
    repeats, seconds = (1, 5.0) if quick else (5, 12.0)
    systems = _systems(quick=quick, tell=tell)
    ours = {_OURS: "eager"}
    if has_own_convolutions():
        ours[_TASKS] = "tasks"
    values: dict[str, tuple[float, ...]] = dict.fromkeys([*systems, *ours], ())
    for number in range(repeats):
        for name, system in systems.items():
            values[name] += (_measure_peer(system, seconds),)
        warm_steps = _WARM_STEPS // 2 if quick else _WARM_STEPS
        for name, executor in ours.items():
            values[name] += (_measure_ours(seconds, warm_steps, executor),)
        if not quick:  # the machine may have changed while we ran: the limit is measured around us
            before = values[_LIMIT][-1]
            limit = (before + _measure_peer(systems[_LIMIT], seconds)) / 2
            values[_LIMIT] = (*values[_LIMIT][:-1], limit)
        shown = ", ".join(f"{name} {found[-1]:,.0f}" for name, found in values.items())
        tell(f"round {number + 1} of {repeats}, samples/s: {shown}")
    task = f"{TASK.model}, batch {TASK.batch}"
    rows = tuple(Row(task, name, "samples/s", found) for name, found in values.items())
    return Report("unequal", repeats, rows, _bars(values))


def _measure_peer(system: str, seconds: float) -> float:
    window = seconds * 5 if system == "hivemind" else seconds
    with Lab(SPEEDS) as lab:
        return measure_crew(system, TASK, lab, warm_s=seconds / 4, seconds=window)


def _systems(*, quick: bool, tell: Callable[[str], None]) -> dict[str, str]:
    """Return the peers to measure; the slow ones are left out of a quick answer."""
    chosen = {}
    for name, system in _PEERS.items():
        reason = available(system)
        if reason is not None:
            tell(f"{name} is left out: {reason}")
        elif not (quick and system in ("torchft", "hivemind")):
            chosen[name] = system
    return chosen


def _measure_ours(seconds: float, warm_steps: int, executor: str) -> float:
    steps = warm_steps + round(seconds * 2)  # a step takes about half a second on two cores
    recording = record_lockstep(TASK, SPEEDS, steps, executor=executor)
    return speed_between(recording, warm_steps, steps)


def _bars(values: dict[str, tuple[float, ...]]) -> tuple[Bar, ...]:
    ours = values[_OURS]

    def bar(name: str, least: float) -> Bar:
        return Bar(f"lockstep / {name}", median_ratio(ours, values[name]), at_least=least)

    bars = (bar(_LIMIT, 0.93), bar("DDP, equal shares", 2.0), bar("DDP, shares by hand", 0.97))
    if _TASKS not in values:
        return bars
    return (*bars, Bar("lockstep, tasks / eager", median_ratio(values[_TASKS], ours), at_least=1.0))
