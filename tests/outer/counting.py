"""Rules whose weights only count: what was merged how often is then read off them."""

from collections.abc import Sequence

from convoy.outer.rules.rule import AtOnce, Merged, Rule, Submission, Together, Weights, World


class Counted(Together):
    """All nodes together; the weights are the sum of all that was merged."""

    needs_base = False

    def merge(
        self, world: World[Weights], pending: Sequence[Submission[Weights]]
    ) -> Merged[Weights]:
        weights = world.weights
        for submission in pending:
            weights = weights + submission.increment
        return Merged(weights)


class CountedInBeats(Counted):
    """Those who are late count in the next beat."""

    has_window = True


class CountedAtOnce(AtOnce):
    """Each by itself."""

    merge = Counted.merge


class CountedInThrees(CountedAtOnce):
    """Three at a time, whoever they come from."""

    def is_complete(self, pending: Sequence[Submission[Weights]], live: Sequence[int]) -> bool:
        return len(pending) >= 3


COUNTING: tuple[type[Rule], ...] = (Counted, CountedInBeats, CountedAtOnce, CountedInThrees)
