"""What is cutting the fully connected layers worth? Ours beside DDP, and torch's own hybrid.

The zoo's AlexNet on images of CIFAR's shape: convolutions are a tenth of its weights. Every rank
is a process with one thread in fp32, held to its part of the cores by the lab; ranks meet over
loopback, or each lives in a network namespace behind a link of 200 Mbit/s.

    convoy hybrid   a run of `convoy train --strategy hybrid`, with equal shares as the others
    DDP             all weights on every rank, all gradients travel
    DDP + DTensor   DDP around the convolutions; fc1 by columns, fc2 by rows (peers/dtensor.py)

Network and dropout are the same for all: torch's masks for the peers, masks by sample key for
ours, which cost about as much (2.4 against 1.6 ms for 32 x 4096, 5.8 against 6.6 for 128 x 4096).
DDP's buckets are those that short trials on loopback find fastest. Only steps count: not the
start, and not the first steps of each system.

What a rank sends is read from network cards, for all systems alike: on links each node's own,
and on loopback the one that all share, divided by the ranks. The latter carries whatever else
goes on on this machine.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import convoy.bench.peers.dtensor  # noqa: F401 - so that crews have it loaded
from convoy.bench.only import pick
from convoy.bench.ours import Enough, Recording, record_into
from convoy.bench.peers import Task, do_steps, take_part
from convoy.bench.peers.crew import Crew, Link
from convoy.bench.peers.ddp import open_store
from convoy.bench.report import Bar, Report, Row, median_ratio
from convoy.errors import EnvironmentProblem
from convoy.launch.lab import Lab
from convoy.launch.links import Links, enter_namespace
from convoy.machine import usable_cores
from convoy.monitor.events import Event, JoinEvent, StepEvent

DDP, DTENSOR, OURS = "DDP", "DDP + DTensor", "convoy hybrid"
PEERS = {DDP: "ddp", DTENSOR: "dtensor"}
RATE_MBIT = 200.0
_MODEL, _SHAPE, _CLASSES = "alexnet", (3, 32, 32), 10
_LAYOUT = "contiguous"  # no slower than channels_last here: 0.181 and 0.188 s for 32 samples
_WARM_STEPS = 1  # after the first one
_PATIENCE_S = 180.0  # beyond what a measurement should take

Settings = tuple[tuple[str, object], ...]  # of DDP
# All ranks build the same weights: nobody need be told them.
_ALIKE: Settings = (("init_sync", False),)


@dataclass(frozen=True, slots=True)
class Case:
    """So many ranks with so many samples each, over links or loopback."""

    ranks: int
    each: int
    link: bool

    @property
    def label(self) -> str:
        """Return what the report calls it."""
        where = f"{RATE_MBIT:g} Mbit/s" if self.link else "loopback"
        return f"{_MODEL}, {self.ranks} ranks of {self.each}, {where}"

    @property
    def speeds(self) -> tuple[float, ...]:
        """Return each rank's part of a core."""
        return (min(1.0, usable_cores() / self.ranks),) * self.ranks

    def task(self, settings: Settings = ()) -> Task:
        """Return what is trained, and DDP's settings."""
        return Task(
            _MODEL,
            _SHAPE,
            _CLASSES,
            batch=self.ranks * self.each,
            shares=(self.each,) * self.ranks,
            memory_format=_LAYOUT,
            ddp=(*_ALIKE, *settings),
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """How thoroughly to measure.

    Attributes:
        cases: what is measured.
        repeats: rounds in which every system takes a turn in every case.
        samples: that a rank trains on loopback, in a measurement.
        link_steps: of a measurement behind links; DDP's are ten times as long.
        ddp_link_steps: the same, for DDP.
        trial_steps: to find DDP's settings; 0: they are not looked for.
    """

    cases: tuple[Case, ...]
    repeats: int
    samples: int
    link_steps: int
    ddp_link_steps: int
    trial_steps: int

    def steps(self, case: Case, system: str) -> int:
        """Return how many steps are measured."""
        if case.link:
            return self.ddp_link_steps if system == DDP else self.link_steps
        return max(4, self.samples // case.each)


FULL = Plan(
    cases=tuple(
        Case(ranks, each, link) for link in (False, True) for ranks in (2, 4) for each in (32, 128)
    ),
    repeats=3,
    samples=1280,
    link_steps=8,
    ddp_link_steps=4,
    trial_steps=6,
)
QUICK = Plan((Case(2, 32, link=True),), 1, samples=0, link_steps=4, ddp_link_steps=2, trial_steps=0)
TRIALS: dict[str, tuple[Settings, ...]] = {
    DDP: tuple(
        (("bucket_cap_mb", size), ("static_graph", fixed))
        for size, fixed in ((1, False), (25, False), (100, False), (25, True))
    ),
    DTENSOR: tuple(
        (("bucket_cap_mb", size), ("static_graph", fixed))
        for size, fixed in ((1, False), (25, False), (25, True))
    ),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Steps per second, and what a rank sends in a step."""

    steps_per_s: float
    sent_bytes: float


Values = Mapping[tuple[Case, str], Sequence[Measured]]


def bench_hybrid(*, quick: bool, tell: Callable[[str], None], only: Sequence[str] = ()) -> Report:
    """Measure every case, all systems in turn."""
    missing = Links.available()
    if missing is not None:
        raise EnvironmentProblem("links cannot be emulated here", hint=missing)
    plan = QUICK if quick else FULL
    plan = replace(plan, cases=pick(plan.cases, only, lambda case: case.label))
    settings = find_settings(plan, tell)
    values: dict[tuple[Case, str], list[Measured]] = {}
    for number in range(plan.repeats):
        for case in plan.cases:
            tell(f"round {number + 1} of {plan.repeats}, {case.label}:")
            for system in (DDP, DTENSOR, OURS):
                chosen = settings.get((case.ranks, system), ())
                found = measure(system, case, chosen, plan.steps(case, system))
                values.setdefault((case, system), []).append(found)
                sent = f"{found.sent_bytes / 1e6:.1f} MB sent"
                tell(f"  {system} {found.steps_per_s:.3g} steps/s, {sent} by a rank in each")
    return Report("hybrid", plan.repeats, make_rows(values), make_bars(values))


def find_settings(plan: Plan, tell: Callable[[str], None]) -> dict[tuple[int, str], Settings]:
    """Return what DDP is fastest with, on loopback with small batches, for each rank count."""
    found: dict[tuple[int, str], Settings] = {}
    for ranks in dict.fromkeys(case.ranks for case in plan.cases) if plan.trial_steps else ():
        case = Case(ranks, 32, link=False)
        for system, candidates in TRIALS.items():
            speeds = {
                one: measure(system, case, one, plan.trial_steps).steps_per_s for one in candidates
            }
            best = found[ranks, system] = max(speeds, key=lambda one: speeds[one])
            tell(f"{system}, {ranks} ranks: {_describe(best)} of {_describe_all(speeds)}")
    return found


def _describe(settings: Settings) -> str:
    known = dict(settings)
    graph = ", static graph" if known["static_graph"] else ""
    return f"{known['bucket_cap_mb']} MB{graph}"


def _describe_all(speeds: Mapping[Settings, float]) -> str:
    return "; ".join(f"{_describe(one)}: {speed:.3g} steps/s" for one, speed in speeds.items())


def measure(system: str, case: Case, settings: Settings, steps: int) -> Measured:
    """Let a system do so many steps, after some to warm up."""
    if system == OURS:
        return measure_ours(case, steps)
    return _measure_peer(PEERS[system], case, settings, steps)


# ---------------------------------------------------------------- the peers


def _measure_peer(peer: str, case: Case, settings: Settings, steps: int) -> Measured:
    with ExitStack() as stack:
        links = stack.enter_context(Links([RATE_MBIT] * case.ranks)) if case.link else None
        lab = stack.enter_context(Lab(case.speeds))
        address = stack.enter_context(open_store(*([links.lead_address] if links else [])))
        given = [
            (links.namespace(node) if links else None, peer, case.task(settings), node, address)
            for node in range(case.ranks)
        ]
        crew = stack.enter_context(Crew(_be_rank, given))
        crew.receive(_PATIENCE_S)
        crew.place(lab)
        do_steps(crew, _WARM_STEPS, _PATIENCE_S)
        before = sent_so_far(case, crew.pids)
        elapsed_s, _ = do_steps(crew, steps, _PATIENCE_S)
        sent = sent_so_far(case, crew.pids) - before
        crew.send(None)
    return Measured(steps / elapsed_s, sent / case.ranks / steps)


def _be_rank(
    link: Link, namespace: str | None, peer: str, task: Task, node: int, address: str
) -> None:
    if namespace is not None:
        enter_namespace(namespace)
    take_part(link, peer, task, node, address)


# ---------------------------------------------------------------- ours


@dataclass
class Watch(Recording):
    """Reads the counters of network cards at every report, until it has seen enough steps."""

    case: Case = field(kw_only=True)
    last: int = field(kw_only=True)
    pids: dict[int, int] = field(default_factory=dict)
    points: list[tuple[float, int, int]] = field(default_factory=list)  # time, steps, bytes

    def receive(self, event: Event, when: float) -> None:
        """Take an event."""
        super().receive(event, when)
        if isinstance(event, JoinEvent):
            self.pids[event.node] = event.pid
        elif isinstance(event, StepEvent):
            sent = sent_so_far(self.case, list(self.pids.values()))
            self.points.append((when, event.step, sent))
            if event.step >= self.last:
                raise Enough

    def measured(self, first: int) -> Measured:
        """Return what steps after the first few were like."""
        start = next(point for point in self.points if point[1] >= first)
        seconds, steps, sent = (b - a for a, b in zip(start, self.points[-1], strict=True))
        assert steps, "the run was over before it was reported on twice"
        return Measured(steps / seconds, sent / self.case.ranks / steps)


def measure_ours(case: Case, steps: int, **options: object) -> Measured:
    """Let a hybrid run do so many steps, after some to warm up."""
    first = 1 + _WARM_STEPS
    watch = Watch(case=case, last=first + steps)
    record_into(
        watch,
        case.task(),
        # The run is left after the last step that counts: its end, with a test and with weights
        # that are brought together and saved, would take a minute behind slow links.
        first + steps + 1,
        strategy="hybrid",
        speeds=case.speeds,
        links=(RATE_MBIT,) * case.ranks if case.link else (),
        min_nodes=case.ranks,
        allocation="uniform",
        executor="eager",
        log_interval_s=0.1,
        **options,
    )
    return watch.measured(first)


# ---------------------------------------------------------------- network cards


def sent_so_far(case: Case, pids: Sequence[int]) -> int:
    """Return the bytes that all ranks have sent: by their own cards, or on loopback by all."""
    if not case.link:
        return _read_sent("self", "lo")
    return sum(_read_sent(str(pid), "eth0") for pid in pids)


def _read_sent(process: str, card: str) -> int:
    """Return the bytes sent so far by a card of the network that a process lives in."""
    return parse_sent(Path(f"/proc/{process}/net/dev").read_text())[card]


def parse_sent(text: str) -> dict[str, int]:
    r"""Return the bytes that each card has sent, from what the kernel tells.

    >>> parse_sent("face |bytes\n  eth0:  10 1 0 0 0 0 0 0  123 2 0 0 0 0 0 0\n")
    {'eth0': 123}
    """
    lines = [line.split(":") for line in text.splitlines() if ":" in line]
    return {name.strip(): int(numbers.split()[8]) for name, numbers in lines}


# ---------------------------------------------------------------- the report


def make_rows(values: Values) -> tuple[Row, ...]:
    """Return two rows for each system in each case: how fast, and what travels."""
    fast = [
        Row(case.label, system, "steps/s", tuple(one.steps_per_s for one in found))
        for (case, system), found in values.items()
    ]
    sent = [
        Row(
            f"{case.label}: a rank sends",
            system,
            "MB/step",
            tuple(one.sent_bytes / 1e6 for one in found),
        )
        for (case, system), found in values.items()
    ]
    return (*fast, *sent)


def make_bars(values: Values) -> tuple[Bar, ...]:
    """Return what the benchmark exists for, as far as it was measured."""

    def over(case: Case, peer: str, what: Callable[[Measured], float]) -> float:
        ours, theirs = values[case, OURS], values[case, peer]
        return median_ratio([what(one) for one in ours], [what(one) for one in theirs])

    def steps(one: Measured) -> float:
        return one.steps_per_s

    def sent(one: Measured) -> float:
        return one.sent_bytes

    bars = []
    for case in dict.fromkeys(case for case, _ in values):
        name = f"{case.label}: ours"
        if case.link:
            bars.append(Bar(f"{name} / DDP, bytes", over(case, DDP, sent), at_most=0.25))
        if case.link and case.each == 32:
            bars.append(Bar(f"{name} / DDP, steps/s", over(case, DDP, steps), at_least=3.0))
        ratio = over(case, DTENSOR, steps)
        bars.append(Bar(f"{name} / DDP + DTensor, steps/s", ratio, at_least=1.0))
    return tuple(bars)
