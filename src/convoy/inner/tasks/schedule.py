"""A step on so many threads, without running it: event-driven list scheduling.

    ready = tasks without unfinished predecessors, the best first
    when threads are free: the best ready task goes to the one that has worked least
    when tasks end: those that waited for nothing else become ready

It is event-driven, not a static list: a thread takes what is ready now, and never keeps itself
free for a better task that comes later (BPT-CNN 5.3). At most twice the best schedule (Graham):

    makespan <= work / threads + critical path * (1 - 1 / threads)
"""

import heapq
from collections.abc import Sequence

from convoy.inner.tasks.priorities import Edges, reversed_edges, runnable_order
from convoy.inner.tasks.timeline import Span, Timeline


def simulate(
    costs: Sequence[float],
    successors: Edges,
    priorities: Sequence[float],
    threads: int,
    *,
    names: Sequence[str] = (),
    kinds: Sequence[str] = (),
) -> Timeline:
    """Return who would run which task when.

    Args:
        costs: seconds that each task takes.
        successors: of each task, by number.
        priorities: of two ready tasks the one with the larger number goes first; of equals the
            one that comes first in the graph.
        threads: that run tasks.
        names: of the tasks, for people.
        kinds: of the tasks, as `Span` has them.

    Raises:
        ValueError: the tasks wait for each other in a circle, or something is not a number of
            the right kind.
    """
    _check(costs, successors, priorities, threads)
    predecessors = reversed_edges(successors)
    waiting = [len(before) for before in predecessors]
    ready_s = [0.0] * len(costs)
    ready = [(-priorities[task], task) for task, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    free = [(0.0, thread) for thread in range(threads)]  # by work done, then by number
    running: list[tuple[float, int, float, int]] = []  # end, task, work of the thread, thread
    spans: list[Span] = []
    now_s = 0.0
    while ready or running:
        while ready and free:
            busy_s, thread = heapq.heappop(free)
            _, task = heapq.heappop(ready)
            end_s = now_s + costs[task]
            name = names[task] if names else f"task {task}"
            kind = kinds[task] if kinds else "forward"
            after = tuple(predecessors[task])
            spans.append(Span(task, name, kind, thread, ready_s[task], now_s, end_s, after))
            heapq.heappush(running, (end_s, task, busy_s + costs[task], thread))
        now_s = running[0][0]
        # All that ends at this moment counts, before anything is given out again.
        while running and running[0][0] == now_s:
            _, task, busy_s, thread = heapq.heappop(running)
            heapq.heappush(free, (busy_s, thread))
            for successor in successors[task]:
                waiting[successor] -= 1
                if waiting[successor] == 0:
                    ready_s[successor] = now_s
                    heapq.heappush(ready, (-priorities[successor], successor))
    return Timeline(threads, tuple(spans))


def _check(
    costs: Sequence[float], successors: Edges, priorities: Sequence[float], threads: int
) -> None:
    if not len(costs) == len(successors) == len(priorities):
        raise ValueError(
            f"{len(costs)} costs and {len(priorities)} priorities for {len(successors)} tasks"
        )
    if threads < 1:
        raise ValueError(f"tasks need a thread, got {threads}")
    if any(not 0 <= cost < float("inf") for cost in costs):
        raise ValueError("a task's cost must be a number of seconds, 0 or more")
    runnable_order(successors)
