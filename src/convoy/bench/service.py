"""What does it cost to hand a vector to the parameter service and take one over?

One exchange is a push and a pull: a node's process hands in a vector and is given one of the
same size. First the way there and back, where nobody computes anything: our calls, messages,
checksums and threads around a server that answers with a vector it has at hand, beside a bare TCP
socket, gloo's send and recv, and Ray's object store with one actor. By shared memory there are
two rows: the vector was made elsewhere and is copied in, as Ray does; or it was made in place, as
our nodes do, whose last subtraction writes there.

Then the whole job: the real service in its own process, with its checks, the merge (one node, so
that it is an addition) and its writing to disk every five seconds, beside the same merge as a Ray
actor, and alone.
"""

import os
import secrets
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor

from convoy.bench.peers.carriers import (
    FILL,
    Answering,
    Load,
    Measure,
    at_hand,
    open_gloo,
    open_ray,
    open_socket,
    ray_is_missing,
    time_swaps,
)
from convoy.bench.peers.crew import Crew, Link
from convoy.bench.report import Bar, Report, Row, median_ratio
from convoy.config import Config
from convoy.launch.certificate import read_or_make_tls
from convoy.launch.parameters.exchange import Exchange, Service
from convoy.launch.parameters.keeper import Keeper
from convoy.launch.parameters.process import ServiceOrder, ServiceProcess
from convoy.launch.parameters.record import Record
from convoy.launch.parameters.shell import ParameterShell
from convoy.launch.parameters.vectors import Coding
from convoy.memory.shared import SharedRooms
from convoy.outer.server import ParameterServer
from convoy.outer.server import Report as Trained
from convoy.outer.service_plan import make_server

LOADS = (
    Load(32_000_000, count=9, warm=8),  # first, so that later ones find all memory in use
    Load(11_000_000, count=15, warm=8),
    Load(1_000_000, count=50, warm=20),
    Load(75_000, count=100, warm=40),
)
QUICK_LOADS = LOADS[2:]
AT_LEAST = 2.0  # times as fast as Ray
_HOST = "127.0.0.1"
_PATIENCE_S = 120.0
_NODE, _NAME = 0, "bench"
_SAMPLES = 1_000_000_000  # more than are asked for: no epoch ends
_RAY, _RAY_MERGING = "Ray's object store", "Ray's object store, same merge"
_SHARED = "convoy, shared memory"
_IN_PLACE = "convoy, shared memory, made in place"
_MERGED = "convoy, shared memory, made in place, with the merge"

_Values = dict[tuple[str, str], tuple[float, ...]]  # by size and way, one of each round
_Ways = AbstractContextManager[dict[str, Measure]]


def bench_service(*, quick: bool, tell: Callable[[str], None]) -> Report:
    """Measure all ways in turn, several times."""
    repeats, loads = (2, QUICK_LOADS) if quick else (5, LOADS)
    reason = ray_is_missing()
    if reason is not None:
        tell(f"{_RAY} is left out: {reason}")
    values: _Values = {}
    for number in range(repeats):
        for opened in _open_all(loads, with_ray=reason is None):
            with opened as ways:
                for name, measure in ways.items():
                    found = {_task(load): _typical_ms(measure(load)) for load in loads}
                    for task, ms in found.items():
                        values[task, name] = (*values.get((task, name), ()), ms)
                    shown = ", ".join(f"{ms:,.2f} ms at {task}" for task, ms in found.items())
                    tell(f"round {number + 1} of {repeats}: {name} {shown}")
    return Report("service", repeats, _rows(values, loads), _bars(values, loads))


def _task(load: Load) -> str:
    return f"{load.megabytes:g} MB"


def _typical_ms(seconds: list[float]) -> float:
    return 1e3 * statistics.median(seconds)


def _open_all(loads: tuple[Load, ...], *, with_ray: bool) -> Iterator[_Ways]:
    """Yield all ways in the order of a round: those compared most closely beside each other."""
    yield _named("bare TCP socket", open_socket())
    yield _named("gloo", open_gloo())
    yield _named("convoy, gRPC", _open_ours("full"))
    yield _named("convoy, gRPC, bf16 up", _open_ours("bf16"))
    yield _named("convoy, gRPC with TLS", _open_ours("full", tls=True))
    yield _named("convoy, gRPC, with the merge", _open_ours("full", merges=True))
    if with_ray:
        largest = max(load.size for load in loads)
        yield open_ray(largest, {_RAY: at_hand, _RAY_MERGING: merging})
    yield _named(_SHARED, _open_ours("shared"))
    yield _named(_IN_PLACE, _open_ours("shared", in_place=True))
    yield _named(_MERGED, _open_ours("shared", in_place=True, merges=True))
    yield _named("convoy's merge alone", _open_merge())


@contextmanager
def _named(name: str, way: AbstractContextManager[Measure]) -> Iterator[dict[str, Measure]]:
    with way as measure:
        yield {name: measure}


def _rows(values: _Values, loads: tuple[Load, ...]) -> tuple[Row, ...]:
    rows = []
    for load in reversed(loads):
        here = {name: found for (task, name), found in values.items() if task == _task(load)}
        rows += [Row(_task(load), name, "ms", found) for name, found in here.items()]
        speeds = {
            name: tuple(2e3 * load.megabytes / ms for ms in found) for name, found in here.items()
        }
        task = f"{_task(load)}, both ways"
        rows += [Row(task, name, "MB/s", found) for name, found in speeds.items()]
    return tuple(rows)


def _bars(values: _Values, loads: tuple[Load, ...]) -> tuple[Bar, ...]:
    """Compare with Ray, size by size: the way alone, and the whole job."""
    bars = []
    for peer, ours, at_least in ((_RAY, _SHARED, AT_LEAST), (_RAY_MERGING, _MERGED, 1.0)):
        for load in reversed(loads):
            task = _task(load)
            if (task, peer) in values:
                ratio = median_ratio(values[task, peer], values[task, ours])
                bars.append(Bar(f"{task}: {peer} / {ours}", ratio, at_least=at_least))
    return tuple(bars)


# ---------------------------------------------------------------- ours


def _config() -> Config:
    """Return a run in which a node exchanges after every sample."""
    return Config(
        strategy="server",
        rule="delta-poly",
        batch=1,
        epochs=1,
        exchange_every=1,
        overlap=False,
        durable_updates=_SAMPLES,
    )


@contextmanager
def _open_ours(
    coding: Coding, *, tls: bool = False, in_place: bool = False, merges: bool = False
) -> Iterator[Measure]:
    """Start a node's process; for each size it gets a service of its own."""
    with Crew(_be_node, [()]) as crew:

        def measure(load: Load) -> list[float]:
            with _service(load, tls=tls, merges=merges) as service:
                crew.send((service, coding, in_place, merges, load))
                seconds: list[float] = crew.receive(_PATIENCE_S)[0]
            return seconds

        yield measure
        crew.send(None)


@contextmanager
def _service(load: Load, *, tls: bool, merges: bool) -> Iterator[Service]:
    with TemporaryDirectory(prefix="convoy-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        shown = read_or_make_tls(folder, _HOST) if tls else None
        order = ServiceOrder(
            config=_config(),
            run=_NAME,
            vector=torch.ones(load.size),
            weights=load.size,
            model=_NAME,
            samples=_SAMPLES,
            nodes=1,
            done=0,
            folder=folder / "service",
            record=folder / "record.jsonl",
            tokens=(secrets.token_hex(16), secrets.token_hex(16)),
            host=_HOST,
            tls=shown,
        )
        certificate = shown.certificate if shown is not None else None
        with (_merging_service if merges else _answering_service)(order) as address:
            yield Service(address, order.tokens[0], _NAME, certificate, _PATIENCE_S)


@contextmanager
def _merging_service(order: ServiceOrder) -> Iterator[str]:
    """Start the service as a run does."""
    process = ServiceProcess(order)
    try:
        process.admit(_NODE, _NAME, 1.0)
        process.open()
        yield process.address
    finally:
        process.end()


@contextmanager
def _answering_service(order: ServiceOrder) -> Iterator[str]:
    """Start a service that merges nothing."""
    with Crew(_answer, [(order,)]) as crew:
        yield crew.receive(_PATIENCE_S)[0]
        crew.send(None)


class _AtHand:
    """A server that answers with a vector which it has at hand: the way there and back is left."""

    def __init__(self, server: ParameterServer) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - all else is the server's
        return getattr(self._server, name)

    def submit(self, node: int, incarnation: str, number: int, *_: object) -> None:
        member = self._server.check(node, incarnation)
        assert member.answer is not None
        member.number, member.answer = number, replace(member.answer, number=number)


def _answer(link: Link, order: ServiceOrder) -> None:
    """Be such a service, as its own process is: one thread for arithmetic, all others for calls."""
    torch.set_num_threads(1)
    rooms = SharedRooms()
    server = make_server(order.config, order.vector, order.weights, _SAMPLES, 1, rooms=rooms)
    server.admit(_NODE, _NAME, 1.0, 0.0)
    with Record(order.record) as record:
        shell = ParameterShell(
            cast(ParameterServer, _AtHand(server)),
            rooms,
            run=order.run,
            model=order.model,
            tokens=order.tokens,
            keeper=Keeper(order.folder),
            record=record,
            journal=False,
            write_every=order.config.durable_updates,
        )
        shell.let_nodes_in()
        link.send(f"{_HOST}:{shell.listen(_HOST, 0, order.tls)}")
        link.receive()
        shell.close()


def _be_node(link: Link) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # Ray too copies with several threads
    while (order := link.receive()) is not None:
        link.send(_exchange(*order))


def _exchange(
    service: Service, coding: Coding, in_place: bool, merges: bool, load: Load
) -> list[float]:
    """Be a node that hands in again and again."""
    exchange = Exchange(
        service,
        _NODE,
        _NAME,
        model=_NAME,
        size=load.size,
        dtype=torch.float32,
        coding=coding,
        check=lambda: None,
    )
    try:
        given = exchange.pull()
        increment = torch.full((load.size,), FILL)
        if in_place:
            assert exchange.room is not None, "there is no shared memory here"
            increment = exchange.room.fill_(FILL)

        def swap() -> None:
            nonlocal given
            given = exchange.push(given.version, increment, Trained(samples=1)).result()

        seconds = time_swaps(swap, load)
        _check(given.vector, load.warm + load.count if merges else 0)
    finally:
        exchange.close()
    return seconds


def _check(vector: Tensor, merged: int) -> None:
    """Make sure that what came back is what all that was merged adds up to."""
    assert bool((vector == 1.0 + merged * FILL).all()), "a vector was not merged exactly once"


# ---------------------------------------------------------------- the merge, without our wires


def merging(size: int) -> Answering:
    """Return what checks a vector and merges it, as the service does."""
    server = make_server(_config(), torch.ones(size), size, _SAMPLES, 1)
    server.admit(_NODE, _NAME, 1.0, 0.0)
    server.pull(_NODE, _NAME, 0, 0.0)
    return partial(_merge, server)


def _merge(server: ParameterServer, vector: Tensor) -> Tensor:
    number = server.members[_NODE].number + 1
    server.submit(_NODE, _NAME, number, server.version, vector, Trained(samples=1), 0.0)
    answer = server.answer_to(_NODE, _NAME, number)
    assert answer is not None
    return answer.vector


@contextmanager
def _open_merge() -> Iterator[Measure]:
    with Crew(_merge_alone, [()]) as crew:

        def measure(load: Load) -> list[float]:
            crew.send(load)
            seconds: list[float] = crew.receive(_PATIENCE_S)[0]
            return seconds

        yield measure
        crew.send(None)


def _merge_alone(link: Link) -> None:
    while (load := link.receive()) is not None:
        answer = merging(load.size)
        link.send(time_swaps(partial(answer, torch.full((load.size,), FILL)), load))
