"""What happens in a run, as one typed stream that files, terminals and pages read alike."""

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened; `kind` is its name in files."""

    kind: ClassVar[str]


@dataclass(frozen=True, kw_only=True)
class StartEvent(Event):
    """Training starts or goes on."""

    kind: ClassVar[str] = "start"
    model: str
    parameters: int
    data: str
    train_samples: int
    test_samples: int
    epochs: int
    batch: int
    strategy: str
    executor: str
    device: str
    precision: str
    memory_format: str
    threads: int
    nodes: int = 1
    from_step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    """How training stands, once per interval; loss and accuracy are of the epoch so far."""

    kind: ClassVar[str] = "step"
    epoch: int
    step: int
    steps: int
    samples: int
    loss: float
    accuracy: float
    samples_per_s: float
    learning_rate: float


@dataclass(frozen=True, kw_only=True)
class EvaluationEvent(Event):
    """An epoch is over and the network was tested."""

    kind: ClassVar[str] = "evaluation"
    epoch: int
    samples: int
    seconds: float
    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float
    samples_per_s: float


@dataclass(frozen=True, kw_only=True)
class CheckpointEvent(Event):
    """A checkpoint is complete on disk."""

    kind: ClassVar[str] = "checkpoint"
    path: str
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class JoinEvent(Event):
    """A node is there and wants to take part."""

    kind: ClassVar[str] = "join"
    node: int
    name: str
    pid: int
    device: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class LeaveEvent(Event):
    """A node is gone, or stands aside (`aside`); `fault` where it did not mean to."""

    kind: ClassVar[str] = "leave"
    node: int
    fault: bool
    reason: str
    aside: bool = False


@dataclass(frozen=True, kw_only=True)
class GroupEvent(Event):
    """The nodes that train together from here on, and how long training stood still for it."""

    kind: ClassVar[str] = "group"
    quorum: int
    step: int
    nodes: list[int]
    pause_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class SharesEvent(Event):
    """Nodes were given other shares of the work.

    Attributes:
        of: what is shared: the samples of a batch, or in a pipeline the network's weight layers.
    """

    kind: ClassVar[str] = "shares"
    step: int
    nodes: list[int]
    shares: list[int]
    speeds: list[float]
    reason: str
    of: str = "samples"


@dataclass(frozen=True, kw_only=True)
class NodesEvent(Event):
    """How the nodes of a group did since the last such event.

    Attributes:
        samples: samples each node trained.
        busy_s: seconds each node spent on its own work.
        waiting_s: seconds each node waited for the others and for the exchange.
        exchange_s: what the exchange costs a step, besides waiting for others.
    """

    kind: ClassVar[str] = "nodes"
    step: int
    nodes: list[int]
    speeds: list[float]
    shares: list[int]
    samples: list[int]
    busy_s: list[float]
    waiting_s: list[float]
    exchange_s: float


@dataclass(frozen=True, kw_only=True)
class StalenessEvent(Event):
    """How stale the weights were that submissions were computed with, since the last such event.

    Attributes:
        counts: submissions of staleness 0, 1, ...; the last place counts all that were staler.
        nodes, latest: the staleness of each node's last submission.
    """

    kind: ClassVar[str] = "staleness"
    step: int
    counts: list[int]
    nodes: list[int]
    latest: list[int]


@dataclass(frozen=True, kw_only=True)
class RefusedEvent(Event):
    """Submissions were refused; `count` is over the run so far, for this cause."""

    kind: ClassVar[str] = "refused"
    cause: str
    count: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class PausedEvent(Event):
    """Training stands still until something changes."""

    kind: ClassVar[str] = "paused"
    reason: str


@dataclass(frozen=True, kw_only=True)
class TimelineEvent(Event):
    """What ran when: one step's tasks on threads, or one cycle's jobs on the stages of a pipeline.

    Attributes:
        of: "step" or "cycle".
        rows: names of the threads or stages.
        spans: each as [row, start in s, end in s, label, kind, 1 where it is on the critical path].
        makespan_s: from the first start to the last end.
        bound_s: no schedule could be shorter.
        balance: the mean row's work as a part of the busiest one's.
    """

    kind: ClassVar[str] = "timeline"
    of: str
    step: int
    rows: list[str]
    spans: list[list[Any]]
    makespan_s: float
    bound_s: float
    balance: float


@dataclass(frozen=True, kw_only=True)
class LedgerEvent(Event):
    """Committed updates, for the ledger; each as [step, epoch, start, stop, quorum, shares]."""

    kind: ClassVar[str] = "ledger"
    updates: list[list[Any]]


@dataclass(frozen=True, kw_only=True)
class NoteEvent(Event):
    """Something worth knowing."""

    kind: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True, kw_only=True)
class WarningEvent(Event):
    """Something is wrong that does not stop the run."""

    kind: ClassVar[str] = "warning"
    reason: str


@dataclass(frozen=True, kw_only=True)
class EndEvent(Event):
    """The run is over, for a reason."""

    kind: ClassVar[str] = "end"
    state: str
    reason: str


class Sink(Protocol):
    """Receives every event."""

    def receive(self, event: Event, when: float) -> None:
        """Take an event that happened at a Unix time."""
        ...

    def close(self) -> None:
        """Finish; no event follows."""
        ...


class EventStream:
    """Hands each event to every sink."""

    def __init__(self, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)

    def emit(self, event: Event) -> None:
        """Hand an event on, with the time of now."""
        now = time.time()
        for sink in self._sinks:
            sink.receive(event, now)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


KINDS: dict[str, type[Event]] = {kind.kind: kind for kind in Event.__subclasses__()}


def from_record(record: dict[str, Any]) -> Event:
    """Read what `as_record` wrote; a record of another form is refused with a ValueError."""
    try:
        values = {key: value for key, value in record.items() if key not in ("event", "time")}
        return KINDS[record["event"]](**values)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"this is no event: {error}") from None


def as_record(event: Event, when: float) -> dict[str, Any]:
    """Return an event as the plain values that are written to files."""
    return {"event": event.kind, "time": round(when, 3), **dataclasses.asdict(event)}
