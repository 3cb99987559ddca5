"""Who trains together: torchft's Lighthouse decides it, a process group carries it out.

torchft asks its Lighthouse at every step. Here a group stays together until one of its members
is lost or somebody waits to join, so that an undisturbed step costs no question at all:

    form    every node that wants to take part asks the Lighthouse, and all get one answer
    reduce  any number of steps, with nothing but all-reduce between the members
    lost    a member's connection breaks, or the lead breaks the group: all ask again

Every formation has a prefix of its own in the store, so that a late message of an old group
never meets a new one.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchft.coordination import LighthouseClient, LighthouseServer
from torchft.process_group import ProcessGroupNCCL, ProcessGroupWrapper

from convoy.collectives.allreduce import AllReduce, Summing
from convoy.collectives.wires import PeerLostError
from convoy.errors import ConvoyError
from convoy.outer.gloo import BoundGloo
from convoy.outer.star import LONGEST_BYTES, Star, is_star_faster

_BEAT_S = 0.1  # between two signs of life
_SILENCE_S = 0.5  # after so long without one, the Lighthouse no longer waits for a node
_PATIENCE_S = 60.0  # how long a formation waits for a node that lives but does not ask
_TICK_MS = 50  # how often the Lighthouse looks whether a group is complete
_CONNECT = timedelta(seconds=10)
_CONFIGURE = timedelta(seconds=5)  # for all members to connect
# An answer of the Lighthouse may name a node that has just died. By this time it has noticed.
_MOURNED_S = 2.0


class GroupLostError(ConvoyError):
    """A member of the group is gone, or the group was broken up; its step is not committed."""


@dataclass(frozen=True, slots=True)
class Member:
    """A node as the others of its group see it.

    Attributes:
        identity: unique for each start of a node's process.
        number: the node's number in the run, by which people know it.
        position: how far its state is; see Progress.position.
        speed: samples per second, as far as it knows.
        device: what it computes on; a GPU's name tells it from any other.
        layout: how it keeps weights in memory.
        attempt: how often it has asked.
    """

    identity: str
    number: int
    position: int
    speed: float
    device: str
    layout: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Formation:
    """The members of a group in the order of their ranks, and which of them we are."""

    quorum: int
    members: tuple[Member, ...]
    rank: int

    @property
    def size(self) -> int:
        """Return how many members there are."""
        return len(self.members)

    @property
    def position(self) -> int:
        """Return how far the group is: as far as its furthest member."""
        return max(member.position for member in self.members)

    @property
    def source(self) -> int:
        """Return the rank whose state counts."""
        return next(r for r, member in enumerate(self.members) if member.position == self.position)

    @property
    def behind(self) -> tuple[int, ...]:
        """Return the ranks that must be given the state."""
        return tuple(r for r, member in enumerate(self.members) if member.position < self.position)

    @property
    def prefix(self) -> str:
        """Return a name that no other formation has."""
        asked = "-".join(f"{member.identity}.{member.attempt}" for member in self.members)
        return f"{self.quorum}-{asked}"

    @property
    def same_layout(self) -> bool:
        """Tell whether all members keep their weights in the same order in memory."""
        return len({member.layout for member in self.members}) == 1

    @property
    def backend(self) -> str:
        """Return what carries the gradients: NCCL where every member has a GPU to itself."""
        devices = [member.device for member in self.members]
        on_gpus = all("cuda" in device for device in devices)
        return "nccl" if on_gpus and len(set(devices)) == len(devices) > 1 else "gloo"


def read_quorum(quorum: int, participants: Sequence[Any], identity: str) -> Formation:
    """Turn the Lighthouse's answer into a formation; every member gets the same order."""
    members = sorted(
        (
            Member(
                identity=participant.replica_id,
                number=int(participant.data["number"]),
                position=int(participant.step),
                speed=float(participant.data["speed"]),
                device=str(participant.data["device"]),
                layout=str(participant.data["layout"]),
                attempt=int(participant.data["attempt"]),
            )
            for participant in participants
        ),
        key=lambda member: (member.number, member.identity),
    )
    rank = [member.identity for member in members].index(identity)
    return Formation(quorum, tuple(members), rank)


class Group:
    """A node's place among the others.

    Args:
        identity: unique for this start of the node's process.
        number: the node's number in the run.
        device: what it computes on.
        layout: how it keeps weights in memory.
        address: of this node, for the connections between members.
        lighthouse: where to ask.
        store: "host:port" of the store through which members find each other.
        timeout_s: how long an exchange may take before the group counts as lost.
    """

    def __init__(
        self,
        *,
        identity: str,
        number: int,
        device: str,
        layout: str,
        address: str,
        lighthouse: str,
        store: str,
        timeout_s: float,
    ) -> None:
        self._identity = identity
        self._number = number
        self._device = device
        self._layout = layout
        self._address = address
        self._lighthouse = lighthouse
        self._store = store
        self._timeout = timedelta(seconds=timeout_s)
        self._client = LighthouseClient(lighthouse, _CONNECT)
        self._attempt = 0
        self._process_group: ProcessGroupWrapper | None = None
        self._connecting: _Connecting | None = None
        self._identities: set[str] = set()
        self._lost_at: dict[str, float] = {}
        self._star: Star | None = None
        self._sums: AllReduce | None = None
        self._heart: _Heart | None = None
        self._lock = threading.Lock()

    def show_up(self) -> None:
        """Give signs of life from now on: no group forms without us until we leave."""
        if self._heart is None:
            self._heart = _Heart(self._lighthouse, self._identity)

    def form(self, position: int, speed: float, patience_s: float) -> Formation:
        """Ask who takes part, and connect with them.

        Raises:
            TimeoutError: no group came together in time.
            GroupLostError: one did, but a member was lost before all were connected.
        """
        self.break_up()
        self._forget_ways()  # they were for the members of the last group
        self._attempt += 1
        self.show_up()
        about = {
            "number": self._number,
            "speed": speed,
            "device": self._device,
            "layout": self._layout,
            "attempt": self._attempt,
        }
        try:
            answer = self._client.quorum(
                replica_id=self._identity,
                timeout=timedelta(seconds=patience_s),
                address=self._address,
                store_address=self._store,
                step=position,
                world_size=1,
                shrink_only=False,
                data=about,
            )
        except RuntimeError as error:  # the lead is gone, which its own link will tell
            time.sleep(_BEAT_S)
            raise GroupLostError(f"nobody can be asked: {_brief(error)}") from error
        formation = read_quorum(int(answer.quorum_id), answer.participants, self._identity)
        if formation.size > 1:
            self._connect(formation)
        return formation

    def _connect(self, formation: Formation) -> None:
        with self._lock:
            self._identities = {member.identity for member in formation.members}
            self._refuse_the_dead()
            connecting = self._connecting = _Connecting(lambda: self._configured(formation))
        group = connecting.result()
        with self._lock:
            if self._connecting is not connecting:
                raise GroupLostError("the group was broken up before it was connected")
            self._connecting, self._process_group = None, group

    def _refuse_the_dead(self) -> None:
        now = time.monotonic()
        for identity in self._identities:
            if now - self._lost_at.get(identity, -_MOURNED_S) < _MOURNED_S:
                raise GroupLostError("a member was lost before the group was connected")

    def _configured(self, formation: Formation) -> ProcessGroupWrapper:
        kind = ProcessGroupNCCL if formation.backend == "nccl" else BoundGloo
        group = kind(timeout=_CONFIGURE)
        if isinstance(group, BoundGloo):
            group.bind(self._address)
        group.configure(
            f"{self._store}/{formation.prefix}",
            self._identity,
            formation.rank,
            formation.size,
            formation.quorum,
        )
        return group

    def _forget_ways(self) -> None:
        sums, self._sums, self._star = self._sums, None, None
        if sums is not None:
            sums.close()

    def share_memory(self, formation: Formation) -> None:
        """Add up through the memory of each host, and by butterfly between hosts."""
        if formation.size == 1 or formation.backend != "gloo":
            return
        group = self._process_group
        self._sums = AllReduce(
            self,
            formation.rank,
            formation.size,
            deadline_s=self._timeout.total_seconds(),
            is_broken=lambda: self._process_group is not group,
        )
        with _as_group_lost():
            self._sums.meet()

    def choose_way(self, formation: Formation, numel: int, dtype: torch.dtype) -> None:
        """Find out whether messages of a length are added up faster over a star."""
        self._star = None
        too_long = numel * dtype.itemsize > LONGEST_BYTES
        if formation.size < 3 or formation.backend != "gloo" or too_long or self._sums is not None:
            return
        speeds = [member.speed for member in formation.members]
        centre = speeds.index(max(speeds))
        star = Star(self, formation.rank, formation.size, centre)
        if is_star_faster(star, self, numel, dtype):
            self._star = star

    def expect(self, like: Tensor) -> None:
        """Get ready for the next sum, where that saves time: it is of a tensor like this one."""
        if self._star is not None and like.device.type == "cpu":
            self._star.expect(like)

    def sum(self, tensor: Tensor) -> None:
        """Add up a tensor over all members, in place, in the faster way."""
        if self._sums is not None and tensor.device.type == "cpu":
            with _as_group_lost():
                self._sums.sum(tensor)
        elif self._star is not None and tensor.device.type == "cpu":
            self._star.sum(tensor)
        else:
            self.sum_around(tensor)

    def mix(self, tensor: Tensor, step: int) -> None:
        """Make a tensor the mean of ours and of our partner's in this step."""
        assert self._sums is not None
        with _as_group_lost():
            self._sums.mix(tensor, step)

    def sum_around(self, tensor: Tensor) -> None:
        """Add up a tensor over all members by an all-reduce, in place."""
        self.wait(self._start_around(tensor))

    def start_sum(self, tensor: Tensor) -> "dist.Work | Summing":
        """Begin to add up a tensor over all members, in place."""
        if self._sums is not None and tensor.device.type == "cpu":
            return self._sums.start(tensor)
        return self._start_around(tensor)

    def _start_around(self, tensor: Tensor) -> dist.Work:
        options = dist.AllreduceOptions()
        options.timeout = self._timeout
        return self._call(lambda group: group.allreduce([tensor], options))

    def wait(self, work: "dist.Work | Summing") -> None:
        """Wait for an exchange that was begun."""
        if isinstance(work, Summing):
            with _as_group_lost():
                work.wait()
            return
        try:
            work.wait(self._timeout)
        except Exception as error:  # torch reports a lost peer in many ways
            raise GroupLostError(f"a member was lost: {_brief(error)}") from error

    def send(self, tensor: Tensor, rank: int) -> None:
        """Send a tensor to one member."""
        self.wait(self.start_send(tensor, rank))

    def receive(self, tensor: Tensor, rank: int) -> None:
        """Fill a tensor with what a member sends."""
        self.wait(self.start_receive(tensor, rank))

    def start_send(self, tensor: Tensor, rank: int) -> dist.Work:
        """Begin to send a tensor to one member."""
        return self._call(lambda group: group.send([tensor], rank, 0))

    def start_receive(self, tensor: Tensor, rank: int) -> dist.Work:
        """Begin to fill a tensor with what a member sends."""
        return self._call(lambda group: group.recv([tensor], rank, 0))

    def _call(self, start: Any) -> dist.Work:  # noqa: ANN401 - a function of the group
        with self._lock:
            group = self._process_group
        if group is None:
            raise GroupLostError("the group was broken up")
        try:
            work: dist.Work = start(group)
        except Exception as error:
            raise GroupLostError(f"a member was lost: {_brief(error)}") from error
        return work

    def break_up(self, because_of: str | None = None) -> None:
        """End the group at once, from any thread: whoever waits for it is told.

        With `because_of`, only a group that this identity is a member of.
        """
        with self._lock:
            if because_of is not None:
                self._lost_at[because_of] = time.monotonic()
                if because_of not in self._identities:
                    return
            connecting, self._connecting = self._connecting, None
            group, self._process_group = self._process_group, None
        if connecting is not None:
            connecting.give_up()
        if group is not None:
            group.abort()

    def leave(self) -> None:
        """Take no part any more; the Lighthouse will not wait for us."""
        self.break_up()
        if self._heart is not None:
            self._heart.stop()
            self._heart = None


class _Connecting:
    """A group being connected, in a thread that can be left behind: gloo cannot be interrupted.

    It would wait for a member that has died until its time is over. Left behind, the thread ends
    by then; a group that it has connected after all is dropped, and closed with it.
    """

    def __init__(self, connect: Callable[[], ProcessGroupWrapper]) -> None:
        self._outcome: Future[ProcessGroupWrapper] = Future()
        threading.Thread(target=self._run, args=(connect,), name="connect", daemon=True).start()

    def _run(self, connect: Callable[[], ProcessGroupWrapper]) -> None:
        with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
            try:
                self._outcome.set_result(connect())
            except Exception as error:  # torch reports a lost peer in many ways
                what = f"the group could not connect: {_brief(error)}"
                self._outcome.set_exception(GroupLostError(what))

    def result(self) -> ProcessGroupWrapper:
        """Wait for the group."""
        return self._outcome.result()

    def give_up(self) -> None:
        """Let whoever waits for the group wait no longer, from any thread."""
        with contextlib.suppress(InvalidStateError):
            self._outcome.set_exception(GroupLostError("a member was lost while connecting"))


class _Heart:
    """Tells the Lighthouse that this node lives, whatever the training thread is busy with."""

    def __init__(self, lighthouse: str, identity: str) -> None:
        # A client of its own: the other one may be waiting for a quorum.
        self._client = LighthouseClient(lighthouse, _CONNECT)
        self._identity = identity
        self._stopped = threading.Event()
        self._client.heartbeat(identity)
        threading.Thread(target=self._beat, name="heart", daemon=True).start()

    def _beat(self) -> None:
        while not self._stopped.wait(_BEAT_S):
            try:
                self._client.heartbeat(self._identity)
            except Exception:  # noqa: S112 - the lead is away; its own link tells us
                continue

    def stop(self) -> None:
        """Fall silent."""
        self._stopped.set()


@contextlib.contextmanager
def _as_group_lost() -> Iterator[None]:
    """Tell of a lost peer in this module's own way."""
    try:
        yield
    except PeerLostError as error:
        raise GroupLostError(f"a member was lost: {error}") from error


def start_lighthouse(host: str, min_nodes: int) -> LighthouseServer:
    """Start the server that decides who is in a group."""
    return LighthouseServer(
        bind=f"{host}:0",
        min_replicas=min_nodes,
        join_timeout_ms=round(_PATIENCE_S * 1000),
        quorum_tick_ms=_TICK_MS,
        heartbeat_timeout_ms=round(_SILENCE_S * 1000),
    )


def _brief(error: Exception) -> str:
    """Return what an engine says first, without the place in its source and its advice."""
    line = (str(error).splitlines() or [""])[0].rsplit("] ", 1)[-1]
    return line.split(". ", 1)[0].rstrip(".")[:200] or type(error).__name__
