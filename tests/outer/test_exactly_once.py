"""Every sample is in the weights exactly once, whatever is lost, repeated, refused or killed.

The weights are one number for each place of each epoch, and what a node hands in is 1 where it
has trained. Everything but the arithmetic is real: rules of each kind, orders, the server.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from convoy.outer.rules.rule import Rule
from convoy.outer.server import Answer, BehindError, ParameterServer, Report
from convoy.outer.work import Span, Stream, StreamWork, Terms, count_samples, cut_spans
from tests.outer.counting import COUNTING

NODES = 3


@dataclass
class Push:
    """What a node has handed in, and to whom."""

    server: ParameterServer
    number: int
    base: int
    vector: Tensor
    report: Report


class Node:
    """Does what a real node does, without training."""

    def __init__(self, number: int, incarnation: str, samples: int) -> None:
        self.name = (number, incarnation)
        self._samples = samples
        self._last = 0
        self._answer: Answer | None = None
        self._ahead: list[Span] = []
        self.push: Push | None = None

    def act(self, server: ParameterServer, now: float, *, nonsense: bool = False) -> None:
        if self.push is not None:
            self._listen(server, now)
        elif self._answer is None or self._answer.order is None:
            self._pull(server, now)
        else:
            self._do(server, now, nonsense=nonsense)

    def send_again(self, server: ParameterServer, now: float) -> None:
        if self.push is not None:
            self._send(self.push, server, now)

    def _pull(self, server: ParameterServer, now: float) -> None:
        server.pull(*self.name, self._last, now)
        self._answer = server.answer_to(*self.name, 0)

    def _do(self, server: ParameterServer, now: float, *, nonsense: bool) -> None:
        assert self._answer is not None
        order = self._answer.order
        assert order is not None
        if self._answer.refused or order.carried != count_samples(self._ahead):
            self._ahead = []
        main, ahead = cut_spans(order.spans, order.samples - order.ahead)
        covered = [*self._ahead, *main]
        vector = torch.zeros_like(server.vector)
        for span in covered:
            vector[span.epoch * self._samples + span.start :][: span.samples] += 1
        report = Report(samples=count_samples(covered), busy_s=0.1, step_s=0.1)
        self._last += 1
        self.push = Push(server, self._last, self._answer.version, vector, report)
        self._ahead = ahead
        if nonsense:
            self.push.vector = vector * math.nan
        self._send(self.push, server, now)

    def _send(self, push: Push, server: ParameterServer, now: float) -> None:
        push.server = server
        try:
            server.submit(*self.name, push.number, push.base, push.vector, push.report, now)
        except BehindError:
            self._ahead, self.push = [], None
            self._pull(server, now)

    def _listen(self, server: ParameterServer, now: float) -> None:
        assert self.push is not None
        if self.push.server is not server:  # the service was lost: it is asked again
            self._send(self.push, server, now)
        if self.push is not None:
            answer = server.answer_to(*self.name, self.push.number)
            if answer is not None:
                self._answer, self.push = answer, None


class Run:
    """A server, its nodes, and the state that it has last written."""

    def __init__(self, rule: type[Rule], samples: int, epochs: int, terms: Terms) -> None:
        self._made_of = (rule, samples, epochs, terms)
        self._samples = samples
        self.server = self._make()
        self.saved = self._written()
        self.nodes: dict[int, Node] = {}
        self._starts = 0
        self.now = 0.0
        for node in range(NODES):
            self.start(node)

    def _make(self) -> ParameterServer:
        rule, samples, epochs, terms = self._made_of
        work = StreamWork(Stream(samples, epochs), terms)
        return ParameterServer(rule(), work, torch.zeros(samples * epochs), samples * epochs, 10**9)

    def _written(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, values = self.server.state()
        return {n: t.clone() for n, t in tensors.items()}, json.loads(json.dumps(values))

    def start(self, node: int) -> None:
        """Lose a node, if it is there, and start it anew."""
        self._starts += 1
        self.nodes[node] = Node(node, f"{node}.{self._starts}", self._samples)
        self.server.admit(*self.nodes[node].name, speed=1.0 + node, now=self.now)

    def crash(self) -> None:
        """Lose the service; go on from what was written last."""
        self.server = self._make()
        self.server.restore(*self.saved)
        for node in self.nodes.values():
            self.server.admit(*node.name, speed=1.0, now=self.now)

    def happen(self, what: str, node: int) -> None:
        self.now += 1.0
        if what == "act":
            self.nodes[node].act(self.server, self.now)
        elif what == "nonsense":
            self.nodes[node].act(self.server, self.now, nonsense=True)
        elif what == "again":
            self.nodes[node].send_again(self.server, self.now)
        elif what == "start":
            self.start(node)
        elif what == "tick":
            self.now = max(self.now, self.server.deadline or 0.0)
            self.server.tick(self.now)
        elif what == "save":
            self.saved = self._written()
        elif what == "crash":
            self.crash()
        assert self.server.vector.max() <= 1

    def finish(self) -> None:
        for node in self.nodes:
            self.start(node)  # whoever was shut out is let in again
        for _ in range(50 * self.server.vector.numel() + 100):
            if self.server.is_over:
                return
            for node in self.nodes:
                self.happen("act", node)
        raise AssertionError("it does not end")


@settings(max_examples=150)
@given(
    samples=st.integers(5, 40),
    epochs=st.integers(1, 2),
    terms=st.builds(
        Terms,
        batch=st.integers(1, 12),
        local_batch=st.just(0) | st.integers(1, 4),
        every=st.integers(1, 4),
        overlap=st.booleans(),
    ),
    happenings=st.lists(
        st.tuples(
            st.sampled_from(
                ["act"] * 16 + ["again", "start", "tick", "tick", "save", "save", "crash"]
            ),
            st.integers(0, NODES - 1),
        ),
        min_size=20,
        max_size=80,
    ),
    nonsense_at=st.lists(st.integers(0, 80), max_size=3),
)
@pytest.mark.parametrize("rule", COUNTING)
def test_every_sample_is_in_the_weights_exactly_once(
    rule: type[Rule],
    samples: int,
    epochs: int,
    terms: Terms,
    happenings: list[tuple[str, int]],
    nonsense_at: list[int],
) -> None:
    run = Run(rule, samples, epochs, terms)
    for place, (what, node) in enumerate(happenings):
        run.happen("nonsense" if place in nonsense_at else what, node)
    run.finish()
    assert run.server.done == samples * epochs
    assert run.server.vector.tolist() == [1.0] * (samples * epochs)
