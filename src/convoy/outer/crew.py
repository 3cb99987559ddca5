"""Who is to take part in a run: the nodes of this machine, and whether others may join."""

from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from convoy.config import Config
from convoy.data.images import TrainTest

LEAD_NAME = "convoy"  # what a lead's certificate calls it, by whatever address it is reached


@dataclass(frozen=True, slots=True)
class Tls:
    """What a lead proves with that it is the lead.

    Attributes:
        certificate: PEM; nodes hold a copy, and accept no other.
        key: PEM; never leaves the lead.
        path: the file that the copies are made of.
    """

    certificate: bytes
    key: bytes = field(repr=False)
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class Serving:
    """How the lead can be reached.

    Attributes:
        host: the address to listen on; others than loopback need a trusted network.
        port: the port to listen on; 0 takes a free one.
        token: what a node must know to join.
        open_to_others: nodes from elsewhere may join.
        expect: how many nodes are known to come; the first step waits for them.
        tls: encrypts what nodes and lead say to each other; None leaves it in the clear.
    """

    token: str = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 0
    open_to_others: bool = False
    expect: int = 0
    tls: Tls | None = None


@dataclass(frozen=True, eq=False)
class Crew:
    """The nodes that a lead starts, and what it hands to them.

    Attributes:
        devices: one for each node of this machine.
        threads: CPU threads of each.
        model, data: handed over as objects instead of by name.
        serving: how the lead is reached; None where it is alone.
        ledger: the file that committed updates are written to.
        requested: the config before this machine chose its arithmetic; nodes with another
            device choose theirs.
        expect: how many nodes to wait for before the first step.
    """

    devices: tuple[str, ...]
    threads: int
    ledger: Path
    serving: Serving
    requested: Config
    model: nn.Module | None = None
    data: TrainTest | None = None
    expect: int = 1
