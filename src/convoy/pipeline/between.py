"""What lies between a node and the stages beside its own: how fast, and through what."""

import time
from collections.abc import Sequence

import torch

from convoy.collectives.hosts import digest_row, host_key
from convoy.outer.membership import Formation, Group
from convoy.pipeline.flow import Neighbours
from convoy.pipeline.forms import Form
from convoy.pipeline.layout import Layout
from convoy.pipeline.slots import Slots, make_slots, open_slots
from convoy.pipeline.traffic import Channel

_MESSAGE_BYTES = 1 << 20
_LEFT, _RIGHT = -1, 1


class Between:
    """The ways from one node to its neighbours.

    Args:
        group: carries messages.
        formation: who is in it; a member's rank is its stage.
        forms: of each unit's output.
        batch: samples of the largest batch.
        device: that this node computes on.
    """

    def __init__(
        self,
        group: Group,
        formation: Formation,
        forms: Sequence[Form],
        batch: int,
        device: torch.device,
    ) -> None:
        self._group, self._formation = group, formation
        self._forms, self._batch, self._device = forms, batch, device
        self._cut: dict[int, Form] = {}  # what passes, by side
        self._made: dict[int, Slots] = {}
        self._seen: dict[int, Slots] = {}

    def link_speed(self) -> float:
        """Return the bytes per second to the next stage, by one message; 0 where there is none."""
        rank, last = self._formation.rank, self._formation.size - 1
        if self._is_nccl:
            return 0.0
        took = 0.0
        message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
        for sender in range(last):  # one after the other: links may be shared
            if rank == sender:
                self._group.receive(message[:1], sender + 1)  # it is ready
                started = time.perf_counter()
                self._group.send(message, sender + 1)
                self._group.receive(message[:1], sender + 1)
                took = time.perf_counter() - started
            elif rank == sender + 1:
                self._group.send(message[:1], sender)
                self._group.receive(message, sender)
                self._group.send(message[:1], sender)
        return _MESSAGE_BYTES / took if took else 0.0

    def meet(self, layout: Layout, leads: Sequence[int]) -> None:
        """Find out which neighbour sees the same memory: tensors need not travel there."""
        rank, size = self._formation.rank, self._formation.size
        cuts = {side: min(rank, rank + side) for side in (_LEFT, _RIGHT) if 0 <= rank + side < size}
        self._cut = {side: self._forms[layout.bounds[cut + 1] - 1] for side, cut in cuts.items()}
        self._made, self._seen = {}, {}
        if self._is_nccl:
            return
        counts = {side: leads[cut] + 2 for side, cut in cuts.items()}
        own, sent = digest_row(host_key()), []
        for side, form in self._cut.items():
            self._made[side] = make_slots(counts[side], form.numel(self._batch), form.dtype)
            names = self._made[side].names(counts[side])
            sent.append(self._group.start_send(own, rank + side))
            sent.append(self._group.start_send(names, rank + side))
        for side, form in self._cut.items():
            theirs, names = torch.zeros_like(own), Slots(()).names(counts[side])
            self._group.receive(theirs, rank + side)
            self._group.receive(names, rank + side)
            if torch.equal(theirs, own):
                self._seen[side] = open_slots(names, form.numel(self._batch), form.dtype)
            else:  # who plays another machine, behind a link of its own, is one
                self._seen[side] = Slots(())
        for work in sent:
            self._group.wait(work)
        self._keep_what_is_seen()

    def _keep_what_is_seen(self) -> None:
        """Use what a neighbour could open; nobody else is to open it."""
        for side, made in self._made.items():
            theirs = torch.zeros(1)
            ours = torch.tensor([float(bool(self._seen[side]))])
            work = self._group.start_send(ours, self._formation.rank + side)
            self._group.receive(theirs, self._formation.rank + side)
            self._group.wait(work)
            made.hide()
            if not theirs.item():
                self._made[side] = Slots(())

    def channels(self) -> Neighbours:
        """Return new channels for a segment."""
        numbers = 1 + 2 * self._formation.size  # is it the last; how long each was busy and waited
        return Neighbours(
            from_left=self._channel(_LEFT, self._seen, numbers),
            to_left=self._channel(_LEFT, self._made, 1),
            from_right=self._channel(_RIGHT, self._seen, 1),
            to_right=self._channel(_RIGHT, self._made, numbers),
        )

    def _channel(self, side: int, slots: dict[int, Slots], numbers: int) -> Channel | None:
        if side not in self._cut:
            return None
        wire = self._device if self._is_nccl else torch.device("cpu")
        return Channel(
            self._group,
            self._formation.rank + side,
            self._cut[side],
            numbers,
            self._device,
            wire,
            slots.get(side),
        )

    @property
    def _is_nccl(self) -> bool:
        return self._formation.backend == "nccl"
