"""A run as its events show it: everything a page, a report or a terminal wants to know.

Events are folded in one by one, in constant time and bounded memory. Nothing here asks a clock or
reads a file, so the same events always give the same view. docs/monitor.md lists what is in it.
"""

import contextlib
import json
import math
from collections import deque
from typing import Any

from convoy.monitor.events import (
    CheckpointEvent,
    EndEvent,
    EvaluationEvent,
    Event,
    GroupEvent,
    JoinEvent,
    LeaveEvent,
    NodesEvent,
    PausedEvent,
    RefusedEvent,
    SharesEvent,
    StalenessEvent,
    StartEvent,
    StepEvent,
    TimelineEvent,
    from_record,
)
from convoy.monitor.node_view import NodeView
from convoy.monitor.series import Series
from convoy.monitor.waits import Waits
from convoy.monitor.wording import level, sentence

VERSION = 1
_LOG_ENTRIES = 500
_REASONS_KEPT = 50
_SMOOTHING = 0.3  # of the speed that the time left is worked out from
_FACTS = (
    *("model", "parameters", "data", "train_samples", "test_samples", "epochs", "batch"),
    *("strategy", "executor", "device", "precision", "memory_format", "threads"),
)
_OF_STEP = ("samples", "loss", "accuracy", "samples_per_s", "learning_rate")
_OF_EPOCH = ("samples", "epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy")
_OF_TESTS = ("test_loss", "test_accuracy", "best_test_accuracy")


class RunView:
    """The present state of one run.

    Attributes:
        number: rises with every change.
        series: curves, by name.
        log: the newest entries, oldest first.
    """

    def __init__(self, name: str) -> None:
        self.number = 0
        self.series = {
            "train": Series(("time", *_OF_STEP)),
            "test": Series(("time", *_OF_EPOCH)),
            **{kind: Series(("time",)) for kind in ("speed", "predicted", "real", "waiting")},
        }
        self.log: deque[dict[str, Any]] = deque(maxlen=_LOG_ENTRIES)
        self._run: dict[str, Any] = {"name": name, "state": "waiting", "reason": "not started yet"}
        self._run |= dict.fromkeys((*_FACTS, "started", "updated", "ended"))
        self._progress: dict[str, Any] = dict.fromkeys(
            ("epoch", "epochs", "step", "steps", "total_samples", *_OF_STEP, "left_s", *_OF_TESTS)
        )
        self._progress["fraction"] = 0.0
        self._nodes: dict[int, NodeView] = {}
        self._waits = Waits()
        self._staleness: list[int] = []
        self._refused: dict[str, int] = {}
        self._timeline: dict[str, Any] | None = None
        self._counts = dict.fromkeys(("events", "faults", "joins", "leaves", "checkpoints"), 0)
        self._dead_s = 0.0  # between an end and the start that went on
        self._pace = 0.0

    # ---------------------------------------------------------------- reading

    def snapshot(self) -> dict[str, Any]:
        """Return everything, as plain values."""
        series = {
            name: {"generation": one.generation, "columns": one.tail(0)}
            for name, one in self.series.items()
        }
        return {"version": VERSION, **self.sections(), "series": series, "log": list(self.log)}

    def sections(self) -> dict[str, Any]:
        """Return everything that is no curve and no log."""
        found = {
            "run": {**self._run, "elapsed_s": self._elapsed()},
            "progress": dict(self._progress),
            "nodes": self.nodes(),
            "waits": [
                {"node": node, "for": whom, "seconds": round(seconds, 3)}
                for (node, whom), seconds in sorted(self._waits.seconds.items())
            ],
            "staleness": self._staleness_section(),
            "refused": [{"reason": why, "count": count} for why, count in self._refused.items()],
            "counts": dict(self._counts),
        }
        return {name: _finite(section) for name, section in found.items()} | {
            "timeline": self._timeline
        }

    def nodes(self) -> list[dict[str, Any]]:
        """Return what is known of each node."""
        return [self._node_section(self._nodes[number]) for number in sorted(self._nodes)]

    def _elapsed(self) -> float:
        return round(self._since_start(self._run["updated"]), 3) if self._run["updated"] else 0.0

    def _node_section(self, node: NodeView) -> dict[str, Any]:
        return {
            **node.section(),
            "costs_s": round(self._waits.costs.get(node.node, 0.0), 3),
            "makes_wait_s": round(self._waits.made_others_wait(node.node), 3),
        }

    def _staleness_section(self) -> dict[str, Any] | None:
        counts, total = self._staleness, sum(self._staleness)
        if not total:
            return None
        mean = sum(staleness * count for staleness, count in enumerate(counts)) / total
        return {"counts": counts, "mean": round(mean, 3)}

    # ---------------------------------------------------------------- folding events in

    def take_line(self, line: bytes) -> None:
        """Take in a line of `events.jsonl`, or what a killed process has left of one."""
        with contextlib.suppress(ValueError, RecursionError):  # the rest is still worth showing
            record = json.loads(line)
            if isinstance(record, dict):
                self.take(record)

    def take(self, record: dict[str, Any]) -> None:
        """Take in an event as `as_record` wrote it; what cannot be understood is passed over."""
        try:
            event, when = from_record(record), float(record["time"])
            if math.isfinite(when):
                self._take(event, when)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            pass  # of a later version, or damaged: the rest is still worth showing
        self.number += 1

    @property
    def is_over(self) -> bool:
        """Tell whether the run has ended, or is gone."""
        return self._run["ended"] is not None or self._run["state"] == "gone"

    def mark_gone(self, reason: str) -> None:
        """Take in that no process works on the run, although it has not told of an end."""
        if not self.is_over:
            self._run |= {"state": "gone", "reason": reason}
            self.number += 1

    def _take(self, event: Event, when: float) -> None:
        if isinstance(event, StartEvent):
            self._note_start(event, when)
        self._run["updated"] = when
        match event:
            case StepEvent():
                self._note_step(event, when)
            case EvaluationEvent():
                self._note_evaluation(event, when)
            case NodesEvent():
                self._note_nodes(event, when)
            case EndEvent():
                self._note_end(event, when)
            case PausedEvent():
                self._run |= {"state": "paused", "reason": event.reason}
            case TimelineEvent():
                self._timeline = _finite({**vars(event), "kind": event.of})
            case _:
                self._note_membership(event, when)
        self._note_in_log(event, when)
        self._counts["events"] += 1

    def _note_membership(self, event: Event, when: float) -> None:
        match event:
            case JoinEvent():
                self._node(event.node).join(event, when)
                self._counts["joins"] += 1
            case LeaveEvent():
                state = "lost" if event.fault else "aside" if event.aside else "left"
                self._node(event.node).leave(state, event.reason)
                self._counts["faults"] += event.fault
                self._counts["leaves"] += not event.aside
            case GroupEvent():
                self._note_running()
                for number in event.nodes:
                    self._node(number).train(when)
            case SharesEvent():
                self._note_shares(event)
            case StalenessEvent():
                self._note_staleness(event)
            case RefusedEvent():
                if event.cause in self._refused or len(self._refused) < _REASONS_KEPT:
                    self._refused[event.cause] = event.count
            case CheckpointEvent():
                self._counts["checkpoints"] += 1
            case _:
                pass  # said in the log, if at all

    def _note_start(self, event: StartEvent, when: float) -> None:
        if self._run["started"] is None:
            self._run["started"] = when
        elif self._run["updated"] is not None:
            self._dead_s += max(0.0, when - self._run["updated"])
        facts = {name: getattr(event, name) for name in _FACTS}
        self._run |= {**facts, "state": "running", "reason": event.reason, "ended": None}
        self._progress |= {
            "epochs": event.epochs,
            "total_samples": event.epochs * event.train_samples,
        }
        self._nodes.clear()  # those of a run that goes on report themselves anew
        if event.strategy == "single":
            alone = NodeView(0, "this node", device=event.device, joined=when)
            alone.share = alone.predicted_share = 1.0
            alone.train(when)
            self._nodes[0] = alone

    def _note_end(self, event: EndEvent, when: float) -> None:
        self._run |= {"state": event.state, "reason": event.reason, "ended": when}
        self._progress["left_s"] = None
        for node in self._nodes.values():
            if node.is_here:
                node.state = "done"

    def _note_running(self) -> None:
        if self._run["state"] in ("paused", "gone"):
            self._run |= {"state": "running", "reason": "training goes on"}

    def _note_step(self, event: StepEvent, when: float) -> None:
        self._note_running()
        values = {name: getattr(event, name) for name in _OF_STEP}
        self.series["train"].append(_finite({"time": self._since_start(when), **values}))
        speed = event.samples_per_s
        self._pace = self._pace + _SMOOTHING * (speed - self._pace) if self._pace else speed
        self._progress |= {
            **values,
            "epoch": event.epoch,
            "step": event.step,
            "steps": event.steps,
        }
        self._note_samples(event.samples)
        if self._run["strategy"] == "single":
            alone = self._nodes[0]
            alone.train(when)
            alone.speed, alone.samples = speed, event.samples
            self.series["speed"].append(_finite({"time": self._since_start(when), "0": speed}))

    def _note_samples(self, samples: int) -> None:
        total = self._progress["total_samples"] or 0
        self._progress["samples"] = samples
        self._progress["fraction"] = min(1.0, samples / total) if total else 0.0
        left = max(0, total - samples)
        self._progress["left_s"] = round(left / self._pace, 1) if self._pace else None

    def _note_evaluation(self, event: EvaluationEvent, when: float) -> None:
        values = {name: getattr(event, name) for name in _OF_EPOCH}
        self.series["test"].append(_finite({"time": self._since_start(when), **values}))
        best = self._progress["best_test_accuracy"]
        self._progress |= {
            "epoch": event.epoch,
            "test_loss": event.test_loss,
            "test_accuracy": event.test_accuracy,
            "best_test_accuracy": max(event.test_accuracy, best or 0.0),
        }
        self._note_samples(event.samples)

    def _note_nodes(self, event: NodesEvent, when: float) -> None:
        self._note_running()
        trained, speed = sum(event.samples) or 1, sum(event.speeds) or 1.0
        rows: dict[str, dict[str, float | None]] = {
            kind: {"time": self._since_start(when)}
            for kind in ("speed", "predicted", "real", "waiting")
        }
        for j, number in enumerate(event.nodes):
            node, name = self._node(number), str(number)
            real, predicted = event.samples[j] / trained, event.speeds[j] / speed
            if node.is_here:  # else this is about the time before it went
                node.train(when)
                node.speed, node.share, node.predicted_share = event.speeds[j], real, predicted
            node.samples += event.samples[j]
            node.busy_s += event.busy_s[j]
            node.waiting_s += event.waiting_s[j]
            spent = event.busy_s[j] + event.waiting_s[j]
            rows["speed"][name] = event.speeds[j]
            rows["real"][name], rows["predicted"][name] = real, predicted
            rows["waiting"][name] = event.waiting_s[j] / spent if spent else 0.0
        for kind, row in rows.items():
            self.series[kind].append(_finite(row))
        if self._run["strategy"] == "lockstep":  # elsewhere nobody waits for anyone's step
            self._waits.note(dict(zip(event.nodes, event.busy_s, strict=True)))

    def _note_shares(self, event: SharesEvent) -> None:
        speed, batch = sum(event.speeds) or 1.0, sum(event.shares) or 1
        for number, share, pace in zip(event.nodes, event.shares, event.speeds, strict=True):
            node = self._node(number)
            node.share, node.predicted_share = share / batch, pace / speed

    def _note_staleness(self, event: StalenessEvent) -> None:
        longer = len(event.counts) - len(self._staleness)
        self._staleness += [0] * longer
        for staleness, count in enumerate(event.counts):
            self._staleness[staleness] += count
        for number, latest in zip(event.nodes, event.latest, strict=True):
            self._node(number).staleness = latest

    def _note_in_log(self, event: Event, when: float) -> None:
        text = sentence(event)
        if text is None:
            return
        node = getattr(event, "node", None)
        entry = {"number": self._counts["events"], "time": when, "event": event.kind, "node": node}
        self.log.append(_finite({**entry, "level": level(event), "text": text}))

    def _node(self, number: int) -> NodeView:
        return self._nodes.setdefault(number, NodeView(number, f"node {number + 1}"))

    def _since_start(self, when: float) -> float:
        started = self._run["started"]
        return round(when - started - self._dead_s, 3) if started is not None else 0.0


def _finite(value: Any) -> Any:  # noqa: ANN401 - plain values of any shape
    """Return values with None for what is no number: JSON has no word for it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
