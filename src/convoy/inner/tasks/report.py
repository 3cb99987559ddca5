"""What a timeline says: how long, how even, and what nothing but a faster task could shorten.

No schedule of these tasks, with as much help as each of them had, is shorter than its longest chain
of tasks, nor than all work shared evenly:

    bound = max(critical path, work / threads) <= makespan
"""

from dataclasses import asdict, dataclass
from typing import Any

from convoy.inner.tasks.priorities import reversed_edges, runnable_order
from convoy.inner.tasks.timeline import Span, Timeline


@dataclass(frozen=True, slots=True)
class StepReport:
    """The figures of one step.

    Attributes:
        tasks, threads: how many there were.
        makespan_s: from the start of the step to the end of its last task.
        work_s: seconds of all tasks together, pieces that others did of them included, and not
            the time that tasks waited for those.
        busy_s: seconds that each thread ran tasks, or pieces of others' tasks.
        helps: pieces of tasks that threads did which had nothing else to do.
        critical: the numbers of the tasks on the longest chain, first to last.
        critical_s: seconds of these tasks alone.
        critical_wait_s: how long tasks on that chain could have run and did not.
    """

    tasks: int
    threads: int
    makespan_s: float
    work_s: float
    busy_s: tuple[float, ...]
    helps: int
    critical: tuple[int, ...]
    critical_s: float
    critical_wait_s: float

    @property
    def balance(self) -> float:
        """Return the mean thread's work as a part of the busiest one's; 1 is even."""
        busiest_s = max(self.busy_s, default=0.0)
        return sum(self.busy_s) / len(self.busy_s) / busiest_s if busiest_s > 0 else 1.0

    @property
    def bound_s(self) -> float:
        """Return the time below which no schedule of these tasks can be."""
        return max(self.critical_s, self.work_s / self.threads)

    @property
    def closeness(self) -> float:
        """Return the bound as a part of the makespan; 1 is as good as can be."""
        return self.bound_s / self.makespan_s if self.makespan_s > 0 else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        derived = {
            "balance": self.balance,
            "bound_s": self.bound_s,
            "closeness": self.closeness,
        }
        return {**asdict(self), **derived}


def make_report(timeline: Timeline) -> StepReport:
    """Return the figures of a timeline.

    Raises:
        ValueError: a task comes after one that is not in the timeline, or after itself.
    """
    chain = critical_path(timeline)
    busy_s = [0.0] * timeline.threads
    for span in timeline.spans:
        busy_s[span.thread] += _seconds(span) - span.waited_s
    for help_ in timeline.helps:
        busy_s[help_.thread] += help_.end_s - help_.start_s
    return StepReport(
        tasks=len(timeline.spans),
        threads=timeline.threads,
        makespan_s=max((span.end_s for span in timeline.spans), default=0.0),
        work_s=sum(busy_s),
        busy_s=tuple(busy_s),
        helps=len(timeline.helps),
        critical=tuple(span.task for span in chain),
        critical_s=sum(_seconds(span) for span in chain),
        critical_wait_s=sum(span.start_s - span.ready_s for span in chain),
    )


def critical_path(timeline: Timeline) -> list[Span]:
    """Return the longest chain of tasks that had to wait for each other, by measured times.

    Of equally long ones it is that which ended last: its waits are those that cost time.
    """
    spans = sorted(timeline.spans, key=lambda span: span.task)
    predecessors = _places_before(spans)
    longest_s = [0.0] * len(spans)  # of all chains that end with this task
    came_from: list[int | None] = [None] * len(spans)

    def length_and_end(place: int) -> tuple[float, float]:
        return longest_s[place], spans[place].end_s

    for place in runnable_order(reversed_edges(predecessors)):
        before = max(predecessors[place], key=length_and_end, default=None)
        came_from[place] = before
        longest_s[place] = _seconds(spans[place]) + (0.0 if before is None else longest_s[before])
    chain: list[Span] = []
    last = max(range(len(spans)), key=length_and_end, default=None)
    while last is not None:
        chain.append(spans[last])
        last = came_from[last]
    return chain[::-1]


def _places_before(spans: list[Span]) -> list[list[int]]:
    """Return each task's predecessors by their places in the list, not by their numbers."""
    places = {span.task: place for place, span in enumerate(spans)}
    missing = {task for span in spans for task in span.after} - places.keys()
    if missing:
        raise ValueError(f"task {min(missing)} is waited for, but was not run")
    return [[places[task] for task in span.after] for span in spans]


def _seconds(span: Span) -> float:
    return span.end_s - span.start_s
