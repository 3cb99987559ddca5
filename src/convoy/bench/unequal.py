"""What do unequal nodes train together? Lockstep beside DDP, torchft, hivemind and the limit.

Four processes are held to 0.8, 0.6, 0.4 and 0.2 of a core. The limit is the sum of the nodes
when each trains by itself, all at the same time on the same cores; the oracle is DDP with the
shares set by hand to the nodes' true proportions. All systems get the same network, optimizer,
precision, memory layout and malloc setting. Ours is a whole run through `convoy train`'s door;
it knows nothing of the speeds and is measured from the step on at which shares have settled. All
this is eager PyTorch. Where tasks have convolutions of their own, ours is measured once more with
them, as long runs are trained, and DDP with what torch.compile makes of the network.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

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
_DDP, _BY_HAND = "DDP, equal shares", "DDP, shares by hand"
_COMPILED = ", torch.compile"
# The machine's own speed drifts: those compared most closely are measured last, next to ours.
_PEERS = {
    "torchft DDP": "torchft",
    "hivemind": "hivemind",
    f"{_DDP}{_COMPILED}": "ddp",
    f"{_BY_HAND}{_COMPILED}": "ddp-oracle",
    _DDP: "ddp",
    _BY_HAND: "ddp-oracle",
    _LIMIT: "alone",
}
_SLOW = ("torchft DDP", "hivemind")  # left out of a quick answer, as is what must be compiled


def bench_unequal(*, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure all systems in turn, several times."""
    repeats, seconds = (1, 5.0) if quick else (5, 12.0)
    peers = _peers(quick=quick, tell=tell)
    ours = {_OURS: "eager"}
    if has_own_convolutions():
        ours[_TASKS] = "tasks"
    values: dict[str, tuple[float, ...]] = dict.fromkeys([*peers, *ours], ())
    for number in range(repeats):
        for name in peers:
            values[name] += (_measure_peer(name, seconds),)
        warm_steps = _WARM_STEPS // 2 if quick else _WARM_STEPS
        for name, executor in ours.items():
            values[name] += (_measure_ours(seconds, warm_steps, executor),)
        if not quick:  # the machine may have changed while we ran: the limit is measured around us
            before = values[_LIMIT][-1]
            limit = (before + _measure_peer(_LIMIT, seconds)) / 2
            values[_LIMIT] = (*values[_LIMIT][:-1], limit)
        shown = ", ".join(f"{name} {found[-1]:,.0f}" for name, found in values.items())
        tell(f"round {number + 1} of {repeats}, samples/s: {shown}")
    task = f"{TASK.model}, batch {TASK.batch}"
    rows = tuple(Row(task, name, "samples/s", found) for name, found in values.items())
    return Report("unequal", repeats, rows, bars_of(values))


def _measure_peer(name: str, seconds: float) -> float:
    system, task = _PEERS[name], replace(TASK, compiled=name.endswith(_COMPILED))
    window = seconds * 5 if system == "hivemind" else seconds
    with Lab(SPEEDS) as lab:
        return measure_crew(system, task, lab, warm_s=seconds / 4, seconds=window)


def _peers(*, quick: bool, tell: Callable[[str], None]) -> list[str]:
    """Return the peers to measure."""
    chosen = []
    for name, system in _PEERS.items():
        reason = available(system)
        if reason is not None:
            tell(f"{name} is left out: {reason}")
        elif not (quick and (name in _SLOW or name.endswith(_COMPILED))):
            chosen.append(name)
    return chosen


def _measure_ours(seconds: float, warm_steps: int, executor: str) -> float:
    steps = warm_steps + round(seconds * 2)  # a step takes about half a second on two cores
    recording = record_lockstep(TASK, SPEEDS, steps, executor=executor)
    return speed_between(recording, warm_steps, steps)


def bars_of(values: Mapping[str, Sequence[float]]) -> tuple[Bar, ...]:
    """Return what ours is worth beside the others: by the same kernels, and each by its best."""

    def bar(name: str, ours: str, theirs: Sequence[float], least: float) -> Bar:
        return Bar(name, median_ratio(values[ours], theirs), at_least=least)

    least = {_LIMIT: 0.93, _DDP: 2.0, _BY_HAND: 0.97}
    bars = [bar(f"lockstep / {name}", _OURS, values[name], bound) for name, bound in least.items()]
    if _TASKS not in values:
        return tuple(bars)
    bars.append(bar("lockstep, tasks / eager", _TASKS, values[_OURS], 1.0))
    for name in (_DDP, _BY_HAND):
        if (compiled := values.get(f"{name}{_COMPILED}")) is not None:
            better = [max(both) for both in zip(values[name], compiled, strict=True)]
            told = f"lockstep, tasks / {name}, eager or compiled"
            bars.append(bar(told, _TASKS, better, least[name]))
    return tuple(bars)
