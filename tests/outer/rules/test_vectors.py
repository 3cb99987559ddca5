"""The worked examples of the papers, and what must hold for every rule."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from convoy.outer.merger import Merger, Reply
from convoy.outer.rules.agwu import Agwu, attenuation
from convoy.outer.rules.dcasgd import DcAsgd
from convoy.outer.rules.delta import Delta, FedBuff
from convoy.outer.rules.discount import inverse
from convoy.outer.rules.fedasync import FedAsync
from convoy.outer.rules.nesterov import DelayedNesterov, Nesterov
from convoy.outer.rules.rule import Rule, Submission
from convoy.outer.rules.sgwu import fedavg, plain_mean, samples_and_quality, sgwu

Array = NDArray[np.float64]
GOALS = {1: (2.0, 0.0), 2: (0.0, 2.0), 3: (4.0, -2.0)}
ORDER = (1, 2, 1, 3, 1, 2)  # periods of 2, 3 and 5 time units
QUALITIES = {1: [0.60, 0.70, 0.80], 2: [0.50, 0.65], 3: [0.90]}


def trace(rule: Rule, first_version: int = 1) -> list[tuple[float, ...]]:
    """Let three nodes hand in in the order of the worked example; return W after each."""
    merger: Merger[Array] = Merger(rule, np.array([1.0, -1.0]), first_version=first_version)
    at = {node: merger.join(node) for node in GOALS}
    left = {node: list(values) for node, values in QUALITIES.items()}
    seen = []
    for node in ORDER:
        base = at[node]
        increment = 0.5 * (np.array(GOALS[node]) - base.weights)
        quality = left[node].pop(0)
        submission = Submission(node, base.version, increment, quality=quality, rate=0.5)
        (at[node],) = merger.submit(submission)
        seen.append(tuple(merger.weights.tolist()))
    return seen


def near(expected: list[tuple[float, float]], digits: int) -> Any:
    return [pytest.approx(pair, abs=0.6 * 10**-digits) for pair in expected]


def test_agwu_1() -> None:
    assert trace(Agwu()) == near(
        [
            (1.1, -0.9),
            (1.031482845235, -0.694448535704),
            (1.132699249988, -0.593232130950),
            (1.415972215110, -0.687656452658),
            (1.530085723192, -0.609603021286),
            (1.447196439093, -0.393078906321),
        ],
        12,
    )


def test_agwu_1_numbered_from_zero() -> None:
    assert trace(Agwu(), first_version=0) == near(
        [
            (1.1, -0.9),
            (1.047014610596, -0.741043831787),
            (1.143781314597, -0.644277127786),
            (1.382043972360, -0.723698013707),
            (1.493864706488, -0.639556493978),
            (1.414985660297, -0.433054196083),
        ],
        12,
    )


@pytest.mark.parametrize(
    ("node", "bases", "version", "gamma"),
    [
        (1, {1: 1, 2: 1, 3: 1}, 1, 0.333333333333),
        (2, {1: 2, 2: 1, 3: 1}, 2, 0.274068619061),
        (1, {1: 2, 2: 3, 3: 1}, 3, 0.321321919853),
        (3, {1: 4, 2: 3, 3: 1}, 4, 0.209831826016),
        (1, {1: 4, 2: 3, 3: 5}, 5, 0.328932922289),
        (2, {1: 6, 2: 3, 3: 5}, 6, 0.247259517938),
        (2, {1: 1, 2: 0, 3: 0}, 1, 0.211941557617),
        (3, {1: 3, 2: 2, 3: 0}, 3, 0.176490857603),
    ],
)
def test_attenuation(node: int, bases: dict[int, int], version: int, gamma: float) -> None:
    assert attenuation(node, bases, version) == pytest.approx(gamma, abs=6e-13)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (
            FedAsync(0.6),
            [
                (1.3, -0.7),
                (0.960588745, -0.1908831175),
                (1.2530811691, -0.2583906935),
                (1.6271568184, -0.6308734854),
                (1.6268953725, -0.4180294771),
                (1.2829150725, -0.0212531016),
            ],
        ),
        (
            Delta(),
            [
                (1.1666666667, -0.8333333333),
                (1.0488155365, -0.4797799427),
                (1.1470248116, -0.3815706676),
                (1.3970248116, -0.4649040009),
                (1.4975489016, -0.4199354665),
                (1.4101476069, -0.2132871379),
            ],
        ),
        (
            Delta(inverse()),
            [
                (1.1666666667, -0.8333333333),
                (1.0, -0.3333333333),
                (1.1388888889, -0.1944444444),
                (1.3055555556, -0.25),
                (1.4490740741, -0.2175925926),
                (1.3935185185, -0.087962963),
            ],
        ),
        (
            DcAsgd(0.04),
            [
                (1.1666666667, -0.8333333333),
                (0.9988888889, -0.3433333333),
                (1.1385545267, -0.206712963),
                (1.6302412551, -0.3786682099),
                (1.7713830009, -0.3441670648),
                (1.5997629967, 0.0464190121),
            ],
        ),
    ],
    ids=["fedasync", "delta-poly", "delta-inverse", "dc-asgd"],
)
def test_control_vectors(rule: Rule, expected: list[tuple[float, float]]) -> None:
    assert trace(rule) == near(expected, 10)


def test_fedbuff_makes_a_version_of_every_three() -> None:
    seen = trace(FedBuff(3))
    assert seen[:2] == [(1.0, -1.0)] * 2
    assert seen[2:5] == near([(1.1666666667, -0.1666666667)] * 3, 10)
    assert seen[5:] == near([(1.541257816, 0.0968133715)], 9)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (sgwu, (1.7, -0.7)),
        (plain_mean, (1.5, -0.5)),
        (fedavg, (1.75, -0.75)),
        (samples_and_quality, (1.9482758621, -0.9482758621)),
    ],
)
def test_sgwu_1_and_its_controls(make: Callable[[], Rule], expected: tuple[float, float]) -> None:
    start = np.array([9.0, 9.0])
    merger: Merger[Array] = Merger(make(), start)
    for node in (1, 2, 3):
        merger.join(node)
    locals_ = {1: (1.5, -0.5), 2: (0.5, 0.5), 3: (2.5, -1.5)}
    samples, qualities = {1: 300, 2: 300, 3: 600}, {1: 0.6, 2: 0.5, 3: 0.9}
    replies: list[Reply[Array]] = []
    for node, local in locals_.items():
        assert replies == []  # nobody goes on before all are there
        replies = merger.submit(
            Submission(
                node, 1, np.array(local) - start, samples=samples[node], quality=qualities[node]
            )
        )
    assert [reply.node for reply in replies] == [1, 2, 3]
    assert {reply.version for reply in replies} == {2}
    for reply in replies:
        assert reply.weights.tolist() == pytest.approx(expected, abs=6e-11)


# ------------------------------------------------------------------ what AGWU promises


@given(bases=st.lists(st.integers(1, 50), min_size=1, max_size=8), ahead=st.integers(0, 10))
def test_attenuations_of_all_nodes_add_up_to_one(bases: list[int], ahead: int) -> None:
    version = max(bases) + ahead
    table = dict(enumerate(bases))
    gammas = [attenuation(node, table, version) for node in table]
    assert sum(gammas) == pytest.approx(1.0)
    m = len(bases)
    assert min(gammas) >= 1 / (1 + (m - 1) * math.e) - 1e-12
    assert max(gammas) <= math.e / (math.e + m - 1) + 1e-12
    if len(set(bases)) == 1:
        assert gammas == pytest.approx([1 / m] * m)


@given(others=st.lists(st.integers(1, 20), min_size=1, max_size=5), base=st.integers(1, 19))
def test_a_newer_base_weighs_more(others: list[int], base: int) -> None:
    table = dict(enumerate(others, start=1))
    older = attenuation(0, {0: base, **table}, 20)
    newer = attenuation(0, {0: base + 1, **table}, 20)
    assert newer > older


def test_alone_nothing_is_attenuated() -> None:
    merger: Merger[float] = Merger(Agwu(), 1.0)
    merger.join(0)
    merger.submit(Submission(0, 1, 0.5, quality=0.8))
    assert merger.weights == pytest.approx(1.0 + 0.8 * 0.5)


def test_no_accuracy_moves_nothing_but_makes_a_version() -> None:
    merger: Merger[float] = Merger(Agwu(), 1.0)
    merger.join(0)
    (reply,) = merger.submit(Submission(0, 1, 0.5, quality=0.0))
    assert (reply.weights, reply.version) == (1.0, 2)


def test_relative_accuracy_is_one_where_all_are_equally_good() -> None:
    merger: Merger[float] = Merger(Agwu(quality="relative"), 0.0)
    for node in (0, 1):
        merger.join(node)
    merger.submit(Submission(0, 1, 1.0, quality=0.1))
    assert merger.weights == pytest.approx(0.5)


# ------------------------------------------------------------------ outer optimizers


def test_nesterov_without_momentum_is_the_rule_at_a_rate() -> None:
    plain, wrapped = trace(Delta()), trace(Nesterov(Delta(), rate=1.0, momentum=0.0))
    assert plain == near(wrapped, 12)  # type: ignore[arg-type]


def test_diloco_by_hand() -> None:
    merger: Merger[float] = Merger(Nesterov(plain_mean(), rate=0.5, momentum=0.9), 0.0)
    merger.join(0)
    merger.submit(Submission(0, 1, 1.0))
    assert merger.weights == pytest.approx(0.5 * (1 + 0.9))
    base = merger.weights
    merger.submit(Submission(0, 2, 2.0))
    momentum = 0.9 * 1 + 2
    assert merger.weights == pytest.approx(base + 0.5 * (2 + 0.9 * momentum))


def test_delayed_nesterov_by_hand() -> None:
    merger: Merger[float] = Merger(DelayedNesterov(Delta(), every=2, momentum=0.5), 0.0)
    merger.join(0)
    merger.submit(Submission(0, 1, 1.0))
    assert merger.weights == pytest.approx(1.0)
    merger.submit(Submission(0, 2, 3.0))
    assert merger.weights == pytest.approx(4.0 + 0.5 * 2.0)  # the mean of 1 and 3
    merger.submit(Submission(0, 3, 0.0))
    assert merger.weights == pytest.approx(5.0)
    merger.submit(Submission(0, 4, 0.0))
    assert merger.weights == pytest.approx(5.0 + 0.5 * (0.5 * 2.0))
