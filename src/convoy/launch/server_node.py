"""A node's part in a run with a parameter service: pull, train, hand in, until it is over."""

import json
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from convoy.config import Config
from convoy.data.card import DataCard
from convoy.data.images import TrainTest
from convoy.data.pieces import Pieces
from convoy.errors import ConvoyError
from convoy.files import default_cache_dir, user_path
from convoy.launch import wire_pb2 as wire
from convoy.launch.door import TOKEN_KEY, open_channel
from convoy.launch.link import Link
from convoy.launch.parameters.exchange import Exchange, Given, Service
from convoy.launch.parameters.shards import ShardedExchange, part_digest
from convoy.launch.parameters.vectors import Coding
from convoy.launch.samples import CHANNEL_OPTIONS, SampleClient
from convoy.outer.groupwork import Left
from convoy.outer.job import Job
from convoy.outer.server import BehindError, Report
from convoy.outer.work import Order as Work
from convoy.outer.worker import Worker, held_samples

EVERYTHING_IS_TRAINED = "everything is trained"
_ASK_AGAIN_S = 0.2  # where there is nothing to do for now
_LOOK_UP_S = 0.5  # while an answer is waited for
_LEAVE_PATIENCE_S = 3.0  # of a node that is asked to leave, for its last answer


@dataclass(eq=False)
class Supply:
    """The samples of a node that does not have the data set: fetched as they are needed."""

    pieces: Pieces
    client: SampleClient
    data: TrainTest

    def fetch(self, job: Job, indices: Tensor) -> None:
        """Wait until some samples are here."""
        missing = self.pieces.missing(indices)
        if len(missing):
            self.client.fetch(self.pieces, missing)
            job.train.refresh(job.data.train, missing)

    def fetch_ahead(self, job: Job, indices: Tensor) -> None:
        """Begin to fetch samples that will be needed later."""
        threading.Thread(target=self._quietly, args=(job, indices), daemon=True).start()

    def _quietly(self, job: Job, indices: Tensor) -> None:
        try:
            self.fetch(job, indices)
        except ConvoyError:
            return  # they are asked for again when they are needed


def open_supply(
    config: Config, welcome: wire.Welcome, lead: str, token: str, certificate: bytes | None
) -> Supply:
    """Prepare to have samples sent by the lead."""
    card = DataCard.from_dict(json.loads(welcome.data_card))
    cache = user_path(config.cache_dir) if config.cache_dir else default_cache_dir()
    pieces = Pieces(cache, card)
    pieces.verify()
    client = SampleClient(open_channel(lead, certificate, CHANNEL_OPTIONS), ((TOKEN_KEY, token),))
    train = pieces.image_set()
    data = TrainTest(
        name=card.name,
        train=train,
        test=train.select(torch.arange(0)),  # the lead tests
        digest=card.digest,
        augment=card.augment,
        mean=card.mean,
        std=card.std,
    )
    return Supply(pieces, client, data)


def choose_coding(config: Config, *, same_host: bool) -> Coding:
    """Return how vectors travel: not at all on one machine, else as was asked for."""
    if same_host:
        return "shared"
    return "bf16" if config.wire == "bf16" else "full"


def take_part(
    job: Job,
    welcome: wire.Welcome,
    link: Link,
    service: Service,
    coding: Coding,
    supply: Supply | None,
) -> str:
    """Train for the service until the run is over; return why it is.

    The service may be several that share the weights: then it has several addresses.

    Raises:
        FencedError: the service does not take anything from this incarnation any more.
        Left: this node was asked to leave.
    """
    worker = Worker(job, welcome.number)
    flat, addresses = worker.flat, service.address.split(",")

    def connect(place: int, size: int) -> Exchange:
        return Exchange(
            replace(service, address=addresses[place]),
            welcome.number,
            welcome.identity,
            model=part_digest(flat.digest, place, len(addresses)),
            size=size,
            dtype=flat.dtype,
            coding=coding,
            check=link.check,
        )

    exchange: Exchange | ShardedExchange = (
        connect(0, flat.size)
        if len(addresses) == 1
        else ShardedExchange(connect, flat.read(), flat.weights, len(addresses))
    )
    try:
        return _Node(job, worker, exchange, link, supply).train()
    finally:
        exchange.close()


class _Node:
    """Does orders until there are none."""

    def __init__(
        self,
        job: Job,
        worker: Worker,
        exchange: Exchange | ShardedExchange,
        link: Link,
        supply: Supply | None,
    ) -> None:
        self._job, self._worker, self._exchange = job, worker, exchange
        self._link, self._supply = link, supply

    def train(self) -> str:
        given = self._exchange.pull()
        while not given.is_over:
            self._link.check()
            if self._link.leaving:
                raise Left("asked to leave")
            if self._link.wants_stop:
                return "interrupted"
            if given.order is None:
                time.sleep(_ASK_AGAIN_S)
                given = self._exchange.pull()
                continue
            given = self._do(given, given.order)
        return EVERYTHING_IS_TRAINED

    def _do(self, given: Given, order: Work) -> Given:
        if given.refused:
            self._worker.start_over()
        self._fetch(order)
        self._worker.take(given.vector, order)
        vector, report = self._worker.run(order, self._exchange.room)
        self._note_speed(order, report)
        pending = self._exchange.push(given.version, vector, report)
        if not self._link.leaving and not self._link.wants_stop:
            self._worker.run_ahead(order)
        try:
            return self._answer(pending)
        except BehindError:
            self._worker.forget()
            return self._exchange.pull()

    def _answer(self, pending: Future[Given]) -> Given:
        """Wait for an answer; for ever, unless this node is asked to leave meanwhile."""
        while not self._link.leaving:
            with suppress(TimeoutError):
                return pending.result(timeout=_LOOK_UP_S)
        try:
            return pending.result(timeout=_LEAVE_PATIENCE_S)
        except TimeoutError:  # a paused service has taken it in, but answers nobody
            raise Left("asked to leave") from None

    def _fetch(self, order: Work) -> None:
        if self._supply is None:
            return
        self._supply.fetch(self._job, self._worker.samples_of(order))
        if order.coming:
            count, seed = len(self._job.train), self._job.config.seed
            self._supply.fetch_ahead(self._job, held_samples(seed, count, order.coming))

    def _note_speed(self, order: Work, report: Report) -> None:
        if report.busy_s > 0:
            self._link.describe(report.samples / report.busy_s, order.number)
