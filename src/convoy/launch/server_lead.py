"""The lead of a run with a parameter service: starts it, names its nodes, tests what it holds.

Training asks the service, not the lead. The lead looks at how the run stands, tests the weights
of every epoch while training goes on, and writes the checkpoints.
"""

import json
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import torch
from torch import nn

from convoy.data.card import DataCard
from convoy.errors import ConvoyError
from convoy.launch import wire_pb2 as wire
from convoy.launch.lead import Lead
from convoy.launch.parameters.process import ServiceLostError, ServiceOrder
from convoy.launch.parameters.services import Services
from convoy.launch.roster import NodeRecord, summarise_nodes
from convoy.launch.samples import SampleServer
from convoy.launch.server_node import EVERYTHING_IS_TRAINED
from convoy.monitor.events import (
    NodesEvent,
    RefusedEvent,
    StalenessEvent,
    StepEvent,
    WarningEvent,
)
from convoy.outer.crew import Crew
from convoy.outer.flat import Flat
from convoy.outer.job import Job
from convoy.outer.single import close_epoch, evaluate, reason_to_end

_LOOK_EVERY_S = 0.2
_LEAVE_PATIENCE_S = 6.0  # for nodes to hand in their last, when a run is stopped
_TYPICAL = 2048  # samples that statistics are measured on, where nodes keep their own
_REVIVALS_AT_MOST = 100
_STALENESS_PLACES = 65  # 0 to 63, and all that is staler


def lead_server(job: Job, crew: Crew) -> str:
    """Lead a run with a parameter service to its end; return in words why it ended."""
    with ExitStack() as stack:
        return ServerLead(job, crew, stack).run()


@dataclass(frozen=True, eq=False)
class _Standing:
    """How the service says that the run stands."""

    values: dict[str, Any]


@dataclass(frozen=True, eq=False)
class _Tested:
    """What a test of the weights gave, or what went wrong."""

    epoch: int
    loss: float = 0.0
    accuracy: float = 0.0
    problem: str = ""


class ServerLead(Lead):
    """Leads one run with a parameter service."""

    def _begin(self, stack: ExitStack) -> None:
        """Start the parameter service."""
        job, crew = self._job, self._crew
        self._flat = Flat(job.model, statistics=job.config.norms == "average")
        self._run = secrets.token_hex(8)
        folder = crew.ledger.parent
        self._samples = SampleServer(job.data, lambda _: None)  # the door has checked the token
        self._service = Services(
            ServiceOrder(
                config=job.config,
                run=self._run,
                vector=self._flat.read(),
                weights=self._flat.weights,
                model=self._flat.digest,
                samples=len(job.data.train),
                nodes=max(1, crew.expect),
                done=job.progress.samples,
                folder=folder / "service",
                record=folder / "record.jsonl",
                tokens=(crew.serving.token, secrets.token_hex(32)),
                host=self._host,
                tls=crew.serving.tls,
            ),
            job.config.servers,
        )
        stack.callback(self._service.end)
        self._service.open()
        self._standing: dict[str, Any] = {}
        self._testing = False
        self._is_trained = False  # nodes have heard that there is nothing left to do
        self._gives_work = True  # the service does; not while there are too few nodes
        self._epoch_sums = (0.0, 0, 0)
        self._looked_at = time.monotonic()
        self._told_at: float | None = None
        self._told_done = job.progress.samples
        self._told: dict[str, dict[str, float]] = {}
        self._refused: dict[str, int] = {}
        self._ended = threading.Event()
        stack.callback(self._ended.set)
        job.describe_nodes = self._describe
        threading.Thread(target=self._look, name="standing", daemon=True).start()

    def _handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        """Hand out samples to nodes that do not have the data set."""
        return (self._samples.handler(),)

    def _directions(self) -> dict[str, Any]:
        """Return where the service is, and what the data set is like."""
        card = DataCard.of(self._job.data).as_dict()
        return {
            "service": self._service.address,
            "run": self._run,
            "data_card": json.dumps(card),
        }

    def _describe(self) -> dict[str, Any]:
        totals = self._standing.get("totals", {})
        submissions = totals.get("submissions", 0)
        return {
            **summarise_nodes(self._roster),
            "equal_shares_slowdown": None,
            "staleness_mean": round(totals["staleness"] / submissions, 3) if submissions else 0.0,
            "submissions": submissions,
            "duplicates": totals.get("duplicates", 0),
            "refused": self._standing.get("refused", {}),
            "service_restarts": self._service.restarts,
            "weight_bytes": self._standing.get("moved_bytes", 0),
            "sample_bytes": self._samples.sent_bytes,
        }

    # ------------------------------------------------------------ nodes

    def _call_together(self) -> None:
        for node in self._roster.in_state("ready"):
            self._let_in(node)

    def _let_in(self, node: NodeRecord) -> None:
        """Name a node to the service, and let it begin."""
        with suppress(ServiceLostError):  # it is named again when the service is back
            self._service.admit(node.number, node.identity, node.speed, node.threads)
        node.state = "training"
        if node.connection is not None:
            node.connection.tell(form=wire.Nothing())

    def _note_lost(self, node: NodeRecord) -> None:
        """Have the service refuse what still comes from a node, and hand its work out again."""
        with suppress(ServiceLostError):
            self._service.remove(node.number, node.identity)

    def _see_off(self, node: NodeRecord, leaving: wire.Leaving) -> None:
        super()._see_off(node, leaving)
        self._note_lost(node)

    def _note_done(self, node: NodeRecord, done: wire.Done) -> None:
        super()._note_done(node, done)
        self._note_lost(node)
        self._is_trained = self._is_trained or done.reason == EVERYTHING_IS_TRAINED

    def _watch_numbers(self) -> None:
        """Wait where there are too few nodes, unless there is nothing left to train."""
        if not self._is_trained and not self._stopping:
            super()._watch_numbers()
        self._give_work(not self._told_paused or self._is_trained or self._stopping)

    def _present(self) -> list[NodeRecord]:
        """Return the nodes that are connected; once training has begun, those that train."""
        return self._roster.in_state("training") if self._formed else super()._present()

    def _give_work(self, gives: bool) -> None:
        """Have the service hand out work, or none until further notice."""
        if gives == self._gives_work:
            return
        with suppress(ServiceLostError):  # it is told at the next look, when it is back
            if gives:
                self._service.open()
            else:
                self._service.pause()
            self._gives_work = gives

    def _watch_silence(self) -> None:
        """Lose nodes that give no sign of life: whatever they still do is refused."""
        limit = time.monotonic() - self._job.config.node_timeout_s
        for node in self._roster.in_state("training", "ready"):
            if node.heard_at < limit:
                self._lose(node, "it gives no sign of life")

    # ------------------------------------------------------------ the service

    def _watch(self) -> None:
        how = self._service.revive()
        if how is not None:
            self._note_revival(how)
        if self._stopping:
            self._watch_leaving()

    def _note_revival(self, how: str) -> None:
        if self._service.restarts > _REVIVALS_AT_MOST:
            raise ConvoyError(f"the parameter service died too often; last it was {how}")
        reason = f"the parameter service was {how}; it goes on from version {self._service.version}"
        self._job.events.emit(WarningEvent(reason=reason))
        for name in self._service.damaged:
            self._job.events.emit(WarningEvent(reason=f"passed over a damaged state: {name}"))
        with suppress(ServiceLostError):
            for node in self._roster.in_state("training"):
                self._service.admit(node.number, node.identity, node.speed, node.threads)
            if self._gives_work:
                self._service.open()

    def _look(self) -> None:
        """Ask how the run stands, again and again; a thread, so that nobody waits for it."""
        while not self._ended.wait(_LOOK_EVERY_S):
            try:
                self._inbox.put(_Standing(self._service.standing()))
            except (ServiceLostError, ValueError):  # it is being started again
                continue

    def _take(self, item: Any) -> None:  # noqa: ANN401 - a standing or a test
        if isinstance(item, _Standing):
            self._note_standing(item.values)
        elif isinstance(item, _Tested):
            self._note_tested(item)

    def _note_standing(self, values: dict[str, Any]) -> None:
        self._standing = values
        progress, config = self._job.progress, self._job.config
        now = time.monotonic()
        if self._formed:
            progress.train_seconds += now - self._looked_at
            progress.seconds += now - self._looked_at
        self._looked_at = now
        progress.samples = values["done"]
        progress.updates = values["version"] - config.first_version
        progress.step = values["done"] % len(self._job.data.train) // config.batch
        self._note_nodes(values)
        self._note_refusals(values)
        self._test_if_due(values)
        if self._formed and now - (self._told_at or 0.0) >= config.log_interval_s:
            self._tell_of_steps(values, now)

    def _note_nodes(self, values: dict[str, Any]) -> None:
        totals = values["totals"]
        for name, speed in values["speeds"].items():
            record = self._roster.by_number(int(name))
            if record is not None:
                record.speed = speed
                record.samples = totals["samples_by_node"].get(name, 0)
                record.busy_s = totals["busy_by_node"].get(name, 0.0)
                record.waiting_s = totals["waited_by_node"].get(name, 0.0)

    def _note_refusals(self, values: dict[str, Any]) -> None:
        for reason, count in values["refused"].items():
            if count > self._refused.get(reason, 0):
                self._refused[reason] = count
                text = f"the parameter service refused {count} submissions so far: {reason}"
                self._job.events.emit(RefusedEvent(cause=reason, count=count, reason=text))
        if values["problem"] and values["problem"] not in self._refused:
            self._refused[values["problem"]] = 1
            self._job.events.emit(WarningEvent(reason=values["problem"]))

    def _tell_of_steps(self, values: dict[str, Any], now: float) -> None:
        progress, totals = self._job.progress, values["totals"]
        loss, correct, count = (a - b for a, b in zip(_sums(totals), self._epoch_sums, strict=True))
        if count <= 0 or progress.samples <= self._told_done:
            return
        since, self._told_at = self._told_at, now
        trained, self._told_done = progress.samples - self._told_done, progress.samples
        if since is None:  # from here on there is a speed
            return
        self._job.events.emit(
            StepEvent(
                epoch=progress.epoch + 1,
                step=progress.step,
                steps=self._job.schedule.steps_per_epoch,
                samples=progress.samples,
                loss=loss / count,
                accuracy=correct / count,
                samples_per_s=trained / (now - since),
                learning_rate=self._job.schedule.rate(progress.samples / self._job.config.batch),
            )
        )
        self._tell_of_nodes(values)

    def _tell_of_nodes(self, values: dict[str, Any]) -> None:
        totals = values["totals"]
        names = [name for name in values["speeds"] if name in totals["samples_by_node"]]

        def since(kind: str) -> list[float]:
            before = self._told.get(kind, {})
            return [totals[kind].get(name, 0) - before.get(name, 0) for name in names]

        self._job.events.emit(
            NodesEvent(
                step=self._job.progress.updates,
                nodes=[int(name) for name in names],
                speeds=[round(values["speeds"][name], 2) for name in names],
                shares=[int(samples) for samples in since("samples_by_node")],
                samples=[int(samples) for samples in since("samples_by_node")],
                busy_s=since("busy_by_node"),
                waiting_s=since("waited_by_node"),
                exchange_s=0.0,
            )
        )
        self._tell_of_staleness(totals)
        kinds = ("samples_by_node", "busy_by_node", "waited_by_node", "by_staleness")
        self._told = {kind: dict(totals[kind]) for kind in kinds}

    def _tell_of_staleness(self, totals: dict[str, Any]) -> None:
        before = self._told.get("by_staleness", {})
        counts = [0] * _STALENESS_PLACES
        for staleness, count in totals["by_staleness"].items():
            place = min(int(staleness), _STALENESS_PLACES - 1)
            # A service that was started again counts from nothing.
            counts[place] += max(0, count - int(before.get(staleness, 0)))
        while counts and counts[-1] == 0:
            counts.pop()
        latest = totals["staleness_by_node"]
        if counts:
            self._job.events.emit(
                StalenessEvent(
                    step=self._job.progress.updates,
                    counts=counts,
                    nodes=[int(name) for name in latest],
                    latest=list(latest.values()),
                )
            )

    # ------------------------------------------------------------ tests

    def _test_if_due(self, values: dict[str, Any]) -> None:
        """Test the weights of an epoch that is over, while training goes on."""
        progress, epochs = self._job.progress, self._job.config.epochs
        due = min(values["done"] // len(self._job.data.train), epochs)
        epoch = progress.epoch + 1
        is_last = epoch >= epochs
        if self._testing or due < epoch or (is_last and not values["over"]):
            return
        self._testing = True
        which = 0 if is_last else epoch
        threading.Thread(target=self._test, args=(epoch, which), daemon=True).start()

    def _test(self, epoch: int, which: int) -> None:
        job = self._job
        try:
            _, vector = self._service.weights(which)
            self._flat.write(vector)
            if job.config.norms == "local":
                measure_statistics(job)
            loss, accuracy = evaluate(job.executor, job.test, mirrored=job.config.mirrored_test)
            self._inbox.put(_Tested(epoch, loss, accuracy))
        except ConvoyError as error:
            self._inbox.put(_Tested(epoch, problem=str(error)))

    def _note_tested(self, tested: _Tested) -> None:
        self._testing = False
        if tested.problem:  # the service is being started again: the test is made again
            return
        job, sums = self._job, _sums(self._standing["totals"])
        progress = job.progress
        before = self._epoch_sums
        progress.loss = sums[0] - before[0]
        progress.correct = sums[1] - before[1]
        progress.count = max(1, sums[2] - before[2])
        self._epoch_sums = sums
        step = progress.step
        record = close_epoch(job, tested.loss, tested.accuracy)
        progress.step = step if record.epoch < job.config.epochs else 0
        job.save(f"epoch {record.epoch}", score=tested.accuracy)
        self._outcome = reason_to_end(job, record)
        if self._outcome is None and record.epoch >= job.config.epochs:
            self._outcome = f"all {job.config.epochs} epochs are done"

    # ------------------------------------------------------------ the end

    def _watch_leaving(self) -> None:
        """When a run is stopped, keep what the nodes have handed in until then."""
        waited = time.monotonic() - self._stopping_since
        if self._roster.in_state("training") and waited < _LEAVE_PATIENCE_S:
            return
        if self._testing or self._outcome is not None:
            return
        _, vector = self._service.weights(0)
        self._note_standing(self._service.standing())
        self._flat.write(vector)
        self._job.save("interrupted")
        self._outcome = "interrupted"


def measure_statistics(job: Job) -> None:
    """Measure batch-norm's statistics anew, for weights that came without any."""
    norms = [m for m in job.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    kept = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over what follows
    job.model.train()
    order = torch.randperm(len(job.train), generator=torch.Generator().manual_seed(0))
    epoch = job.train.epoch(
        0, seed=job.config.seed, augmentation=job.augmentation, order=order[:_TYPICAL]
    )
    with torch.no_grad(), job.executor.arithmetic.autocast():
        for batch in epoch.batches(256):
            job.model(batch.images_NCHW)
    for norm, momentum in zip(norms, kept, strict=True):
        norm.momentum = momentum


def _sums(totals: dict[str, Any]) -> tuple[float, int, int]:
    return totals["loss"], totals["correct"], totals["count"]
