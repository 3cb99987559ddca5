"""What every stage did last, as an event that people can look at."""

from collections.abc import Sequence
from typing import Any

from convoy.monitor.events import TimelineEvent


def cycle_event(
    rows: Sequence[Sequence[Sequence[float]]], numbers: Sequence[int], step: int
) -> TimelineEvent:
    """Return the last jobs of all stages as one timeline.

    Args:
        rows: for each stage its last jobs: is it a backward pass, the batch, start and end;
            a job that takes no time is none.
        numbers: of the nodes that have computed the stages.
        step: of the run.
    """
    jobs = [
        (stage, bool(backward), round(batch), start, end)
        for stage, row in enumerate(rows)
        for backward, batch, start, end in row
        if end > start
    ]
    begin = min((start for *_, start, _ in jobs), default=0.0)
    spans: list[list[Any]] = [
        [
            stage,
            round(start - begin, 6),
            round(end - begin, 6),
            f"{'B' if backward else 'F'}{batch}",
            "backward" if backward else "forward",
            0,
        ]
        for stage, backward, batch, start, end in jobs
    ]
    work = [
        sum(end - start for s, *_, start, end in jobs if s == stage) for stage in range(len(rows))
    ]
    busiest = max(work, default=0.0)
    return TimelineEvent(
        of="cycle",
        step=step,
        rows=[f"stage {stage + 1} (node {number + 1})" for stage, number in enumerate(numbers)],
        spans=spans,
        makespan_s=max((span[2] for span in spans), default=0.0),
        bound_s=busiest,
        balance=sum(work) / (len(work) * busiest) if busiest else 1.0,
    )
