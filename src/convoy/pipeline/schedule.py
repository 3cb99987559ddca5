"""Who does what in a pipeline, in which order, and with which weights.

Stages are counted from 0; `after` is how many come after a stage. A stage does its jobs one by one:

    lead forwards ahead of its backwards, then a forward and a backward in turn, then the rest

    stage 0, lead 2   F0 F1 F2 B0 F3 B1 F4 B2 ...
    stage 1, lead 0   F0 B0 F1 B1 F2 B2 ...

A backward is followed by the update of the stage's weights, so forward m reads the weights after
max(0, m - lead) updates, whenever its input arrives: which versions are read depends on the order
of jobs alone, never on time. The paper's schedule has a lead of 2 * after (its degree of
staleness); that of PipeDream, 1F1B, has a lead of `after`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward"]
LEADS = {"stale": 2, "1f1b": 1}  # for each stage after
_WORTH_POSTPONING = 0.06  # of the time: a little more than postponing costs


@dataclass(frozen=True, slots=True, order=True)
class Job:
    """A batch that passes a stage, in one of two directions."""

    batch: int
    kind: Kind


def lead_of(order: str, stages: int, stage: int) -> int:
    """Return how many forwards a stage is ahead of its backwards.

    >>> [lead_of("stale", 3, stage) for stage in range(3)]
    [4, 2, 0]
    """
    return LEADS[order] * (stages - 1 - stage)


def jobs_of(lead: int, batches: int) -> Iterator[Job]:
    """Yield a stage's jobs for a number of batches, and for draining the pipeline afterwards.

    >>> [f"{job.kind[0]}{job.batch}" for job in jobs_of(1, 3)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    for turn in range(batches + lead):
        if turn < batches:
            yield Job(turn, "forward")
        if turn >= lead:
            yield Job(turn - lead, "backward")


def version_read(lead: int, job: Job) -> int:
    """Return how many updates the weights have had that a job reads."""
    return max(0, job.batch - lead) if job.kind == "forward" else job.batch


def held_at_most(lead: int) -> int:
    """Return how many batches' activations a stage holds at the same time, at most."""
    return lead + 1


def can_postpone(precision: str) -> bool:
    """Tell whether a stage can send gradients before it computes those of its weights.

    >>> can_postpone("fp32"), can_postpone("bf16")
    (True, False)
    """
    return precision != "bf16"  # autocast's rounded weights pass their gradients on at once


def should_postpone(waiting: Sequence[float]) -> bool:
    """Tell whether stages should send gradients before they compute those of their weights.

    Where even the busiest stage waits for a good part of its time, it is not for want of speed:
    messages take long, or now this stage is late, now that. A gradient that comes earlier helps.

    Args:
        waiting: the part of its time that each stage waits.

    >>> should_postpone([0.2, 0.01]), should_postpone([0.2, 0.1])
    (False, True)
    """
    return min(waiting) > _WORTH_POSTPONING


@dataclass(frozen=True, slots=True)
class Slot:
    """A job in time: the cycles in which one of a pipeline's workers does it.

    Attributes:
        worker: its number.
        cycle: when, in cycles of the paper: a forward or a backward of one stage.
        version: of the weights that it reads.
    """

    worker: int
    stage: int
    job: Job
    cycle: int
    version: int


def paper_timeline(cuts: int, batches: int) -> list[Slot]:
    """Return the paper's timeline for K cuts: 2K+1 workers, one for each direction of a stage.

    The last stage's forward and backward share a worker and a cycle. Stage i (from 0) does the
    forward of batch m in cycle m + i, and its backward in cycle m + 2K - i.
    """
    slots = []
    for stage in range(cuts + 1):
        lead = lead_of("stale", cuts + 1, stage)
        for batch in range(batches):
            forward, backward = Job(batch, "forward"), Job(batch, "backward")
            read = version_read(lead, forward)
            slots.append(Slot(stage, stage, forward, batch + stage, read))
            slots.append(Slot(2 * cuts - stage, stage, backward, batch + 2 * cuts - stage, batch))
    return sorted(slots, key=lambda slot: (slot.cycle, slot.worker, slot.job.kind == "backward"))


def hybrid_speedup(pipelined: int, total: int, speedup: float) -> float:
    """Return how much faster a run is whose first iterations are pipelined, the others plain.

    >>> round(hybrid_speedup(20_000, 30_000, 3), 6)
    1.8
    """
    return total / (pipelined / speedup + total - pipelined)
