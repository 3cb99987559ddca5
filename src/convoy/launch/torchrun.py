"""The same job under torchrun: rank 0 leads, and every rank trains as one node.

torchrun has started the processes and tells each its place in variables; its own store is where
the other ranks learn how to reach the lead. After that, everything is as with `convoy join`.
"""

import contextlib
import ipaddress
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from convoy.config import Config
from convoy.errors import ConfigError, EnvironmentProblem
from convoy.launch.node import Order
from convoy.launch.token import make_token
from convoy.outer.crew import Serving

_LOOPBACK = "127.0.0.1"
_MEET_WITHIN_S = 60.0
_OWN_NODES = ("speeds", "devices", "shares")  # they belong to nodes that a lead starts itself


@dataclass(frozen=True, slots=True)
class Placement:
    """A process's place under torchrun.

    Attributes:
        rank: this process among all; rank 0 leads.
        world_size: how many processes there are.
        local_rank, local_world_size: the same, on this machine.
        host, port: of torchrun's store.
        agent_has_store: the store is there already; else rank 0 has to open it.
        key: under which the lead is announced in the store.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    port: int
    agent_has_store: bool
    key: str

    @property
    def is_lead(self) -> bool:
        """Tell whether this process leads."""
        return self.rank == 0

    @property
    def is_one_machine(self) -> bool:
        """Tell whether all processes are on this machine."""
        return self.local_world_size == self.world_size


def read_placement(environ: Mapping[str, str]) -> Placement | None:
    """Return this process's place under torchrun; None where it trains by itself."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    world_size = _number(environ, "WORLD_SIZE", 1, 1 << 20)
    if world_size == 1:
        return None
    rank = _number(environ, "RANK", 0, world_size - 1)
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", 1, world_size)
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK", 0, local_world_size - 1),
        local_world_size=local_world_size,
        host=_text(environ, "MASTER_ADDR"),
        port=_number(environ, "MASTER_PORT", 1, 65535),
        agent_has_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        # Workers that torchrun starts again must not find the lead of their predecessors.
        key=f"convoy/{environ.get('TORCHELASTIC_RUN_ID', 'none')}"
        f"/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/lead",
    )


def _text(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ConfigError(
            f"RANK and WORLD_SIZE are set, as torchrun does, but {name} is not",
            hint="Start with torchrun, or unset RANK to train without it.",
        )
    return environ[name]


def _number(environ: Mapping[str, str], name: str, low: int, high: int) -> int:
    text = _text(environ, name)
    if not (text.isascii() and text.isdigit() and low <= int(text[:20]) <= high):
        raise ConfigError(f"{name} is not what torchrun sets", got=text, allowed=f"{low} to {high}")
    return int(text)


def threads_of(placement: Placement, config: Config, cores: int) -> int:
    """Return how many CPU threads this process may use: its part of the machine's cores."""
    return config.threads or max(1, cores // placement.local_world_size)


def options_of_lead(placement: Placement, config: Config, cores: int) -> dict[str, Any]:
    """Return what torchrun changes in the lead's options: it has one node, like every rank."""
    for name in _OWN_NODES:
        if value := getattr(config, name):
            raise ConfigError(
                f"'{name}' has no place under torchrun, which starts the nodes itself", got=value
            )
    if config.strategy == "single":
        raise ConfigError(
            "the strategy 'single' has one node",
            got=placement.world_size,
            hint="Give --strategy lockstep, or start without torchrun.",
        )
    if config.nodes > 1 and config.nodes != placement.world_size:
        raise ConfigError(
            "torchrun and 'nodes' disagree on the number of nodes",
            got=config.nodes,
            allowed=f"auto or {placement.world_size}",
        )
    if config.min_nodes > placement.world_size:
        raise ConfigError(
            "'min_nodes' is more than there will be",
            got=config.min_nodes,
            allowed=f"at most {placement.world_size}",
        )
    return {"nodes": 1, "threads": threads_of(placement, config, cores)}


def order_of_rank(
    placement: Placement, config: Config, lead: tuple[str, str], *, cores: int, gpus: int
) -> Order:
    """Return what the node of a rank has to know; the lead is its address and token."""
    device = config.device
    if gpus and device in ("auto", "cuda"):
        device = f"cuda:{placement.local_rank % gpus}"
    return Order(
        lead=lead[0],
        token=lead[1],
        name=f"rank {placement.rank}",
        device=device,
        threads=threads_of(placement, config, cores),
        data_dir=config.data_dir,
        cache_dir=config.cache_dir,
    )


# ---------------------------------------------------------------- meeting


@contextlib.contextmanager
def announced(placement: Placement) -> Iterator[Serving]:
    """Decide where rank 0 will listen, and tell the other ranks for as long as it leads."""
    host = _own_address(placement)
    serving = Serving(
        token=make_token(),
        host=host,
        port=_free_port(host),
        open_to_others=True,
        expect=placement.world_size,
    )
    store = _open_store(placement)
    address = f"{serving.host}:{serving.port}"
    store.set(placement.key, json.dumps([address, serving.token]))
    try:
        yield serving
    finally:
        with contextlib.suppress(RuntimeError):  # torchrun may have gone first
            store.delete_key(placement.key)


def find_lead(placement: Placement, timeout_s: float = _MEET_WITHIN_S) -> tuple[str, str]:
    """Wait until rank 0 has told its address and the token; return both."""
    limit = timedelta(seconds=timeout_s)
    try:
        store = TCPStore(placement.host, placement.port, is_master=False, timeout=limit)
        store.wait([placement.key], limit)
        address, token = json.loads(store.get(placement.key))
    except (RuntimeError, ValueError):
        raise EnvironmentProblem(
            f"rank {placement.rank} heard nothing of rank 0 within {timeout_s:g} s",
            got=f"{placement.host}:{placement.port}",
            hint="Do all ranks run the same `convoy train`?",
        ) from None
    return address, token


def _open_store(placement: Placement) -> TCPStore:
    limit = timedelta(seconds=_MEET_WITHIN_S)
    try:
        if placement.agent_has_store:
            return TCPStore(placement.host, placement.port, is_master=False, timeout=limit)
        # A socket of our own, because the store would listen on every interface.
        listener = socket.create_server((placement.host, placement.port))
        return TCPStore(
            placement.host,
            placement.port,
            is_master=True,
            wait_for_workers=False,
            timeout=limit,
            master_listen_fd=listener.detach(),
        )
    except (RuntimeError, OSError) as error:
        raise EnvironmentProblem(
            f"torchrun's store cannot be reached: {error}",
            got=f"{placement.host}:{placement.port}",
        ) from None


def _own_address(placement: Placement) -> str:
    """Return the address by which the other ranks reach this one, which MASTER_ADDR names."""
    if placement.is_one_machine:
        return _LOOPBACK
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((placement.host, placement.port))  # sends nothing, but picks a way
            address = ipaddress.ip_address(probe.getsockname()[0])
    except OSError as error:
        raise EnvironmentProblem(
            f"MASTER_ADDR cannot be reached: {error}", got=placement.host
        ) from None
    return _LOOPBACK if address.is_loopback else str(address)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])
