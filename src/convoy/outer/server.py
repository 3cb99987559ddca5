"""The parameter service without its wires: who may hand in what, what comes of it, what is next.

Everything it does follows from what happens to it and when: `admit`, `remove`, `pull`, `submit`
and `tick`, each with the time. Nothing here waits, writes or sends; the shell around it does.
Fed with the same happenings it gives the same bits, which is how a run is replayed.

A submission has an identity: node, incarnation (one start of its process) and number. It is
taken in once. Who asks again with a number that was answered gets the same answer again; who
speaks for an incarnation that was removed is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from convoy.errors import ConvoyError
from convoy.memory.rooms import Rooms
from convoy.outer.gate import Gate
from convoy.outer.merger import Merger, Reply
from convoy.outer.rules.rule import Rule, Submission
from convoy.outer.rules.window import Window
from convoy.outer.work import Order, Work

_BLOCK = 1 << 18  # numbers
_LEAST, _MOST = 1e-9, 1e12  # of what can be counted with: quotients of two are finite


class FencedError(ConvoyError):
    """This incarnation of a node is not, or no longer, part of the run."""


class ShutOutError(ConvoyError):
    """A node handed in nonsense too often: to come back does not help it."""


class BehindError(ConvoyError):
    """The service does not know what this was trained from: ask for the weights again."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a node tells of the work that it hands in.

    Attributes:
        samples: that it trained for it.
        correct, loss: sums over them.
        rate: learning rate times steps.
        busy_s: seconds of work for the order.
        step_s: seconds of one local step.
        exchange_s: seconds that the last exchange took, waiting for others not counted.
    """

    samples: int
    correct: int = 0
    loss: float = 0.0
    rate: float = 1.0
    busy_s: float = 0.0
    step_s: float = 0.0
    exchange_s: float = 0.0

    @property
    def quality(self) -> float:
        """Return the accuracy on the way, as a fraction."""
        return self.correct / self.samples if self.samples else 0.0

    @property
    def is_sensible(self) -> bool:
        """Tell whether all of it, but for the loss, can be counted with."""
        return (
            0 <= self.correct <= self.samples
            and all(0 <= value <= _MOST for value in (self.rate, self.exchange_s))
            and all(is_sensible(value) for value in (self.busy_s, self.step_s))
        )


def is_sensible(value: float) -> bool:
    """Tell whether a time or speed can be counted with: it is what others are divided by."""
    return value == 0 or _LEAST <= value <= _MOST


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What a node is told.

    Attributes:
        number: of the submission that it answers; 0: of none.
        version: of the weights.
        vector: weights and statistics.
        order: what to do next; None: wait and ask again, or, if it is over, go.
        refused: why the submission was not taken in, if it was not.
        waited_s: how long the submission waited for others.
    """

    number: int
    version: int
    vector: Tensor
    order: Order | None
    is_over: bool = False
    refused: str = ""
    staleness: int | None = None
    waited_s: float = 0.0


@dataclass(eq=False)
class Member:
    """One node, as the service knows it."""

    incarnation: str
    number: int = 0  # of its last submission that was taken in or refused
    order: Order | None = None
    answer: Answer | None = None
    report: Report | None = None  # of the submission that has not been answered yet
    since: float = 0.0  # when that came
    staleness: int = 0

    @property
    def settled(self) -> int:
        """Return the number of its last submission that is in the weights."""
        waits = self.report is not None
        return self.number - (waits or bool(self.answer is not None and self.answer.refused))


@dataclass(eq=False)
class Totals:
    """Sums over what is in the weights, of the epoch under way, and counts over the run."""

    loss: float = 0.0
    correct: int = 0
    count: int = 0
    duplicates: int = 0
    fenced: int = 0
    submissions: int = 0
    staleness: int = 0  # summed
    by_staleness: dict[int, int] = field(default_factory=dict)  # submissions
    staleness_by_node: dict[int, int] = field(default_factory=dict)  # of its last submission
    samples_by_node: dict[int, int] = field(default_factory=dict)
    busy_by_node: dict[int, float] = field(default_factory=dict)
    waited_by_node: dict[int, float] = field(default_factory=dict)


class ParameterServer:
    """Holds the weights of a run, and hands out work for them.

    Args:
        rule: how submissions become new weights.
        work: what nodes are to do.
        vector: weights, then statistics.
        weights: how many of the numbers are weights.
        epoch_samples: samples of an epoch; at each, the weights are kept for a test.
        rooms: where memory for new weights comes from.
    """

    def __init__(
        self,
        rule: Rule,
        work: Work,
        vector: Tensor,
        weights: int,
        epoch_samples: int,
        *,
        first_version: int = 1,
        bound: int | None = None,
        window: Window | None = None,
        rooms: Rooms | None = None,
    ) -> None:
        self._rooms = rooms or Rooms()
        self._weights = weights
        self._statistics = vector[weights:].clone()
        self._work = work
        self._epoch_samples = epoch_samples
        self._merger: Merger[Tensor] = Merger(
            rule,
            self._rooms.copy(vector[:weights]),
            first_version=first_version,
            bound=bound,
            window=window,
            add=self._rooms.added,
            own=self._rooms.copy,
        )
        self._gate = Gate()
        self._joined: tuple[Tensor, Tensor, Tensor] | None = None  # both parts, and the whole
        self._known: dict[int, tuple[str, int]] = {}  # of before the service was lost
        self.done = 0
        self.totals = Totals()
        self.members: dict[int, Member] = {}
        self.epochs: dict[int, tuple[int, Tensor]] = {}  # kept for a test: version and vector

    @property
    def version(self) -> int:
        """Return the number of the weights."""
        return self._merger.version

    @property
    def vector(self) -> Tensor:
        """Return weights and statistics; the same tensor until one of them changes."""
        return self._vector_of(self._merger.weights)

    def _vector_of(self, weights: Tensor) -> Tensor:
        """Return some version's weights with the statistics; the last one made is remembered."""
        statistics = self._statistics
        if statistics.numel() == 0:
            return weights
        joined = self._joined
        if joined is None or joined[0] is not weights or joined[1] is not statistics:
            whole = self._rooms.joined(weights, statistics)
            joined = self._joined = (weights, statistics, whole)
        return joined[2]

    @property
    def deadline(self) -> float | None:
        """Return when to call `tick`, if nothing else happens before."""
        return self._merger.deadline

    @property
    def is_over(self) -> bool:
        """Tell whether everything is trained."""
        return self._work.is_over

    @property
    def work(self) -> Work:
        """Return what nodes are to do."""
        return self._work

    @property
    def refused(self) -> Mapping[str, int]:
        """Return how often something was refused, by reason."""
        return self._gate.refused

    def count_refusal(self, reason: str) -> None:
        """Count something that the shell refused."""
        self._gate.count(reason)

    # ------------------------------------------------------------ who is here

    def admit(self, node: int, incarnation: str, speed: float, now: float) -> None:
        """Let one incarnation of a node take part, and no other of it any more."""
        before = self.members.get(node)
        if before is not None and before.incarnation == incarnation:
            return
        if before is not None:
            self.remove(node, before.incarnation, now)
        known, number = self._known.get(node, ("", 0))
        self.members[node] = Member(incarnation, number if known == incarnation else 0)
        self._work.join(node, speed)

    def remove(self, node: int, incarnation: str, now: float) -> None:
        """Take a node out; what it had not been answered for is handed out again."""
        member = self.members.get(node)
        if member is None or member.incarnation != incarnation:
            return
        del self.members[node]
        self._work.leave(node)
        self._tell(self._merger.leave(node, now), now)

    def check(self, node: int, incarnation: str) -> Member:
        """Return a node's record, or refuse one that is not part of the run."""
        member = self.members.get(node)
        if member is None or member.incarnation != incarnation:
            self.totals.fenced += 1
            raise FencedError(f"node {node + 1} is not part of the run as {incarnation[:80]}")
        if self._gate.is_shut(node):
            raise ShutOutError(f"node {node + 1} handed in nonsense too often")
        return member

    # ------------------------------------------------------------ what nodes do

    def pull(self, node: int, incarnation: str, last: int, now: float) -> None:
        """Give a node the newest weights and something to do, unless it has something to do.

        Args:
            node: who.
            incarnation: which start of it.
            last: the last number that it has handed in; a service that lost some counts on.
            now: the time.
        """
        member = self.check(node, incarnation)
        member.number = max(member.number, last)
        if member.report is None and (member.answer is None or member.answer.order is None):
            self._tell([self._merger.join(node, now)], now)

    def rest(self, node: int, incarnation: str, now: float) -> None:
        """Let nobody wait for a node that has nothing to do; it asks again when it has."""
        member = self.check(node, incarnation)
        if member.report is None:
            member.answer, member.order = None, None
            self._tell(self._merger.leave(node, now), now)

    def is_known(self, node: int, number: int) -> bool:
        """Tell whether a submission was taken in before: to ask again changes nothing."""
        member = self.members[node]
        return member.number == number and member.answer is not None

    def submit(
        self,
        node: int,
        incarnation: str,
        number: int,
        base: int,
        vector: Tensor,
        report: Report,
        now: float,
    ) -> None:
        """Take in what a node has trained, once.

        The vector is read until it is answered, and no longer: its memory may be used again then.
        """
        member = self.check(node, incarnation)
        if number == member.number:
            told = member.answer.number if member.answer is not None else number
            if member.report is None and told < number:  # it only said that it had
                raise BehindError(f"number {number} of node {node + 1} was never handed in")
            self.totals.duplicates += 1
            if member.answer is None:  # it was taken in before the service was lost
                self._tell([self._merger.join(node, now)], now)
            return
        answer = member.answer
        if answer is None or member.order is None or answer.version != base:
            raise BehindError(f"the service does not know version {base} of node {node + 1}")
        if number != member.number + 1:
            raise BehindError(f"number {number} of node {node + 1} follows {member.number}")
        member.number = number
        problem = self._problem(node, vector, report)
        if problem is not None:
            self._refuse(node, member, problem, now)
            return
        member.report, member.since = report, now
        self._average(node, vector[self._weights :], report.samples)
        submission = Submission(
            node,
            base,
            vector[: self._weights],
            samples=report.samples,
            quality=report.quality,
            rate=max(report.rate, 1e-12),
        )
        self._tell(self._merger.submit(submission, now), now)

    def tick(self, now: float) -> None:
        """End a beat whose time is over."""
        self._tell(self._merger.tick(now), now)

    def answer_to(self, node: int, incarnation: str, number: int) -> Answer | None:
        """Return the answer to a submission, once there is one."""
        member = self.members.get(node)
        if member is None or member.incarnation != incarnation:
            raise FencedError(f"node {node + 1} is not part of the run as {incarnation[:80]}")
        answer = member.answer
        return answer if answer is not None and answer.number >= number else None

    def _problem(self, node: int, vector: Tensor, report: Report) -> str | None:
        if not math.isfinite(report.loss):  # as where training diverges, and the vector shows it
            return self._gate.refuse(node, "not finite")
        if not report.is_sensible:
            return self._gate.refuse(node, "a report without sense")
        norm = _norm(vector)
        return self._gate.problem_with(node, norm, report.rate, lambda: _norm(self.vector))

    def _refuse(self, node: int, member: Member, problem: str, now: float) -> None:
        self._work.void(node)
        member.order = None
        self._tell([self._merger.join(node, now)], now, refused=problem)
        if self._gate.is_shut(node):  # nothing more comes of it: others do its work
            self._work.void(node)
            member.order = None
            self._tell(self._merger.leave(node, now), now)

    def _average(self, node: int, statistics: Tensor, samples: int) -> None:
        """Move the statistics towards a node's own, as far as its part of the work goes."""
        if statistics.numel():
            speeds = self._work.speeds
            part = speeds.get(node, 0.0) / (sum(speeds.values()) or 1.0)
            self._statistics = torch.lerp(self._statistics, statistics, min(1.0, max(0.0, part)))

    def _tell(self, replies: list[Reply[Tensor]], now: float, refused: str = "") -> None:
        """Count what has been merged, and give those who are answered something new to do."""
        finished = [self._finish(reply, now) for reply in replies]
        for reply, waited_s in zip(replies, finished, strict=True):
            member = self.members[reply.node]
            member.order = self._work.order(reply.node, self.done)
            if member.order is None:  # nobody is to wait for one who has nothing to do
                self._tell(self._merger.leave(reply.node, now), now)
            member.answer = Answer(
                number=member.number,
                version=reply.version,
                vector=self._vector_of(reply.weights),
                order=member.order,
                is_over=self.is_over,
                refused=refused,
                staleness=reply.staleness,
                waited_s=waited_s,
            )
        if self.is_over:
            self._merger.flush(now)

    def _finish(self, reply: Reply[Tensor], now: float) -> float:
        """Count a submission that is in the weights; return how long it waited."""
        member = self.members[reply.node]
        report, order = member.report, member.order
        if report is None or order is None:
            return 0.0
        waited_s = now - member.since
        member.report = None
        self._work.note_exchange(report.exchange_s, report.step_s)
        self._count(reply.node, report, reply.staleness or 0, waited_s)
        before = self.done // self._epoch_samples
        hidden_s = report.step_s if order.ahead else 0.0  # by the step that is done meanwhile
        cost_s = max(0.0, report.exchange_s - hidden_s)
        self.done += self._work.finish(reply.node, order, report.busy_s, cost_s)
        epoch = self.done // self._epoch_samples
        if epoch > before:
            self.epochs[epoch] = (self.version, self.vector)
        return waited_s

    def _count(self, node: int, report: Report, staleness: int, waited_s: float) -> None:
        totals = self.totals
        totals.loss += report.loss
        totals.correct += report.correct
        totals.count += report.samples
        totals.submissions += 1
        totals.staleness += staleness
        totals.by_staleness[staleness] = totals.by_staleness.get(staleness, 0) + 1
        totals.staleness_by_node[node] = staleness
        self.members[node].staleness = staleness
        for sums, value in (
            (totals.samples_by_node, report.samples),
            (totals.busy_by_node, report.busy_s),
            (totals.waited_by_node, waited_s),
        ):
            sums[node] = sums.get(node, 0) + value  # type: ignore[assignment]

    # ------------------------------------------------------------ what must last

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return everything acknowledged so far: tensors, none of which changes, and values."""
        tensors = {"weights": self._merger.weights, "statistics": self._statistics}
        values: dict[str, Any] = {}
        for name, value in self._merger.memory.items():
            if isinstance(value, Tensor):
                tensors[f"memory/{name}"] = value
            else:
                values[name] = value
        buffered = []
        for place, submission in enumerate(self._merger.buffered):
            tensors[f"buffered/{place}"] = submission.increment
            buffered.append(_plain(submission))
        return tensors, {
            "version": self.version,
            "done": self.done,
            "memory": values,
            "buffered": buffered,
            "work": self._work.state(),
            "numbers": {
                **{str(node): list(known) for node, known in self._known.items()},
                **{str(n): [m.incarnation, m.settled] for n, m in self.members.items()},
            },
            "refused": dict(self.refused),
            "sums": [self.totals.loss, self.totals.correct, self.totals.count],
        }

    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Go on from such a state; every node must be admitted and ask for the weights again."""
        self._merger.weights = self._rooms.copy(tensors["weights"])
        self._statistics = tensors["statistics"].clone()
        memory = {
            **values["memory"],
            **{n.removeprefix("memory/"): t for n, t in tensors.items() if n.startswith("memory/")},
        }
        buffered = [
            Submission(**{**meta, "increment": tensors[f"buffered/{place}"]})
            for place, meta in enumerate(values["buffered"])
        ]
        self._merger.restore(values["version"], memory, buffered)
        self.done = values["done"]
        self._work.restore(values["work"])
        self._gate.refused.update(values["refused"])
        self.totals.loss, self.totals.correct, self.totals.count = values["sums"]
        self._known = {int(n): (name, number) for n, (name, number) in values["numbers"].items()}


def _norm(vector: Tensor) -> float:
    """Return the length of a vector; what is not finite makes it so."""
    # In blocks, because converting all to float64 takes 25 times as long, and float32 alone
    # would lose what is small beside a long sum.
    norm = math.hypot(*(float(torch.linalg.vector_norm(p)) for p in vector.split(_BLOCK)))
    if math.isfinite(norm):
        return norm
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64))  # squares overflow later


def _plain(submission: Submission[Tensor]) -> dict[str, Any]:
    """Return a submission's plain values."""
    small = Submission(submission.node, submission.base, None, submission.samples)
    return {**asdict(small), "quality": submission.quality, "rate": submission.rate}
