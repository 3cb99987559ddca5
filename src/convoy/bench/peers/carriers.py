"""Other ways to hand a vector to another process and get one back: a socket, gloo, Ray.

An exchange is both: the vector goes there, and one of the same size comes back. All memory is
set aside before the clock starts. Each way gives a function that does so many exchanges of
vectors of some size, and returns the seconds that each took.
"""

import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, distributed

from convoy.bench.peers import ddp
from convoy.bench.peers.crew import Crew, Link

_LOOPBACK = "127.0.0.1"
_PATIENCE_S = 120.0
_STORE_VECTORS = 10  # room in Ray's store: it frees what nobody needs a little later
_STORE_LEAST_BYTES = 100_000_000
FILL = 2.0**-10  # what a vector handed in is full of: sums are exact, in bf16 too


@dataclass(frozen=True, slots=True)
class Load:
    """What is exchanged.

    Attributes:
        size: float32 numbers in the vector.
        count: exchanges that are timed.
        warm: exchanges before, until memory and connections have settled.
    """

    size: int
    count: int
    warm: int

    @property
    def megabytes(self) -> float:
        """Return how long a vector is."""
        return self.size * torch.float32.itemsize / 1e6


Measure = Callable[[Load], list[float]]
Swap = Callable[[], object]


def time_swaps(swap: Swap, load: Load) -> list[float]:
    """Return the seconds that each exchange takes."""
    for _ in range(load.warm):
        swap()
    seconds = []
    for _ in range(load.count):
        started = time.perf_counter()
        swap()
        seconds.append(time.perf_counter() - started)
    return seconds


def _ask(crew: Crew, kind: str, load: Load) -> list[float]:
    crew.send((kind, load))
    seconds: list[float] = crew.receive(_PATIENCE_S)[0]
    return seconds


@contextmanager
def _pair(entry: Callable[..., None], *arguments: object) -> Iterator[Measure]:
    """Start two processes: the first has the clock, the second answers it."""
    with Crew(entry, [(node, *arguments) for node in range(2)]) as crew:
        port = crew.receive(_PATIENCE_S)[1]
        crew.send(port)
        yield partial(_ask, crew, "")
        crew.send(None)


def _serve(link: Link, node: int, send: Callable[[Tensor], object], receive: Any) -> None:  # noqa: ANN401 - a function of the same kind
    """Exchange whatever is asked for, until nothing is."""
    while (order := link.receive()) is not None:
        _, load = order
        up, down = torch.full((load.size,), FILL), torch.ones(load.size)

        def ask(up: Tensor = up, down: Tensor = down) -> None:
            send(up)
            receive(down)

        def answer(up: Tensor = up, down: Tensor = down) -> None:
            receive(up)
            send(down)

        link.send(time_swaps(answer if node else ask, load))


# ---------------------------------------------------------------- a socket


@contextmanager
def open_socket() -> Iterator[Measure]:
    """Use a TCP connection as it is: the least that a copy over the loopback costs."""
    with _pair(_be_at_socket) as measure:
        yield measure


def _be_at_socket(link: Link, node: int) -> None:
    with ExitStack() as stack:
        if node:
            listener = stack.enter_context(socket.create_server((_LOOPBACK, 0)))
            link.send(listener.getsockname()[1])
            link.receive()
            line = stack.enter_context(listener.accept()[0])
        else:
            link.send(None)
            line = stack.enter_context(socket.create_connection((_LOOPBACK, link.receive())))
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _serve(
            link,
            node,
            lambda vector: line.sendall(_bytes_of(vector)),
            lambda vector: _receive_into(line, _bytes_of(vector)),
        )


def _receive_into(line: socket.socket, room: memoryview) -> None:
    while room:
        room = room[line.recv_into(room) :]


def _bytes_of(vector: Tensor) -> memoryview:
    return memoryview(vector.numpy().view("uint8"))  # type: ignore[arg-type]


# ---------------------------------------------------------------- gloo


@contextmanager
def open_gloo() -> Iterator[Measure]:
    """Use torch.distributed's send and recv over gloo."""
    with ddp.open_store() as address, _pair(_be_in_gloo, address) as measure:
        yield measure


def _be_in_gloo(link: Link, node: int, address: str) -> None:
    link.send(None)
    link.receive()
    with ddp.group(address, node, 2):
        other = 1 - node
        _serve(
            link,
            node,
            lambda vector: distributed.send(vector, other),
            lambda vector: distributed.recv(vector, other),
        )


# ---------------------------------------------------------------- Ray


def ray_is_missing() -> str | None:
    """Return why Ray cannot be measured here, or None if it can."""
    return None if find_spec("ray") is not None else "ray is not installed here (pip install ray)"


Answering = Callable[[Tensor], Tensor]  # what an actor gives back for a vector
MakeAnswering = Callable[[int], Answering]  # for vectors of some size


@contextmanager
def open_ray(largest: int, kinds: Mapping[str, MakeAnswering]) -> Iterator[dict[str, Measure]]:
    """Use Ray's object store: two processes that map the same memory, one of them an actor.

    Args:
        largest: size of the largest vector, for the store's own size.
        kinds: what an actor does with a vector; each is measured.
    """
    bytes_ = max(_STORE_LEAST_BYTES, _STORE_VECTORS * largest * torch.float32.itemsize)
    with Crew(_drive_ray, [(bytes_, dict(kinds))]) as crew:
        crew.receive(_PATIENCE_S)
        yield {kind: partial(_ask, crew, kind) for kind in kinds}
        crew.send(None)


def at_hand(size: int) -> Answering:
    """Return what gives back a vector that it has at hand."""
    kept = torch.ones(size)
    return lambda _: kept


class _Actor:
    """Takes a vector out of the store and puts one in."""

    def __init__(self, make: MakeAnswering) -> None:
        warnings.simplefilter("ignore")  # what lies in the store cannot be written, says torch
        torch.set_num_threads(1)
        self._make = make
        self._size = 0

    def exchange(self, array: Any) -> Any:  # noqa: ANN401 - numpy arrays
        if array.size != self._size:
            self._answer, self._size = self._make(array.size), array.size
        return self._answer(torch.from_numpy(array)).numpy()


def _drive_ray(link: Link, store_bytes: int, kinds: dict[str, MakeAnswering]) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    with TemporaryDirectory(prefix="convoy-ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=store_bytes,
            log_to_driver=False,
            _node_ip_address=_LOOPBACK,
            _temp_dir=folder,
        )
        try:
            link.send("ready")
            while (order := link.receive()) is not None:
                kind, load = order
                actor: Any = ray.remote(_Actor).remote(kinds[kind])
                array = torch.full((load.size,), FILL).numpy()

                def swap(actor: Any = actor, array: Any = array) -> Any:  # noqa: ANN401 - Ray's
                    # As fast as giving the array itself, or faster.
                    return ray.get(actor.exchange.remote(ray.put(array)))

                link.send(time_swaps(swap, load))
                ray.kill(actor)
        finally:
            ray.shutdown()
