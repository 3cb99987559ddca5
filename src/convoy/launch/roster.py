"""The lead's list of nodes: who is there, in what state, and what each has done."""

from dataclasses import dataclass, field
from typing import Any, Literal

from convoy.launch.service import Connection

# A node that was called back in vain is left alone for twice as long each time.
_REST_S, _REST_AT_MOST_S = 15.0, 600.0

State = Literal["joining", "ready", "training", "aside", "silent", "gone"]


@dataclass(eq=False)
class NodeRecord:
    """One node of a run, as its lead knows it.

    Attributes:
        number: in the run, from 0; people see it from 1.
        identity: unique for each start of the node's process.
        slot: which of the lead's own nodes it is; -1: one from elsewhere.
        speed: samples per second.
        probed: the same, measured with an equal share of a batch before it trained.
        share: of the last batch.
        samples, busy_s, waiting_s: over the whole run.
        faults: how often it was lost.
        sent_away: how often it was told to stand aside.
        rests_until: it is not called back before.
    """

    number: int
    identity: str
    name: str
    slot: int
    pid: int
    connection: Connection | None
    heard_at: float
    state: State = "joining"
    device: str = ""
    threads: int = 0
    speed: float = 0.0
    probed: float = 0.0
    share: int = 0
    samples: int = 0
    busy_s: float = 0.0
    waiting_s: float = 0.0
    faults: int = 0
    why: str = ""
    sent_away: int = 0
    rests_until: float = 0.0

    @property
    def label(self) -> str:
        """Return what people call it."""
        return f"node {self.number + 1}"

    @property
    def is_here(self) -> bool:
        """Tell whether it is connected and takes or could take part."""
        return self.state not in ("gone", "silent")

    def rest(self, now: float) -> None:
        """Note that it stands aside: it is left in peace for a while, and longer every time."""
        self.rests_until = now + min(_REST_S * 2**self.sent_away, _REST_AT_MOST_S)
        self.sent_away += 1

    def summary(self) -> dict[str, Any]:
        """Return what the run's summary says of it."""
        total = self.busy_s + self.waiting_s
        return {
            "node": self.number + 1,
            "name": self.name,
            "device": self.device,
            "state": self.state,
            "speed": round(self.speed, 1),
            "samples": self.samples,
            "waiting": round(self.waiting_s / total, 4) if total else 0.0,
            "faults": self.faults,
            "reason": self.why,
        }


@dataclass(eq=False)
class Roster:
    """All nodes that were ever part of a run."""

    records: list[NodeRecord] = field(default_factory=list)
    exchange_s: float = 0.0

    def add(self, record: NodeRecord) -> None:
        """Take in a node."""
        self.records.append(record)

    def by_connection(self, connection: Connection) -> NodeRecord | None:
        """Return the node that speaks by a connection."""
        return next((r for r in self.records if r.connection is connection), None)

    def by_slot(self, slot: int) -> NodeRecord | None:
        """Return the node that last held one of the lead's own slots."""
        return next((r for r in reversed(self.records) if r.slot == slot), None)

    def by_number(self, number: int) -> NodeRecord | None:
        """Return the node that last had a number."""
        return next((r for r in reversed(self.records) if r.number == number), None)

    def in_state(self, *states: State) -> list[NodeRecord]:
        """Return the nodes in some states."""
        return [record for record in self.records if record.state in states]

    def next_number(self, slot: int, name: str) -> int:
        """Return the number of a node that joins: its old one, if it was here before."""
        here = {r.number for r in self.records if r.state != "gone"}
        for record in reversed(self.records):
            same = record.slot == slot if slot >= 0 else record.name == name and record.slot < 0
            if same and record.number not in here:
                return record.number
        if slot >= 0 and slot not in {r.number for r in self.records}:
            return slot
        return max([r.number for r in self.records], default=-1) + 1

    def latest(self) -> list[NodeRecord]:
        """Return one record for each number, with the sums of all its starts."""
        merged: dict[int, NodeRecord] = {}
        for record in self.records:
            before = merged.get(record.number)
            copy = NodeRecord(**{k: getattr(record, k) for k in record.__dataclass_fields__})
            if before is not None:
                for name in ("samples", "busy_s", "waiting_s", "faults"):
                    setattr(copy, name, getattr(copy, name) + getattr(before, name))
                copy.speed = copy.speed or before.speed
                copy.probed = copy.probed or before.probed
            merged[record.number] = copy
        return [merged[number] for number in sorted(merged)]


def summarise_nodes(roster: Roster) -> dict[str, Any]:
    """Return what the run's summary says of its nodes."""
    records = roster.latest()
    total = sum(record.samples for record in records) or 1
    busy = sum(record.busy_s for record in records)
    waiting = sum(record.waiting_s for record in records)
    return {
        "nodes": len(records),
        "shares": [round(record.samples / total, 4) for record in records],
        "speeds": [round(record.speed, 1) for record in records],
        "idle_fraction": round(waiting / (busy + waiting), 4) if busy + waiting else 0.0,
        "faults": sum(record.faults for record in records),
        "exchange_s": round(roster.exchange_s, 5),
        "equal_shares_slowdown": equal_shares_slowdown(records),
        "node_table": [record.summary() for record in records],
    }


def equal_shares_slowdown(records: list[NodeRecord]) -> float | None:
    """Return how much longer the same training would have taken with equal shares.

    Then all nodes work at the pace of the slowest. Its probe has shown that, with an equal share
    of a batch; a probe may be unlucky, so that it counts for no less than the speed in training.
    """
    trained = sum(record.samples for record in records)
    took_s = max((record.busy_s + record.waiting_s for record in records), default=0.0)
    paces = [max(r.probed, r.samples / r.busy_s if r.busy_s else 0.0) for r in records]
    slowest = min(paces, default=0.0)
    if not trained or took_s <= 0 or slowest <= 0:
        return None
    equally_s = trained / (len(records) * slowest)
    return round(equally_s / took_s, 3)
