"""How ranks find out which of them share memory, and open it together."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from convoy.collectives.exchange import Exchange
from convoy.collectives.hearth import Hearth, block_bytes
from convoy.collectives.hosts import Hosts, group_by_host, key_row
from convoy.collectives.probe import gather
from convoy.collectives.rendezvous import Rendezvous
from convoy.memory.shared import SharedVector, remove

_NAME_BYTES = 64


@dataclass(frozen=True, slots=True)
class Meeting:
    """Brings ranks together; all of them call `hosts_and_hearth`.

    Attributes:
        exchange: carries what they tell each other.
        rank: which one this is.
        size: how many there are.
        deadline_s: how long a rank of this host is waited for, from then on.
        is_broken: tells that waiting has become useless.
    """

    exchange: Exchange
    rank: int
    size: int
    deadline_s: float
    is_broken: Callable[[], bool]

    def hosts_and_hearth(self, key: str | None) -> tuple[Hosts, Hearth | None]:
        """Return the ranks of each host, and the memory that ours has in common.

        A host counts as several if one of its ranks cannot open the memory.
        """
        keys = self._gather(key_row(key))
        hosts = group_by_host([bytes(row.tolist()) for row in keys])
        ours = next(ranks for ranks in hosts if self.rank in ranks)
        size = block_bytes(len(ours))
        is_maker = self.rank == ours[0] and len(ours) > 1
        made = SharedVector.make(size, torch.uint8) if is_maker else None
        try:
            names = self._gather(_name_row(made))
            opened = made or SharedVector.open(_name_of(names[ours[0]]), size, torch.uint8)
            hearth = self._hearth(opened, ours) if opened is not None else None
            is_well = self._gather(_flag(hearth is not None or len(ours) == 1)).view(-1).tolist()
        finally:
            if made is not None:
                remove(made.name)  # it vanishes with the last one that has it open
        if hearth is None or not all(is_well[rank] for rank in ours):
            return _apart(hosts, is_well), None
        hearth.watch()
        return _apart(hosts, is_well), hearth

    def _gather(self, row: Tensor) -> Tensor:
        return gather(self.exchange, self.rank, range(self.size), row)

    def _hearth(self, block: SharedVector, ranks: tuple[int, ...]) -> Hearth:
        place = ranks.index(self.rank)
        meet = Rendezvous(block.vector, place, ranks, self.deadline_s, self.is_broken)
        return Hearth(block.vector, len(ranks), place, meet)


def _apart(hosts: Hosts, is_well: list[int]) -> Hosts:
    """Let every rank of a host that has no memory in common be a host of its own."""
    together = [ranks for ranks in hosts if all(is_well[rank] for rank in ranks)]
    apart = [(rank,) for ranks in hosts if ranks not in together for rank in ranks]
    return tuple(sorted([*together, *apart]))


def _flag(value: bool) -> Tensor:
    return torch.tensor([value], dtype=torch.uint8)


def _name_row(made: SharedVector | None) -> Tensor:
    text = made.name.encode() if made is not None else b""
    return torch.tensor(list(text.ljust(_NAME_BYTES, b"\0")), dtype=torch.uint8)


def _name_of(row: Tensor) -> str:
    return bytes(row.tolist()).rstrip(b"\0").decode("ascii", "replace")
