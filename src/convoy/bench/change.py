"""Do shares follow when a node slows down? Node 1 falls from 0.8 to 0.2 of a core in mid-run.

The limit is the sum of nodes at the new speeds, each training by itself, measured in turn with
our runs. Ten steps after the change the run must be near it.
"""

from collections.abc import Callable

from convoy.bench.ours import Recording, record_lockstep, speed_between
from convoy.bench.peers import measure_crew
from convoy.bench.report import Bar, Report, Row, median_ratio
from convoy.bench.unequal import SPEEDS, TASK
from convoy.launch.lab import Lab
from convoy.monitor.events import GroupEvent, SharesEvent

_AFTER_S = 9.0  # seconds of training before the change
_SETTLE_STEPS = 10
_NEW_SPEED = 0.2
_SEEN_EVERY_S = 0.3  # so that the step of the change is known


def bench_change(*, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure runs with a change in the middle, and the limit after it, in turn."""
    repeats, steps = (1, 42) if quick else (5, 60)
    limits: tuple[float, ...] = ()
    reached: tuple[float, ...] = ()
    settled: tuple[float, ...] = ()
    for number in range(repeats):
        before = _new_sum(6 if quick else 12)
        change = f"1:{_NEW_SPEED}@{_AFTER_S}"
        recording = record_lockstep(
            TASK, SPEEDS, steps, speed_changes=change, log_interval_s=_SEEN_EVERY_S
        )
        at = step_of_change(recording)
        reached += (speed_between(recording, at + _SETTLE_STEPS, steps),)
        settled += (float(steps_to_settle(recording, at)),)
        # The machine may have changed while we ran: the limit is measured around us.
        limits += (before if quick else (before + _new_sum(12)) / 2,)
        tell(
            f"round {number + 1} of {repeats}: {reached[-1]:,.0f} samples/s of {limits[-1]:,.0f}; "
            f"shares fit {settled[-1]:.0f} steps after the change"
        )
    task = f"{TASK.model}, batch {TASK.batch}, after the change"
    rows = (
        Row(task, "nodes alone, summed", "samples/s", limits),
        Row(task, "convoy lockstep", "samples/s", reached),
        Row(task, "steps until shares fit", "steps", settled),
    )
    bars = (
        Bar("lockstep / new sum of nodes", median_ratio(reached, limits), at_least=0.90),
        Bar("steps until shares fit", rows[2].median, at_most=_SETTLE_STEPS),
    )
    return Report("change", repeats, rows, bars)


def _new_sum(seconds: float) -> float:
    """Return what the nodes train by themselves after the change."""
    with Lab((_NEW_SPEED, *SPEEDS[1:])) as lab:
        return measure_crew("alone", TASK, lab, warm_s=2, seconds=seconds)


def step_of_change(recording: Recording) -> int:
    """Return the step at which the node was slowed down."""
    start = recording.of(GroupEvent)[0][0]
    return next(step for when, step, _ in recording.steps() if when >= start + _AFTER_S)


def steps_to_settle(recording: Recording, at: int) -> int:
    """Return how many steps after the change node 1's share came within a tenth of its last."""
    events = [event for _, event in recording.of(SharesEvent) if event.nodes[0] == 0]
    last = events[-1].shares[0]
    fitting = 0
    for event in events:
        if event.step > at and abs(event.shares[0] - last) > max(1, last / 10):
            fitting = -1  # it moved away again
        elif event.step > at and fitting <= 0:
            fitting = event.step - at
    return max(fitting, 0)
