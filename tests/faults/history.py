"""What clients of the parameter service asked for and were told, and whether it all agrees.

Three sources, none of which trusts another: the clients' own history of attempts and
acknowledgements, the weights, in which every submission of a light client leaves a mark at a
place of its own, and the service's record, which is told again to a server without wires.

A check returns what it found wrong, as sentences; nothing wrong: an empty list.
"""

import copy
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from convoy.config import Config, read_toml
from convoy.launch.choose import config_of_nodes
from convoy.launch.parameters.record import read_record
from convoy.outer.rules.rule import Merged, Rule, Submission, World
from convoy.outer.server import BehindError, ParameterServer, Report
from convoy.outer.service_plan import make_server
from convoy.outer.work import Order, Span, Work


class Attempt(NamedTuple):
    """A submission, as its client knows it: sent as often as it takes, under one identity."""

    place: int  # of its mark in the weights
    node: int
    incarnation: str
    number: int
    base: int
    spans: tuple[Span, ...]


class History:
    """What all clients of a test attempted, and what they were told."""

    def __init__(self, room: int) -> None:
        self._lock = threading.Lock()
        self._room = room
        self.attempts: list[Attempt] = []
        self.acknowledged: dict[int, int] = {}  # by place: the version that was told
        self.declined: dict[int, str] = {}  # by place: why it was not taken in

    def attempt(
        self, node: int, incarnation: str, number: int, base: int, spans: Iterable[Span]
    ) -> Attempt:
        """Note a submission before it is sent; return it with a place of its own."""
        with self._lock:
            assert len(self.attempts) < self._room, "the vector has no place left for a mark"
            made = Attempt(len(self.attempts), node, incarnation, number, base, tuple(spans))
            self.attempts.append(made)
            return made

    def acknowledge(self, attempt: Attempt, version: int) -> None:
        """Note that the service said that it has taken a submission in."""
        with self._lock:
            assert attempt.place not in self.acknowledged
            self.acknowledged[attempt.place] = version

    def decline(self, attempt: Attempt, why: str) -> None:
        """Note that the service said that it has not taken a submission in."""
        with self._lock:
            self.declined[attempt.place] = why

    def sent_since(self, place: int) -> list[Attempt]:
        """Return the attempts from some place on."""
        with self._lock:
            return self.attempts[place:]


def marks_in(weights: Tensor) -> dict[int, float]:
    """Return how often the submission of each place is in the weights, where it is at all."""
    places = weights.nonzero().flatten().tolist()
    return {int(place): float(weights[place]) for place in places}


def find_faults(
    history: History, applied: Mapping[int, float], *, lost_at_most: int = 0
) -> list[str]:
    """Check that what was acknowledged is applied, what is applied was attempted, and once.

    Args:
        history: of the clients.
        applied: how often each submission is in the weights, by its place.
        lost_at_most: so many of those that were acknowledged may be missing.
    """
    faults = []
    lost = sorted(set(history.acknowledged) - set(applied))
    if len(lost) > lost_at_most:
        named = [history.attempts[place] for place in lost[:5]]
        faults.append(f"{len(lost)} were acknowledged and are lost, for example {named}")
    if invented := sorted(set(applied) - {attempt.place for attempt in history.attempts}):
        faults.append(f"applied and never attempted: {invented[:5]}")
    if wrong := {place: times for place, times in applied.items() if times != 1.0}:
        faults.append(f"not applied exactly once: {dict(list(wrong.items())[:5])}")
    if both := sorted(set(applied) & set(history.declined)):
        faults.append(f"applied although it was declined: {both[:5]}")
    identities = Counter((a.node, a.incarnation, a.number) for a in history.attempts)
    if twice := [identity for identity, times in identities.items() if times > 1]:
        faults.append(f"identities that two submissions share: {twice[:5]}")
    return faults


def find_sample_faults(spans: Iterable[Span], samples: int, epochs: int) -> list[str]:
    """Check that some stretches cover every sample of every epoch exactly once."""
    counts = torch.zeros(epochs, samples, dtype=torch.int64)
    for span in spans:
        counts[span.epoch, span.start : span.stop] += 1
    faults = []
    for epoch in range(epochs):
        missing = int((counts[epoch] == 0).sum())
        repeated = int((counts[epoch] > 1).sum())
        if missing or repeated:
            faults.append(f"epoch {epoch}: {missing} samples missing, {repeated} trained twice")
    return faults


def applied_spans(history: History, applied: Iterable[int]) -> Iterator[Span]:
    """Yield the stretches of the submissions that are in the weights."""
    for place in applied:
        yield from history.attempts[place].spans


def find_version_faults(versions: Sequence[int]) -> list[str]:
    """Check that each version is the one before plus one."""
    pairs = itertools.pairwise(versions)
    return [f"version {after} follows {before}" for before, after in pairs if after != before + 1]


# ---------------------------------------------------------------- merges, as they happen


class Merge(NamedTuple):
    """A version that was made."""

    version: int  # before it
    nodes: tuple[int, ...]
    staleness: tuple[int, ...]
    marks: tuple[int, ...]  # of light clients


class WatchedRule:
    """A rule that notes what it merges."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self.has_barrier, self.has_window = rule.has_barrier, rule.has_window
        self.needs_base = rule.needs_base
        self.merges: list[Merge] = []

    def is_complete(self, pending: Sequence[Submission[Any]], live: Sequence[int]) -> bool:
        return self._rule.is_complete(pending, live)

    def merge(self, world: World[Any], pending: Sequence[Submission[Any]]) -> Merged[Any]:
        marks = [int(p) for s in pending for p in s.increment.nonzero().flatten().tolist()[:1]]
        self.merges.append(
            Merge(
                version=world.version,
                nodes=tuple(s.node for s in pending),
                staleness=tuple(world.staleness(s) for s in pending),
                marks=tuple(marks),
            )
        )
        return self._rule.merge(world, pending)

    def find_faults(self, bound: int | None = None) -> list[str]:
        """Check that versions rise by one, and no submission missed more than may be."""
        faults = find_version_faults([merge.version for merge in self.merges])
        if bound is not None:
            worst = max((s for merge in self.merges for s in merge.staleness), default=0)
            if worst > bound:
                faults.append(f"staleness {worst} is above the bound {bound}")
        twice = Counter(mark for merge in self.merges for mark in merge.marks)
        faults += [f"mark {mark} was merged {n} times" for mark, n in twice.items() if n > 1]
        return faults


def watch(server: ParameterServer) -> WatchedRule:
    """Have a server's rule note what it merges."""
    merger = server._merger
    watched = WatchedRule(merger._rule)
    merger._rule = watched
    return watched


# ---------------------------------------------------------------- the record, told again


class Applied(NamedTuple):
    """A submission that the record says was taken into the weights."""

    node: int
    incarnation: str
    number: int
    staleness: int
    spans: tuple[Span, ...]


@dataclass(eq=False)
class Story:
    """What a record tells.

    Attributes:
        applied: in the weights at the end, in order.
        lost: applied, and then lost with a service that was killed.
        behind: submissions that were recorded and told to begin anew.
        versions: told by the lines that name one; of the last life of the service.
    """

    applied: list[Applied] = field(default_factory=list)
    lost: list[Applied] = field(default_factory=list)
    behind: int = 0
    restarts: int = 0
    version: int = 0
    done: int = 0
    merges: list[Merge] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def find_faults(self, samples: int, epochs: int, *, bound: int | None = None) -> list[str]:
        """Check everything that a record of a run that is over can prove."""
        faults = list(self.faults)
        identities = Counter((a.node, a.incarnation, a.number) for a in self.applied)
        faults += [f"{identity} applied {n} times" for identity, n in identities.items() if n > 1]
        spans = [span for applied in self.applied for span in applied.spans]
        faults += find_sample_faults(spans, samples, epochs)
        worst = max((a.staleness for a in self.applied), default=0)
        if bound is not None and worst > bound:
            faults.append(f"staleness {worst} is above the bound {bound}")
        return faults


class _NotedWork:
    """Work that notes which stretches are finished; all else is the work's own."""

    def __init__(self, work: Work, note: Callable[[int, tuple[Span, ...]], None]) -> None:
        self._work, self._note = work, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def finish(self, node: int, order: Order, busy_s: float, exchange_s: float) -> int:
        before = self._outstanding(node)
        samples = self._work.finish(node, order, busy_s, exchange_s)
        for span in self._outstanding(node):
            before.remove(span)
        self._note(node, tuple(before))
        return samples

    def _outstanding(self, node: int) -> list[Span]:
        stream = getattr(self._work, "_stream", None)  # held samples are passed over many times
        return list(stream._out.get(node, [])) if stream is not None else []


class _Teller:
    """Feeds a record to a server without wires, whose vector is a single 0."""

    def __init__(self, make: Callable[[Tensor, int], ParameterServer]) -> None:
        self._make = make
        self.story = Story()
        self._saved: list[tuple[int, Any, list[Applied]]] = []
        self._server: ParameterServer | None = None

    def _begin(self, done: int) -> ParameterServer:
        server = self._make(torch.zeros(1), done)
        server._work = _NotedWork(server._work, self._note)
        self._rule = watch(server)
        return server

    def _note(self, node: int, spans: tuple[Span, ...]) -> None:
        assert self._server is not None
        member = self._server.members[node]
        self.story.applied.append(
            Applied(node, member.incarnation, member.number, member.staleness, spans)
        )

    def tell(self, line: Mapping[str, Any]) -> None:
        kind = line["event"]
        if kind in ("start", "restart"):
            self._restart(line)
            return
        server = self._server
        assert server is not None, "the record does not begin with a start"
        match kind:
            case "admit":
                server.admit(line["node"], line["incarnation"], line["speed"], line["now"])
            case "remove":
                server.remove(line["node"], line["incarnation"], line["now"])
            case "pull":
                server.pull(line["node"], line["incarnation"], line["last"], line["now"])
            case "submit":
                self._submit(server, line)
            case "tick":
                server.tick(line["now"])
            case "saved":
                self._save(server, line)

    def _submit(self, server: ParameterServer, line: Mapping[str, Any]) -> None:
        vector, report = torch.zeros(1), Report(**line["report"])
        who = (line["node"], line["incarnation"], line["number"])
        try:
            server.submit(*who, line["base"], vector, report, line["now"])
        except BehindError:
            self.story.behind += 1

    def _save(self, server: ParameterServer, line: Mapping[str, Any]) -> None:
        if server.version != line["version"]:
            told = f"the record is at version {server.version}, the service saved {line['version']}"
            self.story.faults.append(told)
        state = copy.deepcopy(server.state())
        self._saved.append((line["state"], state, list(self.story.applied)))

    def _restart(self, line: Mapping[str, Any]) -> None:
        """Go on from the newest state that the service can have gone on from."""
        self._end_life()
        before = self.story.applied
        server = self._begin(0 if line["event"] == "restart" else line["done"])
        self.story.applied = []
        if line["event"] == "restart":
            found = [s for s in self._saved if s[0] == line["state"]]
            if not found:
                self.story.faults.append(f"nothing was saved that fits {dict(line)}")
            else:
                _, (tensors, values), applied = found[-1]
                server.restore(tensors, values)
                self.story.applied = list(applied)
        if self._server is not None:
            self.story.restarts += 1
            kept = Counter(self.story.applied)
            self.story.lost += list((Counter(before) - kept).elements())
        self._server = server

    def _end_life(self) -> None:
        if self._server is not None:
            self.story.faults += self._rule.find_faults()
            self.story.merges += self._rule.merges
            self.story.version, self.story.done = self._server.version, self._server.done

    def end(self) -> Story:
        self._end_life()
        return self.story


def story_of(run: Path, samples: int) -> Story:
    """Tell the record of a whole run again, as its folder holds it."""
    config = config_of_nodes(Config(**read_toml(run / "config.toml")))
    nodes = next(read_record(run / "record.jsonl"))["nodes"]

    def make(vector: Tensor, done: int) -> ParameterServer:
        return make_server(config, vector, vector.numel(), samples, nodes, done)

    return retell(run / "record.jsonl", make)


def retell(path: Path, make: Callable[[Tensor, int], ParameterServer]) -> Story:
    """Tell a record again; `make` returns a server as the run's own was at its start."""
    teller = _Teller(make)
    for line in read_record(path):
        teller.tell(line)
    return teller.end()
