"""What happened in one step: which thread ran which task, and when."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """One task's run; times are seconds from the start of the step.

    Attributes:
        task: its number in the graph.
        name: what it computes, for people: "conv1, group 3".
        kind: "forward", "error", "gradient", "combine" or "update".
        thread: who ran it, counted from 0.
        ready_s: when its last predecessor ended.
        after: the numbers of its predecessors.
        waited_s: of its time, until others were done with pieces of it.
    """

    task: int
    name: str
    kind: str
    thread: int
    ready_s: float
    start_s: float
    end_s: float
    after: tuple[int, ...] = ()
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Help:
    """A piece of a task that another thread did, which had nothing else to do."""

    task: int
    thread: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step on some threads; spans and helps are in no particular order."""

    threads: int
    spans: tuple[Span, ...]
    helps: tuple[Help, ...] = ()
