"""What a pipeline will be like: the work, memory and messages of its stages, and its speed.

All of it is computed from what was measured of the blocks on one worker; nothing runs here.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

from convoy.pipeline.partition import (
    Block,
    Bounds,
    Worker,
    cut_by_cost,
    cut_by_hand,
    legal_cuts,
    stage_bytes,
    stage_seconds,
)
from convoy.pipeline.recipe import Recipe
from convoy.pipeline.schedule import (
    LEADS,
    can_postpone,
    held_at_most,
    hybrid_speedup,
    lead_of,
    should_postpone,
)
from convoy.pipeline.timeline import SYNCHRONOUS, Pace, Timeline, seconds_of, simulate_steady

# Of a block's time, which is measured as a whole. A backward pass has two products where a forward
# pass has one; measured, it is a quarter (vgg16) to two fifths (resnet20). No order's speed depends
# on it as long as stages are equal.
_FORWARD_PART = 1 / 3
# Of a backward pass, what can be postponed, and how much longer it takes then: measured with
# ResNet-56 at batch 128 (0.43); it is 0.39 for resnet20, 0.54 for vgg16-bn, 0.32 for alexnet.
_POSTPONED_PART, _POSTPONING_COSTS = 0.4, 1.05
_PARTS = (4, 8, 16)  # that the synchronous orders are shown with
_MBIT = 1e6 / 8  # bytes
_CLEARLY = 1.05  # faster; less is within the error of what was measured


@dataclass(frozen=True, slots=True)
class Situation:
    """What is to become a pipeline, and of whom.

    Attributes:
        blocks: of the network.
        weights: numbers in each block's weight layers.
        workers: one for each stage.
        batch: its samples.
        steps: of an epoch.
        precision: that it is computed in.
    """

    blocks: tuple[Block, ...]
    weights: tuple[int, ...]
    workers: tuple[Worker, ...]
    recipe: Recipe
    batch: int
    steps: int
    precision: str = "fp32"

    @property
    def layers(self) -> list[int]:
        """Return the number of each block's weight layers."""
        return [block.layers for block in self.blocks]

    @property
    def alone_s(self) -> float:
        """Return what a batch takes the fastest worker alone."""
        return min(sum(worker.seconds) for worker in self.workers)

    def cut(self, cuts: Sequence[int]) -> Bounds:
        """Return the bounds of the stages: cut by hand, or where that is best."""
        if cuts:
            return cut_by_hand(self.layers, cuts)
        return cut_by_cost(self.blocks, self.workers, LEADS[self.recipe.order])

    def pace(self, bounds: Bounds) -> Pace:
        """Return how long the stages and their messages take."""
        parts = zip(self.workers, pairwise(bounds), strict=True)
        seconds = [sum(worker.seconds[start:stop]) for worker, (start, stop) in parts]
        return Pace(
            tuple(of_stage * _FORWARD_PART for of_stage in seconds),
            tuple(of_stage * (1 - _FORWARD_PART) for of_stage in seconds),
            tuple(self.transfer_s(bounds, cut) for cut in range(len(bounds) - 2)),
            postponable=_POSTPONED_PART if can_postpone(self.precision) else 0.0,
        )

    def transfer_s(self, bounds: Bounds, stage: int) -> float:
        """Return what it takes to send a batch from a stage to the next."""
        rate, stop = self.workers[stage].bytes_per_s, bounds[stage + 1]
        is_last = stop == len(self.blocks)
        return 0.0 if is_last or not rate else self.blocks[stop - 1].out_bytes / rate


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One stage.

    Attributes:
        first, last: names of its blocks.
        layers: its weight layers.
        seconds: of a batch.
        work: its part of all blocks' time, on equal workers.
        busy: the part of the time that it computes, in the steady state.
        lead: updates that the weights of its forwards are old.
        held: batches whose activations it holds.
        memory_bytes: activations, weights, momentum, gradient, and weights that are kept.
        sent_bytes: to the next stage, for a batch; as much comes back.
        transfer_s: that this takes.
    """

    first: str
    last: str
    layers: int
    seconds: float
    work: float
    busy: float
    lead: int
    held: int
    memory_bytes: int
    sent_bytes: int
    transfer_s: float


@dataclass(frozen=True, slots=True)
class OrderForecast:
    """The same stages in some order of jobs.

    Attributes:
        parts: that a batch is cut into.
        batch_s: from a batch to the next in the steady state.
        speedup: over the fastest worker alone, in the steady state.
        utilisation: the mean of all stages.
        held: batches whose activations the first stage holds.
        lead: updates that the first stage's weights are old.
    """

    order: str
    parts: int
    batch_s: float
    speedup: float
    utilisation: float
    held: float
    lead: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """A pipeline before it runs.

    Attributes:
        cuts: weight layers before each.
        legal: where the network can be cut.
        alone_s: what a batch takes the fastest worker alone.
        slowest_s: what it takes the slowest stage, or its link.
        bound: the speed-up if nothing ever waited for anything else.
        batch_s: what a batch takes by the timeline, in the steady state.
        epoch_s: what an epoch takes, with filling and draining the pipeline.
        speedup: of an epoch, over the fastest worker alone.
        stale: part of the weights that are in stages with a lead.
        orders: how other orders would do.
    """

    stages: tuple[StageForecast, ...]
    cuts: tuple[int, ...]
    legal: tuple[int, ...]
    alone_s: float
    slowest_s: float
    bound: float
    batch_s: float
    epoch_s: float
    speedup: float
    stale: float
    orders: tuple[OrderForecast, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        return asdict(self)

    def faster_order(self, chosen: str) -> OrderForecast | None:
        """Return a pipelined order that is clearly faster than the chosen one, if there is one."""
        speeds = {made.order: made for made in self.orders if made.order in LEADS}
        best = max(speeds.values(), key=lambda made: made.speedup)
        return best if best.speedup > _CLEARLY * speeds[chosen].speedup else None

    def hybrid(self, pipelined: int, total: int) -> float:
        """Return the speed-up of a run of which only so many steps are pipelined."""
        return hybrid_speedup(pipelined, total, self.speedup)


def make_workers(
    seconds: Sequence[float], speeds: Sequence[float], links_mbit: Sequence[float]
) -> tuple[Worker, ...]:
    """Return workers of some speeds, from what the blocks took one of speed 1.

    What goes from a stage to the next passes the links of both.
    """
    ends = [*pairwise(links_mbit), (0.0, 0.0)] if links_mbit else [(0.0, 0.0)] * len(speeds)
    return tuple(
        Worker(tuple(of_block / speed for of_block in seconds), bytes_per_s=min(link) * _MBIT)
        for speed, link in zip(speeds, ends, strict=True)
    )


def as_run(pace: Pace, order: str) -> Pace:
    """Return the pace of stages that postpone what nobody waits for, where a run would do that."""
    if order not in (*LEADS, "plain") or not pace.postponable:
        return pace  # others' schedules
    busy = simulate_steady(pace, order).utilisation
    if not should_postpone([1 - part for part in busy]):
        return pace
    first, *others = pace.backward_s
    longer = (first, *(seconds * _POSTPONING_COSTS for seconds in others))
    return replace(pace, backward_s=longer, postponed=pace.postponable)


def make_forecast(situation: Situation, bounds: Bounds, stale: float) -> Forecast:
    """Return what the pipeline of some bounds will be like; `stale` is its part of old weights."""
    order = situation.recipe.order
    pace = situation.pace(bounds)
    run = as_run(pace, order)
    steady = simulate_steady(run, order)
    parts = zip(situation.workers, pairwise(bounds), strict=True)
    slowest_s = max(stage_seconds(situation.blocks, who, *part) for who, part in parts)
    alone_s, layers = situation.alone_s, situation.layers
    epoch_s = seconds_of(run, order, situation.steps)
    return Forecast(
        stages=tuple(_stage(situation, bounds, steady, stage) for stage in range(pace.stages)),
        cuts=tuple(sum(layers[:bound]) for bound in bounds[1:-1]),
        legal=tuple(legal_cuts(layers)),
        alone_s=alone_s,
        slowest_s=slowest_s,
        bound=alone_s / slowest_s,
        batch_s=steady.period_s,
        epoch_s=epoch_s,
        speedup=situation.steps * alone_s / epoch_s,
        stale=stale,
        orders=compare_orders(pace, alone_s, situation.batch),
    )


def _stage(situation: Situation, bounds: Bounds, steady: Timeline, stage: int) -> StageForecast:
    start, stop = bounds[stage], bounds[stage + 1]
    part, seconds = situation.blocks[start:stop], situation.workers[stage].seconds
    lead = lead_of(steady.order, steady.stages, stage)
    held = held_at_most(lead)
    weight_bytes = sum(block.weight_bytes for block in part)
    return StageForecast(
        first=part[0].name,
        last=part[-1].name,
        layers=sum(block.layers for block in part),
        seconds=sum(seconds[start:stop]),
        work=sum(seconds[start:stop]) / sum(seconds),
        busy=steady.utilisation[stage],
        lead=lead,
        held=held,
        memory_bytes=stage_bytes(part, held) + copies_kept(situation.recipe, lead) * weight_bytes,
        sent_bytes=part[-1].out_bytes if stop < bounds[-1] else 0,
        transfer_s=situation.transfer_s(bounds, stage),
    )


def copies_kept(recipe: Recipe, lead: int) -> int:
    """Return how many copies of its weights a stage keeps beside those of the moment.

    One for each batch on its way whose forward pass read others. Predicted weights are never
    those of the moment, so that the newest batch has a copy too.

    >>> [copies_kept(Recipe(backward="stashed"), lead) for lead in (0, 1, 2)]
    [0, 1, 2]
    >>> copies_kept(Recipe(backward="stashed", forward="linear"), 2), copies_kept(Recipe(), 2)
    (3, 0)
    """
    if lead == 0 or not recipe.needs_own_weights:
        return 0
    return lead + (recipe.forward != "current")


def compare_orders(pace: Pace, alone_s: float, batch: int) -> tuple[OrderForecast, ...]:
    """Return how stages would do in every order, the synchronous ones with several parts."""
    found = [_order(pace, order, 1, alone_s) for order in (*LEADS, "plain")]
    for parts in (parts for parts in _PARTS if parts <= batch):
        found += [_order(pace, order, parts, alone_s) for order in ("gpipe", "1f1b-sync")]
    return tuple(sorted(found, key=lambda made: (-round(made.speedup, 3), made.held)))


def _order(pace: Pace, order: str, parts: int, alone_s: float) -> OrderForecast:
    timeline = simulate_steady(as_run(pace, order), order, parts)
    return OrderForecast(
        order=order,
        parts=parts,
        batch_s=timeline.period_s,
        speedup=alone_s / timeline.period_s,
        utilisation=1 - timeline.bubble,
        held=timeline.held[0],
        lead=0 if order in SYNCHRONOUS else lead_of(order, pace.stages, 0),
    )
