"""The strategy `hybrid`: convolutions by samples, fully connected layers by neurons.

Steps are lockstep's, with shares of a batch by measured speed. But a node holds only its part of
the fully connected layers: where one dies, a part of the network dies with it, and the others go
back to the last checkpoint, cut the layers anew for those who are left, and go on. Where members
come or go by agreement, the network is brought together before, and nothing is lost.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn, optim

from convoy.collectives.hosts import host_key
from convoy.data.batches import Batch, Epoch
from convoy.errors import EnvironmentProblem
from convoy.hybrid.allot import allot, memory_of_each, samples_within
from convoy.hybrid.computation import Computation, Marks
from convoy.hybrid.exchange import Exchange
from convoy.hybrid.head import find_parts, kinds_that_fit, lay_out
from convoy.hybrid.layout import Dense, Kind, Setting
from convoy.hybrid.mixing import Mixing, is_power_of_two
from convoy.hybrid.split import Split
from convoy.hybrid.wording import describe_layout
from convoy.inner.activations import kept_of_a_sample
from convoy.inner.executor import Sums
from convoy.inner.memory import free_memory
from convoy.monitor.events import NoteEvent
from convoy.outer.allocation.plan import Rules
from convoy.outer.allocation.shares import apportion
from convoy.outer.groupwork import LeadLink
from convoy.outer.job import Job
from convoy.outer.lockstep import Lockstep
from convoy.outer.membership import Group, GroupLostError
from convoy.outer.reduction import StepSums
from convoy.outer.state import unpack

_TEST_AT_ONCE = 500  # samples of one node


class Hybrid(Lockstep):
    """One node's part in a hybrid run."""

    def __init__(self, job: Job, group: Group, lead: LeadLink, speed: float) -> None:
        super().__init__(job, group, lead, speed)
        self._parts = find_parts(job.model)
        self._split: Split | None = None  # None: the network is whole
        self._memory: list[float] = []  # bytes that each member has to give
        trunk, shape = nn.Sequential(*self._parts.trunk), job.data.train.shape_CHW
        self._sample_bytes = kept_of_a_sample(trunk, shape, job.executor.arithmetic)

    # ---------------------------------------------------------------- groups

    def _begin_group(self) -> None:
        setting = Setting(self.formation.size, self._job.config.batch)
        kinds = kinds_that_fit(self._parts, self._job.config.layers, setting)
        if self.formation.size == 1 or not kinds:  # more nodes than neurons: all hold all
            self._layout_in_words = "fully connected layers are on every node"
            self._memory = []
            super()._begin_group()
            return
        self._memory = self._free_memory()
        self._begin_plan()
        self._group.share_memory(self.formation)
        widths = self._widths()
        self._cut(kinds, widths)
        shared = sum(p.numel() for p in self._computation.shared.parameters())
        self._layout_in_words = describe_layout(self._parts.blocks, kinds, widths, setting, shared)

    def _cut(self, kinds: tuple[Kind, ...], widths: list[tuple[int, ...]]) -> None:
        """Keep this node's parts of the layers that are cut, and get ready to train them."""
        config, formation, executor = self._job.config, self.formation, self._job.executor
        device = self._job.train.device
        wire = torch.device("cpu") if formation.backend == "gloo" else device
        trunk, layers = lay_out(self._parts, kinds, widths, formation.size)
        self._exchange = Exchange(self._group, formation.rank, formation.size, device, wire)
        self._split = Split(layers, executor.optimizer, formation.rank)
        self._computation = Computation(
            trunk,
            layers,
            self._split,
            self._exchange,
            executor.arithmetic,
            smoothing=config.label_smoothing,
            scheme=config.boundary,
        )
        shared = self._computation.shared
        self._optimizer, self._own_optimizer = self._split.make_optimizers(shared, config)
        self._mixing: Mixing | None = None
        if config.mixing and is_power_of_two(formation.size):
            self._mixing = Mixing(shared, self._optimizer, self._group, formation.size)
            self._reduction = self._mixing
        else:
            self._begin_reduction(shared)

    def _free_memory(self) -> list[float]:
        """Return what each member has to give; all must call this."""
        formation = self.formation
        device = formation.members[formation.rank].device
        told = torch.zeros(2, formation.size, dtype=torch.float64)
        told[0, formation.rank] = free_memory(self._job.train.device)
        told[1, formation.rank] = _number_of(f"{host_key()} {device}")
        free, places = self._sum(told).tolist()
        return memory_of_each(free, places)

    def _group_rules(self) -> Rules:
        """Return the rules: nobody gets more samples than it has the memory for."""
        most = samples_within(self._sample_bytes, self._memory)
        return replace(super()._group_rules(), most=most)

    def _widths(self) -> list[tuple[int, ...]]:
        """Return each member's neurons of every fully connected layer: as its share, and memory."""
        shares = [max(1, share) for share in self._plan.shares]
        number_bytes = self._job.executor.arithmetic.dtype.itemsize
        found = []
        for layer in self._dense():
            try:
                row = layer.inputs * number_bytes
                found.append(allot(layer.outputs, shares, row, self._memory))
            except MemoryError:
                raise EnvironmentProblem(
                    f"the layer '{layer.name}' does not fit into the memory of all nodes together",
                    got=f"{layer.weights * number_bytes:,} bytes, three times",
                    hint="Let more nodes join.",
                ) from None
        return found

    def _dense(self) -> Iterator[Dense]:
        return (block for block in self._parts.blocks if isinstance(block, Dense))

    def _emit_group(self, why: str, pause_s: float) -> None:
        super()._emit_group(why, pause_s)
        if self.formation.size > 1 and self._is_scribe:
            self._job.events.emit(NoteEvent(text=self._layout_in_words))

    def _go_back(self) -> None:
        """Return to the last checkpoint, where a part of the network was lost."""
        if self._split is None:
            return
        saved = unpack(self._lead.fetch_state())
        self._split.make_room()
        self._split = None
        self._job.take_over(saved, "the last checkpoint")
        self._account.go_back(self._job.progress.updates)

    def _change_group(self) -> None:
        self._make_whole()
        super()._change_group()

    def _step_aside_if_told(self) -> None:
        if self._plan.left_out:
            self._make_whole()
        super()._step_aside_if_told()

    def _make_whole(self) -> None:
        """Give every member the whole network: some of them are about to go."""
        if self._split is not None:
            self._settle()
            self._split.collect(self._exchange, range(self.formation.size))
            self._split = None

    def _settle(self) -> None:
        if self._mixing is not None:
            self._mixing.settle()

    # ---------------------------------------------------------------- steps

    def _gradients(
        self, epoch: Epoch, start: int, shares: tuple[int, ...], reduction: StepSums
    ) -> Sums | None:
        if self._split is None:
            return super()._gradients(epoch, start, shares, reduction)
        total = sum(shares)
        offset, share = self._seed_share(start, shares)
        images = epoch.batch(offset, offset + share).images_NCHW if share else None
        labels, keys = epoch.marks(start, start + total)
        self._optimizer.zero_grad(set_to_none=True)
        self._blocked_before = self._exchange.waited_s

        def begin_reduction() -> None:
            reduction.begin(self._group, ready=self._computation.ready_early)

        marks = Marks(shares, labels, keys)
        sums = self._computation.gradients(images, marks, total, begin_reduction)
        # Nothing but a checkpoint can undo this. Nothing else could anyway: where the sums that
        # are on their way fail, a member is lost, and with it a part of the network.
        _move(self._own_optimizer, self._job.schedule.rate(self._job.progress.updates))
        return sums

    def _take_blocked_s(self) -> float:
        return self._exchange.waited_s - self._blocked_before if self._split is not None else 0.0

    def _update(self, rate: float) -> None:
        if self._split is None:
            super()._update(rate)
            return
        if self._mixing is not None:
            self._mixing.scale()
        _move(self._optimizer, rate)
        if self._mixing is not None:
            self._mixing.mix(self._job.progress.updates)

    # ---------------------------------------------------------------- epochs and checkpoints

    def _average_statistics(self) -> None:
        """Make the network whole on the scribe."""
        super()._average_statistics()
        if self._split is not None:
            self._settle()
            self._split.collect(self._exchange, [self.formation.source])

    def _save(self, reason: str) -> None:
        super()._save(reason)
        self._release()

    def _finish_epoch(self) -> str | None:
        reason = super()._finish_epoch()
        self._release()
        return reason

    def _release(self) -> None:
        if self._split is not None:
            self._split.release()

    def _finish_interrupted(self) -> None:
        self._flush()
        try:
            self._save("interrupted")
        except GroupLostError:
            self._go_back()  # a part of the network is gone: the last checkpoint stands

    def _evaluate(self) -> tuple[float, int]:
        """Test the network: each node its samples up to the head, all of them together beyond."""
        if self._split is None:
            return super()._evaluate()
        rank, test = self.formation.rank, self._job.test
        parts = apportion(self._speeds(), len(test))
        first = sum(parts[:rank])
        batches = test.in_order(_TEST_AT_ONCE, first, first + parts[rank])
        found = torch.zeros(2, dtype=torch.float64)
        for marks in self._test_rounds(parts):
            batch: Batch | None = next(batches, None)
            images = batch.images_NCHW if batch is not None else None
            mirrored = self._job.config.mirrored_test
            loss, correct = self._computation.evaluate(images, marks, mirrored=mirrored)
            found += torch.tensor([float(loss), float(correct)], dtype=torch.float64)
        loss, correct = self._sum(found).tolist()
        return loss, round(correct)

    def _test_rounds(self, parts: tuple[int, ...]) -> Iterator[Marks]:
        """Yield what is known of the samples that are tested at the same time."""
        starts = [sum(parts[:node]) for node in range(len(parts))]
        test = self._job.test
        for done in range(0, max(parts), _TEST_AT_ONCE):
            counts = tuple(min(max(part - done, 0), _TEST_AT_ONCE) for part in parts)
            numbers = torch.cat(
                [
                    torch.arange(start + done, start + done + count)
                    for start, count in zip(starts, counts, strict=True)
                ]
            )
            yield Marks(counts, test.labels(numbers.to(test.device)), None)


def _number_of(text: str) -> int:
    """Return a number that no other text is likely to have, and that a float holds exactly."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def _move(optimizer: optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
