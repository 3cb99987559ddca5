"""A node that is eight times slower than others, and the bound on what may be missed meanwhile."""

import pytest

from tests.faults.history import History
from tests.faults.light import SIZE, Bench, Client, running

BOUND, SLOWNESS, STEP_S = 4, 8, 0.01


def staleness_of_all(rule: str, bound: int) -> tuple[list[int], list[str]]:
    """Train with a slow node; return what each submission missed, and what was wrong."""
    history = History(SIZE)
    with Bench(150, nodes=4, rule=rule, staleness_bound=bound) as bench:
        paces = [STEP_S, STEP_S, STEP_S, SLOWNESS * STEP_S]
        clients = [Client(bench, history, n, pause_s=pace) for n, pace in enumerate(paces)]
        with running(clients):
            for client in clients:
                client.join(60)
        merged = [s for merge in bench.rule.merges for s in merge.staleness]
        story = bench.story()
        told = [applied.staleness for applied in story.applied]
        assert sorted(told) == sorted(merged)  # the record says the same
        assert len(merged) == len(history.acknowledged) == 150
        by_slow = [a for a in story.applied if a.node == 3]
        assert len(by_slow) > 3
        checked = bound if bound >= 0 else None
        faults = bench.rule.find_faults(checked) + story.find_faults(
            bench.samples, 1, bound=checked
        )
        return merged, faults


@pytest.mark.parametrize("rule", ["delta-poly", "fedbuff:size=1,power=0", "fedasync"])
def test_within_the_bound_no_submission_misses_more_even_of_a_slow_node(rule: str) -> None:
    merged, faults = staleness_of_all(rule, BOUND)
    print(f"of {len(merged)}, the most was {max(merged)}")
    assert sum(missed <= BOUND for missed in merged) == len(merged)
    assert faults == []


def test_without_a_bound_a_slow_node_misses_more() -> None:
    merged, faults = staleness_of_all("delta-poly", -1)
    print(f"of {len(merged)}, the most was {max(merged)}")
    assert max(merged) > BOUND
    assert faults == []
