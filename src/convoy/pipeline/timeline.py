"""A pipeline in time, before it runs: which stage does what when, and what it waits for.

Each stage does its jobs in a fixed order; a job starts when its stage is free and its input (the
activations of the stage before, the gradient of the stage after) has arrived. A gradient can be
sent before its job is done: what is postponed (postponed.py) comes after it.

order       a stage's jobs                                              weights are
stale       forwards two for each later stage ahead, without end        up to 2K updates old
1f1b        forwards one for each later stage ahead, without end        up to K updates old
gpipe       a batch in parts: all forwards, all backwards, one update   never old
1f1b-sync   a batch in parts: as 1f1b, then one update                  never old
plain       a batch at a time, one stage after the other                never old

    1f1b, two equal stages        0  1  2  3  4  5  6  7  8
                        stage 1   F0 F1 .. B0 F2 B1 F3 B2 F4
                        stage 2   .. F0 B0 F1 B1 F2 B2 F3 B3

What is sent takes its link for some time, one message after the other in each direction; a stage
computes meanwhile.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from convoy.pipeline.schedule import LEADS, Job, Kind, jobs_of, lead_of

SYNCHRONOUS = ("gpipe", "1f1b-sync", "plain")
ORDERS = (*LEADS, *SYNCHRONOUS)
_IN_PARTS = ("gpipe", "1f1b-sync")  # to compare with: others' schedules, who postpone nothing


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a whole batch.

    Attributes:
        forward_s, backward_s: of each stage.
        transfer_s: of each cut, in either direction; nothing: transfers cost nothing.
        postponed: part of a backward pass that comes after its gradient was sent.
        postponable: part of it that could.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    transfer_s: tuple[float, ...] = ()
    postponed: float = 0.0
    postponable: float = 0.0

    @property
    def stages(self) -> int:
        """Return how many stages there are."""
        return len(self.forward_s)

    def of(self, stage: int, kind: Kind) -> float:
        """Return the seconds of one of a stage's two passes."""
        return (self.forward_s if kind == "forward" else self.backward_s)[stage]


@dataclass(frozen=True, slots=True)
class Span:
    """A job in time.

    Attributes:
        part: of the batch, counted from 0, where it is cut into parts.
        version: updates that the weights have had which it reads.
    """

    stage: int
    kind: Kind
    batch: int
    part: int
    start_s: float
    end_s: float
    version: int


@dataclass(frozen=True)
class Timeline:
    """Some batches on their way through a pipeline.

    Attributes:
        parts: that each batch is cut into.
        spans: of all stages, each stage's in the order of time.
    """

    stages: int
    order: str
    batches: int
    parts: int
    spans: tuple[Span, ...]

    def by_stage(self) -> list[list[Span]]:
        """Return each stage's spans."""
        found: list[list[Span]] = [[] for _ in range(self.stages)]
        for span in self.spans:
            found[span.stage].append(span)
        return found

    @property
    def makespan_s(self) -> float:
        """Return when the last job has ended."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def period_s(self) -> float:
        """Return the seconds from a batch to the next in the steady state.

        It is that of the slowest stage: those before it run at their own pace until their lead is
        used up. A timeline too short for a steady state counts as a whole.
        """
        leads = [0 if self.is_synchronous else self._lead(stage) for stage in range(self.stages)]
        found = []
        for stage, updates_s in enumerate(self._updates()):
            # After the pipeline was filled, and before the stage has had its last forward.
            steady = updates_s[leads[0] - leads[stage] : max(0, self.batches - leads[stage])]
            if self.is_synchronous and stage == 0:
                steady = [0.0, *steady]  # each batch finds the pipeline empty
            if len(steady) > 1:
                step = _repeating(steady)
                found.append((steady[-1] - steady[-1 - step]) / step)
        return max(found, default=self.makespan_s / self.batches)

    @property
    def utilisation(self) -> tuple[float, ...]:
        """Return the part of the steady state that each stage computes."""
        busy_s = [sum(s.end_s - s.start_s for s in spans) for spans in self.by_stage()]
        whole_s = self.period_s * self.batches
        return tuple(busy / whole_s if whole_s else 1.0 for busy in busy_s)

    @property
    def bubble(self) -> float:
        """Return the part of the steady state that stages wait, all stages together."""
        return max(0.0, 1 - sum(self.utilisation) / self.stages)

    @property
    def held(self) -> tuple[float, ...]:
        """Return the batches whose activations each stage holds at the same time, at most."""
        changes = [
            [1 if span.kind == "forward" else -1 for span in spans] for spans in self.by_stage()
        ]
        return tuple(max(accumulate(of_stage)) / self.parts for of_stage in changes)

    @property
    def is_synchronous(self) -> bool:
        """Tell whether the pipeline is empty after each batch."""
        return self.order in SYNCHRONOUS

    def _lead(self, stage: int) -> int:
        return lead_of(self.order, self.stages, stage)

    def _updates(self) -> list[list[float]]:
        """Return when each stage has done with each batch."""
        last = self.parts - 1
        return [
            [span.end_s for span in spans if span.kind == "backward" and span.part == last]
            for spans in self.by_stage()
        ]


def _repeating(moments: Sequence[float]) -> int:
    """Return the length of the pattern in which the later half of some moments come.

    Transfers can make batches come in a pattern. Where there is none, it is the later half.

    >>> _repeating([0, 7, 8, 11, 12, 15, 16]), _repeating([0, 2])
    (2, 1)
    """
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    half = (len(gaps) + 1) // 2
    blur = 1e-9 * abs(moments[-1])
    for length in range(1, len(gaps) - half + 1):
        before = gaps[-half - length : -length]
        if all(abs(a - b) <= blur for a, b in zip(gaps[-half:], before, strict=True)):
            return length
    return half


def simulate(pace: Pace, order: str, batches: int, parts: int = 1) -> Timeline:
    """Return what happens when some batches pass a pipeline, from empty to empty.

    Args:
        pace: how long everything takes.
        order: one of ORDERS.
        batches: how many.
        parts: that a batch is cut into, for the synchronous orders; each takes its part of the
            batch's time.
    """
    assert order in ORDERS, order
    assert parts == 1 or order in _IN_PARTS, (order, parts)
    queues = [
        deque(_jobs(order, pace.stages, stage, batches, parts)) for stage in range(pace.stages)
    ]
    run = _Run(pace, parts, 0.0 if order in _IN_PARTS else pace.postponed)
    while any(queues):
        done = 0
        for stage, queue in enumerate(queues):
            while queue and run.does(stage, queue[0]):
                queue.popleft()
                done += 1
        assert done, "the pipeline stands still"
    return Timeline(pace.stages, order, batches, parts, tuple(run.spans))


def simulate_steady(pace: Pace, order: str, parts: int = 1) -> Timeline:
    """Return a timeline that is long enough to show the steady state."""
    lead = 0 if order in SYNCHRONOUS else lead_of(order, pace.stages, 0)
    batches = 2 if order in SYNCHRONOUS else 8 * (lead + 1) + 48
    return simulate(pace, order, batches, parts)


def seconds_of(pace: Pace, order: str, batches: int, parts: int = 1) -> float:
    """Return how long some batches take, with filling and draining the pipeline."""
    steady = simulate_steady(pace, order, parts)
    if batches > steady.batches:
        return steady.makespan_s + (batches - steady.batches) * steady.period_s
    return simulate(pace, order, batches, parts).makespan_s


def _jobs(order: str, stages: int, stage: int, batches: int, parts: int) -> Iterator[Job]:
    """Yield a stage's jobs; parts are numbered through all batches."""
    if order not in SYNCHRONOUS:
        yield from jobs_of(lead_of(order, stages, stage), batches)
        return
    # All of them are a lead within one batch: after its last backward the stage is empty.
    lead = min(stages - 1 - stage, parts - 1) if order == "1f1b-sync" else parts - 1
    for batch in range(batches):
        for job in jobs_of(lead, parts):
            yield Job(batch * parts + job.batch, job.kind)


@dataclass(slots=True)
class _Run:
    """A pipeline as it stands after the jobs that were done so far."""

    pace: Pace
    parts: int
    postponed: float
    spans: list[Span] = field(default_factory=list)
    free_s: dict[int, float] = field(default_factory=dict)  # when a stage has done its jobs
    sent_s: dict[tuple[int, Kind], float] = field(default_factory=dict)  # when a link is free
    arrived_s: dict[tuple[int, Job], float] = field(default_factory=dict)
    updates: dict[int, int] = field(default_factory=dict)

    def does(self, stage: int, job: Job) -> bool:
        """Do a stage's next job, unless its input depends on what was not done yet."""
        ready_s = self._ready(stage, job)
        if ready_s is None:
            return False
        start_s = max(ready_s, self.free_s.get(stage, 0.0))
        seconds = self.pace.of(stage, job.kind) / self.parts
        end_s = start_s + seconds
        batch, part = divmod(job.batch, self.parts)
        version = self.updates.get(stage, 0)
        self.spans.append(Span(stage, job.kind, batch, part, start_s, end_s, version))
        self.free_s[stage] = end_s
        if job.kind == "backward" and part == self.parts - 1:
            self.updates[stage] = version + 1
        self._send(stage, job, end_s - (job.kind == "backward") * self.postponed * seconds)
        return True

    def _ready(self, stage: int, job: Job) -> float | None:
        own = job.kind == "forward" and stage == 0
        own = own or (job.kind == "backward" and stage == self.pace.stages - 1)
        # What a stage has of itself is there: its jobs are in order.
        return 0.0 if own else self.arrived_s.pop((stage, job), None)

    def _send(self, stage: int, job: Job, when_s: float) -> None:
        onward = job.kind == "forward"
        to, cut = (stage + 1, stage) if onward else (stage - 1, stage - 1)
        if not 0 <= to < self.pace.stages:
            return
        seconds = self.pace.transfer_s[cut] / self.parts if self.pace.transfer_s else 0.0
        there_s = max(when_s, self.sent_s.get((cut, job.kind), 0.0)) + seconds
        self.sent_s[cut, job.kind] = self.arrived_s[to, job] = there_s
