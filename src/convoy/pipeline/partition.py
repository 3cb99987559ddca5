"""Where to cut a network into stages, so that unequal workers need the same time for a batch.

A network is a sequence of blocks; a cut lies between two of them, so a residual block's shortcut is
never cut. People name a cut by the number of weight layers (convolutions and fully connected ones)
before it, as the paper's pipeline placement vector does:

    blocks         stem | block | block | block | head
    weight layers    1      2       2       2      1
    cut at              1       3       5       7

All of it is pure: times, bytes and limits in, cuts out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from convoy.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a network, whoever computes it.

    Attributes:
        name: for people.
        layers: its weight layers.
        out_bytes: what goes on to the next block, for a batch.
        kept_bytes: what it keeps of a batch until its backward pass.
        weight_bytes: of its weights.
    """

    name: str
    layers: int
    out_bytes: int = 0
    kept_bytes: int = 0
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Worker:
    """Who computes a stage.

    Attributes:
        seconds: of each block's forward and backward pass together, for a batch, measured there.
        memory_bytes: that a stage may take; 0: as much as it likes.
        bytes_per_s: of its link to the next stage; 0: transfers cost nothing.
    """

    seconds: tuple[float, ...]
    memory_bytes: int = 0
    bytes_per_s: float = 0.0


Bounds = tuple[int, ...]  # numbers of the first blocks of each stage, and the number of blocks


def legal_cuts(layers: Sequence[int]) -> dict[int, int]:
    """Return where a network can be cut: weight layers before the cut -> first block after it.

    What has no weights goes with the block before it: pooling makes less to be sent.

    >>> legal_cuts([1, 0, 1, 0, 0, 1, 1])
    {1: 2, 2: 5, 3: 6}
    """
    ends = enumerate(accumulate(layers), start=1)
    return {before: number for number, before in ends if 0 < before < sum(layers)}


def cut_by_hand(layers: Sequence[int], cuts: Sequence[int]) -> Bounds:
    """Return the bounds of stages that were cut after so many weight layers.

    >>> cut_by_hand([1, 2, 2, 1], [1, 5])
    (0, 1, 3, 4)

    Raises:
        ConfigError: there is no such cut; says which there are.
    """
    legal = legal_cuts(layers)
    wrong = [cut for cut in cuts if cut not in legal]
    rising = all(a < b for a, b in pairwise(cuts))
    if wrong or not rising:
        reason = "'cuts' lie where the network cannot be cut" if wrong else "'cuts' must rise"
        raise ConfigError(reason, got=_shown(cuts), allowed=_shown(list(legal)))
    return (0, *(legal[cut] for cut in cuts), len(layers))


def cut_by_cost(blocks: Sequence[Block], workers: Sequence[Worker], in_flight: int) -> Bounds:
    """Return the bounds that let the slowest stage be as fast as it can be.

    Args:
        blocks: of the network.
        workers: one for each stage, in the order of the stages.
        in_flight: batches a stage holds at the same time, for each stage that comes after it.

    Raises:
        ConfigError: there are more workers than stages, or too little memory.
    """
    starts = [0, *legal_cuts([block.layers for block in blocks]).values()]
    if len(workers) > len(starts):
        cuts = list(legal_cuts([block.layers for block in blocks]))
        raise ConfigError(
            "there are more stages than the network can be cut into",
            got=len(workers),
            allowed=f"at most {len(starts)}: it can be cut after {_shown(cuts)} weight layers",
        )
    best = _best_bounds(blocks, workers, [*starts, len(blocks)], in_flight)
    if best is None:
        raise ConfigError("no cut leaves every stage enough memory")
    return best


def stage_seconds(blocks: Sequence[Block], worker: Worker, start: int, stop: int) -> float:
    """Return what a batch takes a worker: its arithmetic, or its link where that is slower.

    Sending goes on beside computing, so the longer of the two counts. The last stage sends
    nothing on.
    """
    computing = sum(worker.seconds[start:stop])
    if not worker.bytes_per_s or stop == len(blocks):
        return computing
    # Activations go one way while gradients come the other: a link carries both at once.
    return max(computing, blocks[stop - 1].out_bytes / worker.bytes_per_s)


def slowest_stage(blocks: Sequence[Block], workers: Sequence[Worker], bounds: Bounds) -> float:
    """Return the longest time of a stage."""
    parts = zip(workers, pairwise(bounds), strict=True)
    return max(stage_seconds(blocks, worker, start, stop) for worker, (start, stop) in parts)


def rescaled(workers: Sequence[Worker], bounds: Bounds, busy: Sequence[float]) -> list[Worker]:
    """Return the workers, with times corrected by what their stages really took.

    >>> one, two = rescaled([Worker((1.0, 1.0, 1.0))] * 2, (0, 2, 3), (3.0, 1.0))
    >>> one.seconds, two.seconds
    ((1.5, 1.5, 1.5), (1.0, 1.0, 1.0))
    """
    found = []
    for worker, (start, stop), took in zip(workers, pairwise(bounds), busy, strict=True):
        expected = sum(worker.seconds[start:stop])
        factor = took / expected if took > 0 and expected > 0 else 1.0
        seconds = tuple(block * factor for block in worker.seconds)
        found.append(replace(worker, seconds=seconds))
    return found


def stage_bytes(blocks: Sequence[Block], held: int) -> int:
    """Return the memory of a stage that holds so many batches: activations, weights, momentum."""
    kept = sum(block.kept_bytes for block in blocks)
    return held * kept + 3 * sum(block.weight_bytes for block in blocks)


def _best_bounds(
    blocks: Sequence[Block], workers: Sequence[Worker], starts: Sequence[int], in_flight: int
) -> Bounds | None:
    """Try all cuts by going from left to right: the best for the first stages is kept."""
    # The state: how far the first stages reach -> the slowest of them, and their bounds.
    reached: dict[int, tuple[float, Bounds]] = {0: (0.0, (0,))}
    for number, worker in enumerate(workers):
        after = len(workers) - 1 - number
        ends = [starts[-1]] if after == 0 else starts[1:-1]
        further: dict[int, tuple[float, Bounds]] = {}
        for start, (slowest, bounds) in reached.items():
            for end in (end for end in ends if end > start):
                part = blocks[start:end]
                if worker.memory_bytes < stage_bytes(part, 1 + in_flight * after) and (
                    worker.memory_bytes
                ):
                    continue
                seconds = stage_seconds(blocks, worker, start, end)
                found = (max(slowest, seconds), (*bounds, end))
                further[end] = min(further.get(end, found), found)
        reached = further
    return reached[starts[-1]][1] if starts[-1] in reached else None


def _shown(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "nowhere"
