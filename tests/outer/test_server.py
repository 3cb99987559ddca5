"""The parameter server: each submission once, whoever asks again, and nothing of strangers."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from convoy.outer.rules.catalog import RULES, make_rule
from convoy.outer.server import (
    Answer,
    BehindError,
    FencedError,
    ParameterServer,
    Report,
    ShutOutError,
)
from convoy.outer.work import Stream, StreamWork, Terms

SAMPLES, BATCH = 100, 20
VECTOR = torch.tensor([1.0, -1.0, 5.0, 0.5], dtype=torch.float64)  # two weights, two statistics


def make_server(
    rule: str = "delta-poly", *, nodes: int = 2, admit: bool = True, **options: Any
) -> ParameterServer:
    """Return a server with nodes "a0", "a1", ... admitted; each order is one step of ten."""
    work = StreamWork(Stream(SAMPLES, 2), Terms(BATCH, local_batch=10, every=1))
    server = ParameterServer(make_rule(rule, nodes), work, VECTOR, 2, SAMPLES, **options)
    for node in range(nodes if admit else 0):
        server.admit(node, f"a{node}", 100.0, now=0.0)
    return server


def pull(server: ParameterServer, node: int, now: float = 0.0, last: int = 0) -> Answer:
    incarnation = server.members[node].incarnation
    server.pull(node, incarnation, last, now)
    answer = server.answer_to(node, incarnation, 0)
    assert answer is not None
    return answer


def submit(
    server: ParameterServer,
    node: int,
    answer: Answer,
    *,
    number: int = 1,
    weights: Sequence[float] = (0.1, 0.2),
    statistics: Sequence[float] = (5.0, 0.5),
    now: float = 1.0,
    **report: Any,
) -> Answer | None:
    """Hand in for a node; return what it is told, if it is told anything yet."""
    incarnation = server.members[node].incarnation
    vector = torch.tensor([*weights, *statistics], dtype=torch.float64)
    told = Report(**{"samples": 10, "correct": 5, "busy_s": 0.1, **report})
    server.submit(node, incarnation, number, answer.version, vector, told, now)
    return server.answer_to(node, incarnation, number)


def restarted(server: ParameterServer, rule: str = "delta-poly", nodes: int = 2) -> ParameterServer:
    """Return a server that goes on from what another has kept, as it comes back from a disk."""
    tensors, values = server.state()
    after = make_server(rule, nodes=nodes, admit=False)
    after.restore({n: t.clone() for n, t in tensors.items()}, json.loads(json.dumps(values)))
    for node in server.members:
        after.admit(node, server.members[node].incarnation, 100.0, now=50.0)
    return after


# ------------------------------------------------------------------ identities


def test_a_node_is_given_weights_and_work_and_then_the_next() -> None:
    server = make_server()
    first = pull(server, 0)
    assert (first.number, first.version, first.order and first.order.number) == (0, 1, 1)
    assert torch.equal(first.vector, VECTOR)
    second = submit(server, 0, first)
    assert second is not None
    assert (second.number, second.version, second.order and second.order.number) == (1, 2, 2)
    assert second.vector[:2].tolist() == pytest.approx([1.1, -0.8])  # one node trains so far
    assert server.done == 10


def test_asking_again_gives_the_same_work() -> None:
    server = make_server()
    assert pull(server, 0) is pull(server, 0)


def test_what_is_handed_in_twice_counts_once_and_gets_the_same_answer() -> None:
    server = make_server()
    first = pull(server, 0)
    answer = submit(server, 0, first)
    before = server.vector.clone()
    assert submit(server, 0, first, weights=(9.0, 9.0)) is answer
    assert torch.equal(server.vector, before)
    assert (server.totals.duplicates, server.totals.submissions, server.done) == (1, 1, 10)


def test_who_says_that_a_number_was_handed_in_which_was_not_does_not_wait_for_its_answer() -> None:
    server = make_server()
    first = pull(server, 0)
    pull(server, 0, last=7)
    with pytest.raises(BehindError, match="number 7 of node 1 was never handed in"):
        submit(server, 0, first, number=7)
    again = submit(server, 0, first, number=8)
    assert again is not None
    assert (again.number, again.refused) == (8, "")


def test_what_waits_at_a_barrier_and_comes_again_still_waits() -> None:
    server = make_server("fedavg")
    first, other = pull(server, 0), pull(server, 1)
    assert submit(server, 0, first) is None
    assert submit(server, 0, first) is None
    assert submit(server, 1, other) is not None
    assert server.vector[:2].tolist() == pytest.approx([1.1, -0.8])
    assert server.totals.submissions == 2


@pytest.mark.parametrize(
    ("number", "base", "words"), [(3, 1, "number 3 of node 1 follows 0"), (1, 7, "version 7")]
)
def test_what_does_not_follow_is_refused_and_changes_nothing(
    number: int, base: int, words: str
) -> None:
    server = make_server()
    pull(server, 0)
    with pytest.raises(BehindError, match=words):
        server.submit(0, "a0", number, base, VECTOR, Report(10), now=1.0)
    assert torch.equal(server.vector, VECTOR)
    assert (server.done, server.version) == (0, 1)


def test_who_has_not_asked_for_weights_is_behind() -> None:
    with pytest.raises(BehindError):
        make_server().submit(0, "a0", 1, 1, VECTOR, Report(10), now=1.0)


def test_strangers_and_earlier_starts_are_refused() -> None:
    server = make_server()
    first = pull(server, 0)
    server.admit(0, "b0", 100.0, now=1.0)
    for node, incarnation in ((0, "a0"), (0, ""), (7, "a0"), (-1, "a0")):
        with pytest.raises(FencedError):
            server.pull(node, incarnation, 0, now=2.0)
        with pytest.raises(FencedError):
            server.submit(node, incarnation, 1, first.version, VECTOR, Report(10), now=2.0)
        with pytest.raises(FencedError):
            server.answer_to(node, incarnation, 0)
    assert server.totals.fenced == 8
    assert torch.equal(server.vector, VECTOR)


def test_a_removed_node_is_refused_and_its_samples_go_to_others() -> None:
    server = make_server()
    lost = pull(server, 0).order
    server.remove(0, "a0", now=1.0)
    with pytest.raises(FencedError):
        server.submit(0, "a0", 1, 1, VECTOR, Report(10), now=2.0)
    taken = pull(server, 1).order
    assert lost is not None
    assert taken is not None
    assert taken.spans == lost.spans


def test_only_the_incarnation_that_is_named_is_removed_and_admission_is_idempotent() -> None:
    server = make_server()
    answer = pull(server, 0)
    server.remove(0, "someone else", now=1.0)
    server.admit(0, "a0", 100.0, now=1.0)
    assert pull(server, 0) is answer


def test_a_lost_node_ends_the_wait_of_the_others() -> None:
    server = make_server("fedavg")
    first = pull(server, 0)
    pull(server, 1)
    assert submit(server, 0, first, now=3.0) is None
    server.remove(1, "a1", now=10.0)
    answer = server.answer_to(0, "a0", 1)
    assert answer is not None
    assert answer.waited_s == pytest.approx(7.0)
    assert server.totals.waited_by_node == {0: pytest.approx(7.0)}


def test_nobody_waits_for_a_node_that_has_nothing_to_do() -> None:
    work = StreamWork(Stream(30, 1), Terms(BATCH, local_batch=10, every=1))
    server = ParameterServer(make_rule("fedavg", 2), work, VECTOR, 2, 30)
    for node in range(2):
        server.admit(node, f"a{node}", 1.0, now=0.0)
    answers = [pull(server, node) for node in range(2)]
    assert submit(server, 0, answers[0]) is None
    idle = submit(server, 1, answers[1])
    last = server.answer_to(0, "a0", 1)
    assert idle is not None
    assert last is not None
    assert (last.order is None, idle.order is None) == (False, True)
    assert not idle.is_over
    assert submit(server, 0, last, number=2) is not None
    assert server.is_over
    assert pull(server, 1).is_over


def test_a_beat_ends_at_its_time_and_the_late_one_is_told_how_late_it_was() -> None:
    server = make_server("beat", nodes=3)
    answers = [pull(server, node) for node in range(3)]
    assert submit(server, 0, answers[0], now=10.0) is None
    assert submit(server, 1, answers[1], now=10.0) is None
    assert server.deadline == 20.0
    server.tick(20.0)
    assert server.version == 2
    late = submit(server, 2, answers[2], now=21.0)
    assert late is not None
    assert (late.version, late.staleness) == (2, 1)
    assert server.done == 30


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"weights": (math.nan, 0.0)}, "not finite"),
        ({"weights": (math.inf, 0.0)}, "not finite"),
        ({"statistics": (math.nan, 1.0)}, "not finite"),
        ({"weights": (1e6, 0.0)}, "far too long"),
        ({"loss": math.nan}, "not finite"),
        ({"loss": -math.inf}, "not finite"),
    ],
)
def test_nonsense_is_refused_and_its_samples_are_handed_out_again(
    values: dict[str, Any], problem: str
) -> None:
    server = make_server()
    first = pull(server, 0)
    answer = submit(server, 0, first, **values)
    assert answer is not None
    assert (answer.refused, answer.number, answer.version) == (problem, 1, 1)
    assert torch.equal(server.vector, VECTOR)
    assert server.refused == {problem: 1}
    assert (server.done, server.totals.count) == (0, 0)
    assert first.order is not None
    assert answer.order is not None
    assert answer.order.spans == first.order.spans
    again = submit(server, 0, answer, number=2)
    assert again is not None
    assert again.refused == ""
    assert server.done == 10


@pytest.mark.parametrize(
    "report",
    [
        {"rate": math.nan},
        {"rate": math.inf},
        {"rate": -1.0},
        {"busy_s": math.inf},
        {"busy_s": 1e-310},
        {"step_s": math.nan},
        {"step_s": -1.0},
        {"exchange_s": math.inf},
        {"correct": 11},
        {"correct": -1},
        {"samples": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("rule", ["delta-poly", "agwu", "dc-asgd"])
def test_a_report_that_cannot_be_counted_with_is_refused(report: dict[str, Any], rule: str) -> None:
    server = make_server(rule)
    answer = submit(server, 0, pull(server, 0), **report)
    assert answer is not None
    assert answer.refused == "a report without sense"
    assert server.refused == {"a report without sense": 1}
    assert torch.equal(server.vector, VECTOR)
    assert server.totals.submissions == 0
    again = submit(server, 0, answer, number=2)
    assert again is not None
    assert again.refused == ""
    assert again.order is not None


@pytest.mark.parametrize("rule", ["mean", "beat", "delta-poly"])
def test_nobody_waits_for_a_node_that_is_shut_out(rule: str) -> None:
    bound = 1 if rule == "delta-poly" else None
    server = make_server(rule, bound=bound)
    bad, good = pull(server, 0), pull(server, 1)
    told = submit(server, 1, good)
    for number in (1, 2, 3):
        again = submit(server, 0, bad, number=number, weights=(math.nan, 0.0))
        assert again is not None
        bad = again
    told = told or server.answer_to(1, "a1", 1)
    for number in range(2, 30):
        assert told is not None
        assert told.order is not None or told.is_over
        if told.is_over:
            break
        told = submit(server, 1, told, number=number)
    assert server.is_over
    assert server.done == 2 * SAMPLES


def test_increments_that_grow_with_their_learning_rates_are_taken_in() -> None:
    server = make_server(nodes=1)
    answer = pull(server, 0)
    steps = [(0.001, 0.0003)] * 4 + [(3.0, 0.3)]
    for number, (length, rate) in enumerate(steps, start=1):
        quiet: dict[str, Any] = {"weights": (length, 0.0), "statistics": (0.0, 0.0)}
        told = submit(server, 0, answer, number=number, **quiet, rate=rate)
        assert told is not None
        assert told.refused == ""
        answer = told
    told = submit(server, 0, answer, number=6, **quiet, rate=0.0003)
    assert told is not None
    assert told.refused == "far too long"


def test_the_third_nonsense_in_a_row_shuts_a_node_out() -> None:
    server = make_server()
    answer = pull(server, 0)
    for number in (1, 2, 3):
        told = submit(server, 0, answer, number=number, weights=(math.nan, 0.0))
        assert told is not None
        answer = told
    with pytest.raises(ShutOutError, match="nonsense too often"):
        submit(server, 0, answer, number=4)
    assert pull(server, 1).order is not None


# ------------------------------------------------------------------ statistics and counts


def test_statistics_are_averaged_by_the_part_of_the_work_not_added() -> None:
    server = make_server(admit=False)
    server.admit(0, "a0", 300.0, now=0.0)
    server.admit(1, "a1", 100.0, now=0.0)
    answer = pull(server, 1)
    submit(server, 1, answer, statistics=(9.0, 2.5), busy_s=0.1)
    assert server.vector[2:].tolist() == pytest.approx([6.0, 1.0])


def test_a_node_alone_decides_the_statistics() -> None:
    server = make_server(nodes=1)
    submit(server, 0, pull(server, 0), statistics=(9.0, 2.5))
    assert server.vector[2:].tolist() == [9.0, 2.5]


def test_statistics_never_leave_the_range_of_what_was_handed_in() -> None:
    server = make_server(nodes=3)
    answers = {node: pull(server, node) for node in range(3)}
    generator = torch.Generator().manual_seed(0)
    low, high = VECTOR[2:].clone(), VECTOR[2:].clone()
    for number in range(1, 4):
        for node in range(3):
            given = torch.rand(2, generator=generator, dtype=torch.float64)
            low, high = torch.minimum(low, given), torch.maximum(high, given)
            told = submit(server, node, answers[node], number=number, statistics=given.tolist())
            assert told is not None
            answers[node] = told
            assert bool((server.vector[2:] >= low - 1e-12).all())
            assert bool((server.vector[2:] <= high + 1e-12).all())


def test_sums_and_counts_are_of_what_is_in_the_weights() -> None:
    server = make_server("fedavg")
    first, other = pull(server, 0), pull(server, 1)
    submit(server, 0, first, loss=20.0, correct=5)
    assert (server.totals.loss, server.totals.count) == (0.0, 0)
    submit(server, 1, other, loss=30.0, correct=7)
    totals = server.totals
    assert (totals.loss, totals.correct, totals.count) == (50.0, 12, 20)
    assert totals.samples_by_node == {0: 10, 1: 10}
    assert totals.busy_by_node == {0: 0.1, 1: 0.1}


def test_the_weights_of_each_epoch_are_kept_as_they_were() -> None:
    server = make_server(nodes=1)
    answer = pull(server, 0)
    kept = None
    for number in range(1, 21):
        told = submit(server, 0, answer, number=number)
        assert told is not None
        answer = told
        if number == 10:
            kept = server.vector.clone()
    assert answer.is_over
    assert sorted(server.epochs) == [1, 2]
    version, vector = server.epochs[1]
    assert kept is not None
    assert (version, torch.equal(vector, kept)) == (11, True)
    assert torch.equal(server.epochs[2][1], server.vector)


# ------------------------------------------------------------------ what must last


def play(server: ParameterServer, rounds: int, seed: int, start: Mapping[int, int]) -> None:
    """Let all nodes ask and hand in for a while, the third a beat late each time."""
    generator = torch.Generator().manual_seed(seed)
    numbers = dict(start)
    now = 100.0 * seed
    answers = {node: pull(server, node, now, numbers[node]) for node in server.members}
    for _ in range(rounds):
        for node in answers:
            now += 1.0
            if node == 2 and server.deadline is not None:
                now = server.deadline
                server.tick(now)
            numbers[node] += 1
            weights = (0.1 * torch.randn(2, generator=generator)).tolist()
            submit(server, node, answers[node], number=numbers[node], weights=weights, now=now)
        for node, number in numbers.items():
            answer = server.answer_to(node, server.members[node].incarnation, number)
            assert answer is not None
            answers[node] = answer


@pytest.mark.parametrize("rule", [*RULES, "fedbuff:size=5", "delayed-nesterov:every=4"])
def test_a_restarted_server_goes_on_with_the_same_bits(rule: str) -> None:
    server = make_server(rule, nodes=3)
    play(server, 2, 1, {0: 0, 1: 0, 2: 0})
    submit(server, 0, pull(server, 0, last=2), number=3, weights=(math.nan, 0.0))
    numbers = {0: 2, 1: 2, 2: 2}  # what was refused is not in the weights
    after = restarted(server, rule, nodes=3)
    assert torch.equal(after.vector, server.vector)
    assert after.vector is not server.vector
    assert (after.version, after.done) == (server.version, server.done)
    assert {n: m.number for n, m in after.members.items()} == numbers
    assert (after.refused, after.refused) == (server.refused, {"not finite": 1})
    same = ("loss", "correct", "count")
    assert [getattr(after.totals, n) for n in same] == [getattr(server.totals, n) for n in same]
    for node in range(3):  # the one that was not restarted must forget what was under way too
        server.remove(node, f"a{node}", now=60.0)
    for node in range(3):
        server.admit(node, f"a{node}", 100.0, now=60.0)
    for one in (server, after):
        play(one, 2, 2, numbers)
    assert torch.equal(after.vector, server.vector)
    assert (after.version, after.done) == (server.version, server.done)


def test_what_a_state_holds_does_not_change_while_it_is_written() -> None:
    server = make_server("diloco")
    answers = [pull(server, node) for node in (0, 1)]
    for node in (0, 1):
        submit(server, node, answers[node])
    tensors, _ = server.state()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    assert set(before) == {"weights", "statistics", "memory/momentum"}
    for node in (0, 1):
        answer = server.answer_to(node, f"a{node}", 1)
        assert answer is not None
        submit(server, node, answer, number=2, statistics=(0.0, 0.0))
    assert all(torch.equal(tensors[name], before[name]) for name in before)


def test_who_asks_a_restarted_server_again_for_what_it_has_is_answered() -> None:
    server = make_server()
    submit(server, 0, pull(server, 0))
    after = restarted(server)
    assert not after.is_known(0, 1)  # it is answered with something to do, which counts
    after.submit(0, "a0", 1, 1, VECTOR, Report(10), now=60.0)
    assert after.is_known(0, 1)
    answer = after.answer_to(0, "a0", 1)
    assert answer is not None
    assert (answer.number, answer.version, answer.order is not None) == (1, 2, True)
    assert torch.equal(after.vector, server.vector)
    assert (after.done, after.totals.duplicates) == (10, 1)
    again = submit(after, 0, answer, number=2)
    assert again is not None
    assert after.done == 20


def test_who_is_ahead_of_a_restarted_server_asks_anew_and_goes_on() -> None:
    server = make_server()
    tensors, values = server.state()
    first = pull(server, 0)
    second = submit(server, 0, first)
    assert second is not None
    after = make_server(admit=False)
    after.restore(tensors, values)
    after.admit(0, "a0", 100.0, now=50.0)
    with pytest.raises(BehindError):
        submit(after, 0, second, number=2)
    answer = pull(after, 0, last=2)
    assert (answer.number, answer.version) == (2, 1)
    assert submit(after, 0, answer, number=3) is not None
    assert after.done == 10


def test_another_incarnation_starts_from_nothing_after_a_restart() -> None:
    server = make_server()
    submit(server, 0, pull(server, 0))
    after = restarted(server)
    after.admit(0, "b0", 100.0, now=50.0)
    assert not after.is_known(0, 1)
    assert submit(after, 0, pull(after, 0)) is not None


# ------------------------------------------------------------------ answers belong together


@pytest.mark.parametrize("rule", ["fedasync", "dc-asgd", "fedavg"])
def test_an_answers_vector_is_that_of_its_version(rule: str) -> None:
    """With a bound, one submission lets others go too: each gets the weights it is told."""
    server = make_server(rule, nodes=3, bound=2)
    answers = {node: pull(server, node) for node in range(3)}
    numbers = dict.fromkeys(answers, 0)
    for node in (0, 1, 0, 1, 0, 1, 2, 0, 1, 2):
        incarnation = f"a{node}"
        answer = server.answer_to(node, incarnation, numbers[node])
        if answer is None:  # held by the bound, or at the barrier
            continue
        numbers[node] += 1
        submit(server, node, answer, number=numbers[node])
        for member in server.members.values():
            if member.answer is not None and member.report is None:
                known = server._merger._outstanding[member.answer.version]
                assert torch.equal(member.answer.vector[:2], known)


def test_the_vector_is_never_an_older_one() -> None:
    """Without statistics too, where one submission makes several versions."""
    work = StreamWork(Stream(100_000, 1), Terms(BATCH, local_batch=10, every=1))
    server = ParameterServer(make_rule("delta-poly", 3), work, VECTOR[:2], 2, 100_000, bound=2)
    for node in range(3):
        server.admit(node, f"a{node}", 100.0, now=0.0)
        pull(server, node)
    numbers = [0, 0, 0]
    for turn in range(200):
        node = (0, 1, 0, 1, 2)[turn % 5]
        answer = server.answer_to(node, f"a{node}", numbers[node])
        if answer is not None:
            numbers[node] += 1
            submit(server, node, answer, number=numbers[node], statistics=())
        assert torch.equal(server.vector, server._merger.weights)
