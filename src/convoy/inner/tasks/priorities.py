"""Which of the tasks that could run goes first.

Two orders, behind one switch (BPT-CNN 5.3, as reconstructed):

    rank    rank_u(t) = cost(t) + max over successors rank_u(s): how much is still to be done
            from here to the end, along the worst chain. A chain of greatest ranks is a critical
            path.
    level   depth from the entry, smaller first: the paper's form as remembered.

A graph is a list with each task's successors (or predecessors), by number. No function here
recurses: a step of a deep network is a chain of thousands of tasks.
"""

from collections.abc import Sequence
from typing import Literal

Kind = Literal["rank", "level"]
Edges = Sequence[Sequence[int]]


def upward_ranks(costs: Sequence[float], successors: Edges) -> list[float]:
    """Return each task's cost and that of the worst chain behind it.

    >>> upward_ranks([4, 1, 3], [[1], [2], []])
    [8.0, 4.0, 3.0]

    Raises:
        ValueError: the tasks wait for each other in a circle.
    """
    if len(costs) != len(successors):
        raise ValueError(f"{len(costs)} costs for {len(successors)} tasks")
    ranks = [0.0] * len(costs)
    for task in reversed(runnable_order(successors)):
        ranks[task] = costs[task] + max((ranks[s] for s in successors[task]), default=0.0)
    return ranks


def levels(predecessors: Edges) -> list[int]:
    """Return each task's depth: the tasks of the longest chain before it.

    >>> levels([[], [0], [0, 1]])
    [0, 1, 2]

    Raises:
        ValueError: the tasks wait for each other in a circle.
    """
    depths = [0] * len(predecessors)
    for task in runnable_order(reversed_edges(predecessors)):
        depths[task] = max((depths[p] + 1 for p in predecessors[task]), default=0)
    return depths


def order_of(kind: Kind, costs: Sequence[float], successors: Edges) -> list[float]:
    """Return a number per task; of two tasks that could run, the one with the larger goes first.

    >>> order_of("level", [4, 1, 3], [[1], [2], []])
    [0.0, -1.0, -2.0]
    """
    if kind == "rank":
        return upward_ranks(costs, successors)
    return [0.0 - depth for depth in levels(reversed_edges(successors))]


def runnable_order(successors: Edges) -> list[int]:
    """Return all tasks so that each comes after those it needs.

    Raises:
        ValueError: the tasks wait for each other in a circle.
    """
    waiting = [len(before) for before in reversed_edges(successors)]
    order = [task for task, count in enumerate(waiting) if count == 0]
    for task in order:  # grows while it is walked
        for successor in successors[task]:
            waiting[successor] -= 1
            if waiting[successor] == 0:
                order.append(successor)
    if len(order) < len(waiting):
        stuck = next(task for task, count in enumerate(waiting) if count > 0)
        raise ValueError(f"the tasks wait for each other in a circle: {stuck} can never run")
    return order


def reversed_edges(edges: Edges) -> list[list[int]]:
    """Turn successors into predecessors, and back.

    >>> reversed_edges([[1, 2], [2], []])
    [[], [0], [0, 1]]
    """
    turned: list[list[int]] = [[] for _ in edges]
    for task, others in enumerate(edges):
        for other in others:
            turned[other].append(task)
    return turned
