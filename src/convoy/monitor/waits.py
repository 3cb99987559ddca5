"""Who waits for whom, and what that costs: worked out from how long each node was busy.

Nodes that train in lockstep are done with a step when the slowest is. In an interval, others wait
for the node that was busy longest:

    busy  node 1  ======            waits 4 for node 3
          node 2  ========          waits 2 for node 3
          node 3  ==========        costs the run 2: so much sooner would all have been done if it
                                    had been no slower than the next
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Waits:
    """Seconds over the whole run.

    Attributes:
        seconds: by (who waited, for whom).
        costs: by node: what the run would have been shorter by.
    """

    seconds: dict[tuple[int, int], float] = field(default_factory=lambda: defaultdict(float))
    costs: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def note(self, busy_s: Mapping[int, float]) -> None:
        """Take in an interval: how long each node of a group was busy."""
        if len(busy_s) < 2:
            return
        # Equal ones are told apart by their number, so that the same events give the same sums.
        slowest = max(busy_s, key=lambda node: (busy_s[node], -node))
        longest = busy_s[slowest]
        others = {node: busy for node, busy in busy_s.items() if node != slowest}
        for node, busy in others.items():
            if longest > busy:
                self.seconds[node, slowest] += longest - busy
        self.costs[slowest] += longest - max(others.values())

    def made_others_wait(self, node: int) -> float:
        """Return the seconds that all others together waited for a node."""
        return sum(seconds for (_, whom), seconds in self.seconds.items() if whom == node)
