"""Do a run with a parameter service again, from its record, and see whether the bits agree.

The record says what happened to the service and when, but holds no weights. Here the same
server is told the same happenings, and what a node handed in is computed again by the same
worker from the same order. At every moment at which the service wrote its state, and at the
end, the checksums of the weights must agree.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from convoy.assembly import Given, make_job
from convoy.config import SERVICE_STRATEGIES, Config
from convoy.errors import CheckpointError, ConvoyError
from convoy.launch.choose import config_of_nodes
from convoy.launch.parameters.record import read_record
from convoy.launch.parameters.vectors import checksum, encoded
from convoy.monitor.events import EventStream
from convoy.outer.flat import Flat
from convoy.outer.job import Job
from convoy.outer.server import (
    Answer,
    BehindError,
    FencedError,
    ParameterServer,
    Report,
    ShutOutError,
)
from convoy.outer.service_plan import make_server
from convoy.outer.stop import NeverStop
from convoy.outer.worker import Worker
from convoy.tracking import Track, untracked

_STATES_KEPT = 8  # a service that was killed went on from one of the last


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay found.

    Attributes:
        submissions: that were computed again.
        compared: moments at which checksums were compared.
        differing: those of them at which they differ; the versions.
        restarts: of the service, in the record.
        version: of the last weights.
        checksum: of the last weights.
    """

    submissions: int
    compared: int
    differing: tuple[int, ...]
    restarts: int
    version: int
    checksum: int

    @property
    def is_equal(self) -> bool:
        """Tell whether every bit agreed wherever it was compared."""
        return self.compared > 0 and not self.differing


def replay(config: Config, record: Path, track: Track) -> Replayed:
    """Do a run again from its record.

    Args:
        config: the run's own.
        record: its record.
        track: shows progress.
    """
    if config.strategy not in SERVICE_STRATEGIES:
        raise ConvoyError(
            "only runs with a parameter service are replayed",
            got=config.strategy,
            hint="A lockstep run needs none: the same seed gives the same weights.",
        )
    if config.servers > 1:
        raise ConvoyError("a run with several servers is not replayed", got=config.servers)
    happenings = list(read_record(record))
    if not happenings or happenings[0]["event"] != "start" or happenings[0]["done"] > 0:
        raise CheckpointError("this record does not begin with the run's first weights")
    again = _Again(config_of_nodes(config), int(happenings[0]["nodes"]))
    threads = torch.get_num_threads()
    try:
        for happening in track(happenings, "doing it again", len(happenings)):
            again.happen(happening)
    finally:
        torch.set_num_threads(threads)
    return again.outcome()


@dataclass(eq=False)
class _Player:
    """A node that does its orders again."""

    incarnation: str
    worker: Worker
    threads: int
    given: Answer | None = None
    handed_in: tuple[int, Tensor] | None = None


@dataclass(eq=False)
class _Again:
    """A run that is done again."""

    config: Config
    nodes: int
    players: dict[int, _Player] = field(default_factory=dict)
    states: list[tuple[tuple[int, int, int], Any]] = field(default_factory=list)
    submissions: int = 0
    compared: int = 0
    restarts: int = 0
    differing: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._first = self._job(None)
        self._server = self._new_server()

    def _job(self, like: Job | None) -> Job:
        return make_job(
            self.config,
            Given(data=like.data if like is not None else None),
            Path(os.devnull),
            EventStream([]),
            NeverStop(),
            untracked,
        )

    def _new_server(self) -> ParameterServer:
        flat = Flat(self._first.model, statistics=self.config.norms == "average")
        samples = len(self._first.data.train)
        return make_server(self.config, flat.read(), flat.weights, samples, self.nodes)

    def happen(self, happening: dict[str, Any]) -> None:
        """Let one thing happen again."""
        values = {**happening}
        kind = values.pop("event")
        getattr(self, f"_{kind}")(**values)
        for node, member in self._server.members.items():
            if member.answer is not None and node in self.players:
                self.players[node].given = member.answer

    def outcome(self) -> Replayed:
        """Return what was found."""
        return Replayed(
            submissions=self.submissions,
            compared=self.compared,
            differing=tuple(self.differing),
            restarts=self.restarts,
            version=self._server.version,
            checksum=self._checksum(),
        )

    # ------------------------------------------------------------ what can happen

    def _start(self, version: int, done: int, nodes: int) -> None:
        """Begin with the first weights; a record has one beginning."""
        del version, nodes
        if done > 0:
            raise CheckpointError("the run went on from a checkpoint that has no service's state")

    def _restart(self, version: int, done: int, state: int = 0) -> None:
        """Go on from a state that was on disk.

        Its number tells it from one of the same version that a kill kept from getting there.
        """
        self.restarts += 1
        states = [kept for moment, kept in self.states if moment == (version, done, state)]
        if not states:
            raise CheckpointError("the record goes on from a state that it does not hold")
        self._server = self._new_server()
        self._server.restore(*states[-1])

    def _admit(
        self, node: int, incarnation: str, speed: float, now: float, threads: int = 0
    ) -> None:
        before = self.players.get(node)
        if before is None or before.incarnation != incarnation:
            worker = Worker(self._job(self._first), node)
            self.players[node] = _Player(incarnation, worker, threads or torch.get_num_threads())
        self._server.admit(node, incarnation, speed, now)

    def _remove(self, node: int, incarnation: str, now: float) -> None:
        self._server.remove(node, incarnation, now)

    def _pull(self, node: int, incarnation: str, last: int, now: float) -> None:
        self._server.pull(node, incarnation, last, now)

    def _submit(
        self,
        node: int,
        incarnation: str,
        number: int,
        base: int,
        now: float,
        report: dict[str, Any],
        coding: str = "full",
    ) -> None:
        player = self.players[node]
        if player.handed_in is None or player.handed_in[0] != number:
            vector = self._train(player)
            vector = vector.bfloat16().to(vector.dtype) if coding == "bf16" else vector
            player.handed_in = (number, vector)
        vector, told = player.handed_in[1], Report(**report)
        try:
            self._server.submit(node, incarnation, number, base, vector, told, now)
        except BehindError:
            player.worker.forget()
        except (FencedError, ShutOutError):
            return

    def _train(self, player: _Player) -> Tensor:
        given = player.given
        assert given is not None
        assert given.order is not None
        torch.set_num_threads(player.threads)  # sums depend on how many share them
        if given.refused:
            player.worker.start_over()
        player.worker.take(given.vector, given.order)
        vector, _ = player.worker.run(given.order)
        player.worker.run_ahead(given.order)
        self.submissions += 1
        return vector

    def _tick(self, now: float) -> None:
        self._server.tick(now)

    def _saved(self, version: int, done: int, checksum: int, state: int = 0) -> None:
        self._compare(version, checksum)
        self.states.append(((version, done, state), self._server.state()))
        del self.states[:-_STATES_KEPT]

    def _end(self, version: int, done: int, checksum: int) -> None:
        del done
        self._compare(version, checksum)

    def _compare(self, version: int, expected: int) -> None:
        self.compared += 1
        if self._server.version != version or self._checksum() != expected:
            self.differing.append(version)

    def _checksum(self) -> int:
        return checksum(encoded(self._server.vector, "full"))
