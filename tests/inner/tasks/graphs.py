"""Graphs of tasks for the tests: the two of the paper notes, and any."""

from dataclasses import dataclass

from hypothesis import strategies as st

from convoy.inner.tasks.priorities import Kind, order_of
from convoy.inner.tasks.schedule import simulate
from convoy.inner.tasks.timeline import Timeline


@dataclass(frozen=True)
class Graph:
    """Costs and successors, and names for people."""

    names: tuple[str, ...]
    costs: tuple[float, ...]
    successors: tuple[tuple[int, ...], ...]

    def run(self, threads: int, kind: Kind = "rank") -> Timeline:
        """Return the graph's schedule on so many threads."""
        order = order_of(kind, self.costs, self.successors)
        return simulate(self.costs, self.successors, order, threads, names=self.names)


def _named(description: str) -> Graph:
    """Read "a=1 b(a)=2": each task with those it waits for, and its cost."""
    names: list[str] = []
    costs: list[float] = []
    successors: list[list[int]] = []
    for word in description.split():
        head, _, cost = word.partition("=")
        name, _, needs = head.rstrip(")").partition("(")
        for need in needs.split(",") if needs else []:
            successors[names.index(need)].append(len(names))
        names.append(name)
        costs.append(float(cost))
        successors.append([])
    return Graph(tuple(names), tuple(costs), tuple(map(tuple, successors)))


# Test vectors of the paper notes, section 5.3.
DAG_1 = _named(
    "c1=4 c2=4 c3=4 c4=4 p1(c1,c2)=1 p2(c3,c4)=1 f(p1,p2)=3 L(f)=1 gf(L)=2 bf(L)=2 "
    "g1(bf)=3 g2(bf)=3 u(gf,g1,g2)=1"
)
DAG_2 = _named("a=1 b=1 c=1 x(a)=1 y(b)=1 d(c)=5 e(d)=5")


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw a graph without circles; edges go from lower to higher numbers."""
    costs = draw(st.lists(st.integers(0, 20), min_size=1, max_size=24))
    numbers = range(len(costs))
    after = [draw(st.sets(st.sampled_from(numbers[:i]), max_size=4)) if i else () for i in numbers]
    successors = tuple(tuple(i for i in numbers if task in after[i]) for task in numbers)
    names = tuple(f"task {i}" for i in numbers)
    return Graph(names, tuple(map(float, costs)), successors)
