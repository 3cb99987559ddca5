"""The sum of a vector over all ranks, in the way that is fastest where they are.

    one host        through its memory
    several hosts   through the memory of each, then one rank of each over the wires, then back
    no memory       over the wires

Over the wires the method depends on the length: the model of `cost` chooses, from what a short
probe has measured when the ranks met. All ranks must ask for the same sums in the same order.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from convoy.collectives.cost import Choice, Line, Link, Method, choose
from convoy.collectives.exchange import Exchange
from convoy.collectives.hearth import Hearth
from convoy.collectives.hosts import Hosts
from convoy.collectives.meeting import Meeting
from convoy.collectives.probe import measure_around, measure_links
from convoy.collectives.schedule import butterfly_size, mixing, partner, relabelled
from convoy.collectives.wires import AroundWires, PeerLostError, Wires
from convoy.errors import ConfigError


class Summing:
    """A sum that was begun."""

    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def wait(self) -> None:
        """Wait until the tensor holds the sum; raise what went wrong."""
        self._future.result()


class AllReduce:
    """Adds up tensors over ranks; all get the same bits.

    Args:
        wires: carry messages between the ranks.
        rank: which one this is.
        size: how many there are.
        host: what ranks that share a host's memory have in common; by default this machine's own
            key, in which other network namespaces are other hosts.
        deadline_s: how long a rank of this host is waited for; the wires have their own deadline.
        is_broken: tells that waiting has become useless; asked every 50 ms.
    """

    def __init__(
        self,
        wires: Wires,
        rank: int,
        size: int,
        *,
        host: str | None = None,
        deadline_s: float = 60.0,
        is_broken: Callable[[], bool] = lambda: False,
    ) -> None:
        self._wires, self._rank, self._size = wires, rank, size
        self._host, self._deadline_s, self._is_broken = host, deadline_s, is_broken
        self._exchange = Exchange(wires)
        self._hosts: Hosts = ()
        self._hearth: Hearth | None = None
        self._links: tuple[Link, ...] = ()
        self._around: Line | None = None
        self._choices: dict[tuple[int, int], Choice] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None
        self._is_lost = False

    @property
    def hosts(self) -> Hosts:
        """Return the ranks of each host, once they have met."""
        return self._hosts

    @property
    def links(self) -> tuple[Link, ...]:
        """Return what the probe has found about the first rank of each host; nothing if alone."""
        return self._links

    def meet(self) -> None:
        """Find out who shares memory, and how fast the links are; the first sum does it too."""
        if not self._hosts:
            self._guarded(self._meet)

    def sum(self, tensor: Tensor) -> None:
        """Add up a tensor over all ranks, in place.

        Raises:
            PeerLostError: a rank is gone, or did not come in time; wires may raise their own.
        """
        self._in_order(lambda: self._sum(tensor))

    def start(self, tensor: Tensor) -> Summing:
        """Begin to add up a tensor over all ranks, in place, while the caller goes on.

        Sums are done one after the other, in the order in which they were begun.
        """
        return Summing(self._submit(lambda: self._sum(tensor)))

    def mix(self, tensor: Tensor, step: int) -> None:
        """Make a tensor the mean of ours and our partner's of this step (butterfly mixing).

        Raises:
            ConfigError: the number of ranks is no power of two.
        """
        if self._size != butterfly_size(self._size):
            raise ConfigError(
                "the number of ranks does not suit butterfly mixing",
                got=self._size,
                allowed="1, 2, 4, 8, ...",
            )
        self._in_order(lambda: self._mix(tensor, step))

    def choice(self, length: int, itemsize: int) -> Choice | None:
        """Return how vectors are added up between hosts, and why; None where there is one host."""
        self.meet()
        return self._chosen(length, itemsize) if len(self._hosts) > 1 else None

    def close(self) -> None:
        """Wait for what was begun, and take no part any more; ranks that wait for us are told."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown()
        self._leave()

    # ---------------------------------------------------------------- in order, whole or not at all

    def _in_order(self, act: Callable[[], None]) -> None:
        if self._last is not None and not self._last.done():
            self._submit(act).result()
        else:
            self._guarded(act)

    def _submit(self, act: Callable[[], None]) -> "Future[None]":
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "convoy-sums")
        self._last = self._worker.submit(self._guarded, act)
        return self._last

    def _guarded(self, act: Callable[[], None]) -> None:
        """Act; after an error ranks are out of step, and there is no way on."""
        if self._is_lost:
            raise PeerLostError("a rank was lost in an earlier sum, or the sums were closed")
        try:
            act()
        except BaseException:
            self._leave()
            raise

    def _leave(self) -> None:
        hearth, self._hearth = self._hearth, None
        self._is_lost = True
        if hearth is not None:
            hearth.leave()

    # ---------------------------------------------------------------- the work

    def _meet(self) -> None:
        exchange, rank = self._exchange, self._rank
        meeting = Meeting(exchange, rank, self._size, self._deadline_s, self._is_broken)
        self._hosts, self._hearth = meeting.hosts_and_hearth(self._host)
        heads = self._heads
        if len(heads) > 1:
            self._links = measure_links(exchange, rank, self._size, heads)
        if len(heads) == self._size > 1 and isinstance(self._wires, AroundWires):
            self._around = measure_around(exchange, self._wires, rank, heads)

    def _sum(self, tensor: Tensor) -> None:
        if not self._hosts:
            self._meet()
        vector = _flat(tensor)
        if self._hearth is not None:
            self._hearth.sum(vector)
        if len(self._hosts) > 1:
            if self._rank in self._heads:
                self._sum_over_wires(vector)
            if self._hearth is not None:
                self._hearth.spread(vector, source=0)
        _put_back(vector, tensor)

    def _sum_over_wires(self, vector: Tensor) -> None:
        chosen = self._chosen(vector.numel(), vector.element_size())
        if chosen.method is Method.AROUND:
            assert isinstance(self._wires, AroundWires)
            self._wires.sum_around(vector)
            return
        heads = self._heads
        schedule = relabelled(chosen.schedule(heads.index(self._rank)), heads)
        self._exchange.run(schedule, vector)

    def _chosen(self, length: int, itemsize: int) -> Choice:
        key = length, itemsize
        if key not in self._choices:
            self._choices[key] = choose(length, itemsize, self._links, self._around)
        return self._choices[key]

    def _mix(self, tensor: Tensor, step: int) -> None:
        if not self._hosts:
            self._meet()
        vector = _flat(tensor)
        ours = next(ranks for ranks in self._hosts if self._rank in ranks)
        partners = {rank: partner(rank, self._size, step) for rank in ours}
        if self._hearth is not None and set(partners.values()) == set(ours):
            self._hearth.mix(vector, ours.index(partners[self._rank]))
        elif self._size > 1:
            self._exchange.run(mixing(self._rank, self._size, step, vector.numel()), vector)
            vector.mul_(0.5)
        _put_back(vector, tensor)

    @property
    def _heads(self) -> list[int]:
        """Return the first rank of each host."""
        return [ranks[0] for ranks in self._hosts]


def _flat(tensor: Tensor) -> Tensor:
    """Return a tensor as a vector of the CPU's: the tensor itself where it is one, or a copy."""
    return tensor.detach().cpu().contiguous().view(-1)


def _put_back(vector: Tensor, tensor: Tensor) -> None:
    if vector.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(vector.view(tensor.shape))
