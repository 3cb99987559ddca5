"""The parameter service as a process of its own: started by the lead, and started again.

It can be killed at any time. The lead notices, starts it again on the same port, and names the
nodes that take part; the service goes on from the newest state on disk.
"""

import contextlib
import ctypes
import json
import multiprocessing
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import grpc
import torch
from torch import Tensor

from convoy.config import Config
from convoy.errors import ConvoyError, EnvironmentProblem
from convoy.launch.door import TOKEN_KEY, open_channel
from convoy.launch.parameters import messages_pb2 as wire
from convoy.launch.parameters.keeper import Keeper
from convoy.launch.parameters.record import Record
from convoy.launch.parameters.shell import ParameterShell
from convoy.launch.parameters.vectors import Arriving
from convoy.launch.processes import how_it_ended, start_process
from convoy.memory.shared import SharedRooms, sweep
from convoy.outer.crew import Tls
from convoy.outer.service_plan import make_server

_PARENT_DIED = 1  # prctl's PR_SET_PDEATHSIG
_START_AT_MOST_S = 30.0
_CALL_AT_MOST_S = 5.0


@dataclass(frozen=True, eq=False)
class ServiceOrder:
    """What the service's process must know.

    Attributes:
        run: the run's identity.
        vector, weights: to start from where nothing is on disk, and how many are weights.
        model: digest of the vector's layout.
        samples, nodes, done: of the data set, expected, and trained already.
        folder: for its state.
        record: the file that happenings are written to.
        tokens: what a node, and what the lead must know.
        host, port, tls: where to listen.
        hands_out: it is the one, of several, that hands out work.
    """

    config: Config
    run: str
    vector: Tensor
    weights: int
    model: str
    samples: int
    nodes: int
    done: int
    folder: Path
    record: Path
    tokens: tuple[str, str] = field(repr=False)
    host: str
    port: int = 0
    tls: Tls | None = None
    hands_out: bool = True


def run_service(order: ServiceOrder, ready: Connection) -> None:
    """Be the parameter service until the lead ends or says so."""
    ctypes.CDLL(None).prctl(_PARENT_DIED, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the lead decides
    torch.set_num_threads(1)  # nodes need the other cores
    keeper = Keeper(order.folder)
    sweep()
    rooms = SharedRooms()
    server = make_server(
        order.config,
        order.vector,
        order.weights,
        order.samples,
        order.nodes,
        order.done,
        hands_out=order.hands_out,
        rooms=rooms,
    )
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with Record(order.record) as record:
        # A state that is older than the run's own checkpoint belongs to an earlier start of it.
        known = keeper.newest[1]["done"] if keeper.newest is not None else -1
        if keeper.newest is not None and (known >= order.done or not order.hands_out):
            server.restore(*keeper.newest)
            found = keeper.count
            record.write("restart", version=server.version, done=server.done, state=found)
        else:
            record.write("start", version=server.version, done=server.done, nodes=order.nodes)
        shell = ParameterShell(
            server,
            rooms,
            run=order.run,
            model=order.model,
            tokens=order.tokens,
            keeper=keeper,
            record=record,
            journal=order.config.durability == "journal",
            write_every=order.config.durable_updates,
        )
        port = shell.listen(order.host, order.port, order.tls)
        ready.send((port, server.version, keeper.damaged))
        _wait_for_end(ended)
        shell.close()


def _wait_for_end(ended: threading.Event) -> None:
    lead = multiprocessing.parent_process()
    while not ended.wait(0.5):
        if lead is not None and not lead.is_alive():
            return


class ServiceProcess:
    """Keeps the parameter service alive, and speaks with it for the lead."""

    def __init__(self, order: ServiceOrder) -> None:
        self._order = order
        self._process: BaseProcess | None = None
        self.restarts = 0
        self.version = 0
        self.damaged: list[str] = []
        self._start()

    @property
    def address(self) -> str:
        """Return where nodes find it."""
        return f"{self._order.host}:{self._order.port}"

    @property
    def pid(self) -> int | None:
        """Return its process number."""
        return self._process.pid if self._process is not None else None

    def _start(self) -> None:
        receiving, sending = multiprocessing.Pipe(duplex=False)
        given = (self._order, sending)
        self._process = start_process(run_service, given, name="convoy parameter service")
        sending.close()
        try:
            if not receiving.poll(_START_AT_MOST_S):
                raise EOFError
            port, self.version, self.damaged = receiving.recv()
        except EOFError:
            raise EnvironmentProblem("the parameter service did not start") from None
        finally:
            receiving.close()
        self._order = replace(self._order, port=port)
        certificate = self._order.tls.certificate if self._order.tls is not None else None
        self._channel = open_channel(self.address, certificate)

    def revive(self) -> str | None:
        """Start it again if it has died; return how it died, if it has."""
        if self._process is None or self._process.exitcode is None:
            return None
        how = how_it_ended(self._process.exitcode)
        self._process.close()
        self._channel.close()
        self.restarts += 1
        try:
            self._start()
        except EnvironmentProblem:
            self._process.join(_CALL_AT_MOST_S)
            if (self._process.exitcode or 0) >= 0:
                raise
            # Killed while it started: the next look starts it again.
        return how

    def end(self) -> None:
        """Let it write its state, and end it."""
        if self._process is None:
            return
        self._process.terminate()
        self._process.join(_CALL_AT_MOST_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._process.close()
        self._process = None
        self._channel.close()
        sweep()  # of one that had to be killed

    # ------------------------------------------------------------ calls

    def admit(self, node: int, incarnation: str, speed: float, threads: int = 0) -> None:
        """Let a node take part."""
        self._call(
            "Admit",
            wire.Admission(node=node, incarnation=incarnation, speed=speed, threads=threads),
        )

    def remove(self, node: int, incarnation: str) -> None:
        """Let a node take part no longer."""
        self._call("Remove", wire.Admission(node=node, incarnation=incarnation))

    def open(self) -> None:
        """Let it serve nodes: all that take part were named."""
        self._call("Open", wire.Ask())

    def pause(self) -> None:
        """Let it give nobody work until it is opened again."""
        self._call("Pause", wire.Ask())

    def standing(self) -> dict[str, Any]:
        """Return how the run stands."""
        answer = wire.Standing.FromString(self._call("Status", wire.Ask()))
        values: dict[str, Any] = json.loads(answer.values)
        return values

    def weights(self, epoch: int) -> tuple[int, Tensor]:
        """Return version and vector at the end of an epoch, or of now where epoch is 0."""
        with _noticing_loss():
            call = self._channel.unary_stream(
                "/convoy.Parameters/Weights",
                request_serializer=wire.Ask.SerializeToString,
                response_deserializer=wire.Down.FromString,
            )(wire.Ask(epoch=epoch), metadata=self._metadata, timeout=_START_AT_MOST_S)
            return self._read(call)

    def _read(self, call: Iterator[wire.Down]) -> tuple[int, Tensor]:
        told = next(call).told
        vector = self._order.vector
        arriving = Arriving(vector.numel(), vector.dtype, "full")
        for message in call:
            arriving.add(message.data)
        return told.version, arriving.vector(told.checksum)

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return ((TOKEN_KEY, self._order.tokens[1]),)

    def _call(self, method: str, message: Any) -> bytes:  # noqa: ANN401 - any message
        with _noticing_loss():
            call = self._channel.unary_unary(
                f"/convoy.Parameters/{method}",
                request_serializer=lambda m: m.SerializeToString(),
                response_deserializer=bytes,
            )
            answer: bytes = call(message, metadata=self._metadata, timeout=_CALL_AT_MOST_S)
            return answer


class ServiceLostError(ConvoyError):
    """The parameter service does not answer; it will be started again."""


@contextlib.contextmanager
def _noticing_loss() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise ServiceLostError(str(error.details())) from None
    except ValueError as error:  # the channel is closed, while the service is started again
        raise ServiceLostError(str(error)) from None
