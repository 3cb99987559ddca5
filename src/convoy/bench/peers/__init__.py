"""Other systems that train one network on several nodes, each with its best settings.

alone        every node trains by itself, nothing is exchanged: the limit
ddp          torch's DistributedDataParallel, equal shares: what everybody uses
ddp-oracle   the same with shares in proportion to the speeds, told by hand
torchft      fault-tolerant DDP of torchft, equal shares
hivemind     decentralised averaging of hivemind; every peer goes at its own pace
dtensor      DDP around the convolutions, DTensor cuts the fully connected layers over the ranks
gpipe, 1f1b  torch.distributed.pipelining: the network is cut, each node has a stage of it
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec

from convoy.bench.peers.crew import Crew, Link, Slots
from convoy.config import Config
from convoy.errors import EnvironmentProblem
from convoy.registry import Entry, Registry

_TRIAL_STEPS = 2
_PATIENCE_S = 600.0  # beyond what a measurement should take; deep networks are compiled meanwhile

Step = Callable[[], int]  # trains on some samples; returns how many the network learned from


@dataclass(frozen=True, slots=True)
class Task:
    """What a crew trains.

    Attributes:
        in_shape: channels, height and width of an image.
        batch: samples of a step, of all nodes together.
        shares: how many of them each node takes, where a system lets one say so.
        compiled: the network, by torch.compile, where a system can have it so.
        ddp: settings of DDP that differ from what is best for small networks.
    """

    model: str
    in_shape: tuple[int, int, int]
    classes: int
    batch: int
    shares: tuple[int, ...]
    memory_format: str = "channels_last"
    precision: str = "fp32"
    lr: float = 0.01
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    seed: int = 0
    compiled: bool = False
    ddp: tuple[tuple[str, object], ...] = ()

    def __post_init__(self) -> None:
        """Check that the shares are a division of the batch."""
        assert sum(self.shares) == self.batch, "the shares do not add up to the batch"
        assert min(self.shares) > 0, "a node has nothing to do"

    @property
    def num_nodes(self) -> int:
        """Return how many nodes take part."""
        return len(self.shares)

    @property
    def equal_shares(self) -> tuple[int, ...]:
        """Return the batch divided alike; the first nodes take what is left over."""
        least, over = divmod(self.batch, self.num_nodes)
        return tuple(least + (node < over) for node in range(self.num_nodes))

    @property
    def config(self) -> Config:
        """Return the same as a config, for what is made from one."""
        return Config(
            model=self.model,
            batch=self.batch,
            lr=self.lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            seed=self.seed,
            memory_format=self.memory_format,  # type: ignore[arg-type]
            precision=self.precision,  # type: ignore[arg-type]
            device="cpu",
            threads=1,
        )


@dataclass(frozen=True, slots=True)
class Peer:
    """How a system is run.

    Attributes:
        lockstep: all nodes do the same number of steps; else each goes at its own pace.
        meet: opens the place where the nodes find each other, outside of them, for a number
            of nodes; gives its address.
        join: makes a node (task, its number, address); gives the function that does a step.
    """

    lockstep: bool
    meet: Callable[[int], AbstractContextManager[str]]
    join: Callable[[Task, int, str], AbstractContextManager[Step]]


PEERS: Registry[Peer] = Registry(
    "peer",
    {
        "alone": Entry("convoy.bench.peers.alone:ALONE", "no exchange at all: the limit"),
        "ddp": Entry("convoy.bench.peers.ddp:DDP", "torch's DDP, equal shares"),
        "ddp-oracle": Entry("convoy.bench.peers.ddp:ORACLE", "torch's DDP, shares by hand"),
        "torchft": Entry("convoy.bench.peers.torchft:TORCHFT", "torchft's DDP, equal shares"),
        "hivemind": Entry("convoy.bench.peers.hivemind:HIVEMIND", "hivemind's averaging"),
        "dtensor": Entry("convoy.bench.peers.dtensor:DTENSOR", "torch's DDP and DTensor"),
        "gpipe": Entry("convoy.bench.peers.pipelining:GPIPE", "torch's pipelining, GPipe"),
        "1f1b": Entry("convoy.bench.peers.pipelining:ONE_F_ONE_B", "torch's pipelining, 1F1B"),
    },
)
_INSTALLED_APART = ("torchft", "hivemind")


def available(system: str) -> str | None:
    """Return why a system cannot run here, or None if it can."""
    PEERS.check(system)
    if system in _INSTALLED_APART and find_spec(system) is None:
        return f"{system} is not installed here (pip install {system})"
    return None


def measure_crew(
    system: str, task: Task, lab: Slots | None, *, warm_s: float, seconds: float
) -> float:
    """Return how many samples per second a whole crew trains on; see `measure_nodes`."""
    return sum(measure_nodes(system, task, lab, warm_s=warm_s, seconds=seconds))


def measure_nodes(
    system: str, task: Task, lab: Slots | None, *, warm_s: float, seconds: float
) -> tuple[float, ...]:
    """Return the samples per second that each node of a crew trains on.

    Start-up (imports, connections, a first step) happens at full speed; then the lab slows the
    nodes down. At least `warm_s` pass before measuring, and it takes about `seconds`: only
    whole steps are counted, over the time they took.
    """
    reason = available(system)
    if reason is not None:
        raise EnvironmentProblem(reason)
    peer = PEERS.get(system)
    with peer.meet(task.num_nodes) as address:
        given = [(system, task, node, address) for node in range(task.num_nodes)]
        with Crew(take_part, given) as crew:
            crew.receive(_PATIENCE_S)
            crew.place(lab)
            measure = _measure_lockstep if peer.lockstep else _measure_own_pace
            speeds = measure(crew, warm_s, seconds)
            crew.send(None)
    return speeds


def _measure_lockstep(crew: Crew, warm_s: float, seconds: float) -> tuple[float, ...]:
    """Let all nodes do a number of steps that takes about the time wanted.

    The number is told once, before; nothing but the system's own traffic goes on meanwhile.
    """
    elapsed_s, _ = do_steps(crew, _TRIAL_STEPS, 2 * warm_s)
    step_s = elapsed_s / _TRIAL_STEPS
    if elapsed_s < warm_s:
        steps = max(1, round((warm_s - elapsed_s) / step_s))
        elapsed_s, _ = do_steps(crew, steps, 2 * warm_s)
        step_s = elapsed_s / steps
    elapsed_s, samples = do_steps(crew, max(1, round(seconds / step_s)), 2 * seconds)
    return tuple(count / elapsed_s for count in samples)


def do_steps(crew: Crew, steps: int, expected_s: float) -> tuple[float, list[int]]:
    """Return how long all nodes took together, and how many samples each has learned from."""
    crew.send(("steps", steps))
    found = crew.receive(expected_s + _PATIENCE_S)
    elapsed_s = max(ended for _, _, ended in found) - min(started for _, started, _ in found)
    return elapsed_s, [samples for samples, _, _ in found]


def _measure_own_pace(crew: Crew, warm_s: float, seconds: float) -> tuple[float, ...]:
    """Measure each node over its own whole steps; all work on until the last one is measured."""
    crew.send(("seconds", warm_s, seconds))
    found = crew.receive(2 * (warm_s + seconds) + _PATIENCE_S)
    return tuple(samples / (ended - started) for samples, started, ended in found)


def take_part(link: Link, system: str, task: Task, node: int, address: str) -> None:
    """Be a node: join, do a first step, then do as told until told to stop."""
    with PEERS.get(system).join(task, node, address) as step:
        step()
        link.send("ready")
        while (order := link.receive()) is not None:
            if order[0] == "steps":
                link.send(_steps(step, order[1]))
            else:
                _, warm_s, seconds = order
                _steps_for(step, warm_s)
                link.send(_steps_for(step, seconds))
                while not link.has_message:
                    step()


# The clock is the system's, the same for all processes: moments can be compared.
Measured = tuple[int, float, float]  # samples, moment of start, moment of end


def _steps(step: Step, count: int) -> Measured:
    started = time.monotonic()
    samples = sum(step() for _ in range(count))
    return samples, started, time.monotonic()


def _steps_for(step: Step, seconds: float) -> Measured:
    started = time.monotonic()
    samples = 0
    while time.monotonic() - started < seconds:
        samples += step()
    return samples, started, time.monotonic()
