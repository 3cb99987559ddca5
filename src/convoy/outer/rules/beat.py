"""Beat, our default: all nodes hand in at the same moment, because each was given so much work.

    n_j     samples of node j in a beat, in proportion to its measured speed
    W <- W + sum_j n_j s_j D_j / sum_j n_j

With everybody on time this is the mean over samples. If moreover each node does one local step
a beat, with momentum of its own, it is synchronous SGD of one machine: the mean of the nodes'
momenta is the momentum of the mean gradient,

    sum_j (n_j/N) v_j = mu sum_j (n_j/N) v_j' + g        because the shares stay the same

so that nothing is lost to staleness, which is what asynchronous rules pay with. Whoever is late
does not hold the others up: the beat ends after a grace that follows from measured lateness
(window.py), the late one goes on from the newest weights at once, and what it had done counts in
the next beat, discounted for its age: s_j = (1 + staleness)^-1/2.
"""

from collections.abc import Sequence

from convoy.outer.rules.discount import Discount, polynomial
from convoy.outer.rules.rule import Merged, Submission, Together, Weights, World


class Beat(Together):
    """The mean of increments over samples, once a beat."""

    has_window = True
    needs_base = False

    def __init__(self, discount: Discount | None = None) -> None:
        self._discount = discount or polynomial()

    def merge(
        self, world: World[Weights], pending: Sequence[Submission[Weights]]
    ) -> Merged[Weights]:
        """Add the mean of what came in, the late ones' discounted."""
        total = sum(submission.samples for submission in pending)
        weights = world.weights
        for submission in pending:
            worth = self._discount(world.staleness(submission))
            if submission.samples:
                part = worth * submission.samples / total
                weights = world.add(weights, submission.increment, part)
        return Merged(weights)
