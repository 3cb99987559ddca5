"""Which fully connected layers are cut over the nodes, and how: a pure choice by traffic.

Between two layers the activations lie in one of two ways:

    samples   each node has its own samples, with all their neurons
    neurons   each node has all samples, with its own neurons

and a layer is one of three:

    copy      samples -> samples   every node has all of it; its gradients travel
    columns   any     -> neurons   a node computes its own output neurons, of inputs from all
    rows      neurons -> samples   a node multiplies its own input neurons; partial sums travel

The loss can be computed from either. Krizhevsky's layout (and Jin et al.'s) has columns only;
rows after columns save one exchange of all activations (as Megatron's pairs do).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["copy", "columns", "rows"]
Way = Literal["samples", "neurons"]

MESSAGE_WORTH = 100_000  # bytes that could travel in the time that one exchange takes to begin
_NUMBER_BYTES = 4
_LOSS_NUMBERS = 6  # of a sample, that nodes tell each other where each knows some classes only
_KINDS: tuple[Kind, ...] = ("copy", "columns", "rows")


@dataclass(frozen=True, slots=True)
class Dense:
    """A fully connected layer."""

    name: str
    inputs: int
    outputs: int
    may_be_cut: bool = True

    @property
    def weights(self) -> int:
        """Return how many numbers it learns."""
        return (self.inputs + 1) * self.outputs


@dataclass(frozen=True, slots=True)
class Other:
    """A layer without weights to cut; `each`: it treats every neuron by itself."""

    name: str
    each: bool


Block = Dense | Other


@dataclass(frozen=True, slots=True)
class Setting:
    """What traffic depends on: nodes, and samples of a whole batch."""

    nodes: int
    batch: int

    def exchanged(self, width: int) -> float:
        """Return the bytes that a node receives where all see a batch's activations.

        Forward or backward: gathering them takes as much as adding up partial sums of them.
        """
        return (self.nodes - 1) / self.nodes * self.batch * width * _NUMBER_BYTES


def received(layer: Dense, kind: Kind, setting: Setting) -> float:
    """Return the bytes that a node receives in a step because of a layer, both passes."""
    if kind == "copy":
        return 2 * (setting.nodes - 1) / setting.nodes * layer.weights * _NUMBER_BYTES
    return 2 * setting.exchanged(layer.inputs if kind == "columns" else layer.outputs)


def loss_received(way: Way, setting: Setting) -> float:
    """Return the bytes that a node receives in a step for the loss."""
    if way == "samples":
        return 0.0
    return (setting.nodes - 1) * setting.batch * _LOSS_NUMBERS * _NUMBER_BYTES


def choose_kinds(blocks: Sequence[Block], setting: Setting) -> tuple[Kind, ...]:
    """Return the kind of each fully connected layer for which least travels; one at least is cut.

    An empty answer: none can be cut.

    >>> alexnet = [Dense("fc1", 1024, 4096), Dense("fc2", 4096, 4096), Dense("fc3", 4096, 10)]
    >>> choose_kinds(alexnet, Setting(nodes=4, batch=512))
    ('columns', 'rows', 'copy')
    """
    # The cheapest way to each state: (how activations lie, whether anything is cut).
    best: dict[tuple[Way, bool], tuple[float, tuple[Kind, ...]]] = {("samples", False): (0.0, ())}
    for block in blocks:
        reached: dict[tuple[Way, bool], tuple[float, tuple[Kind, ...]]] = {}
        for (way, is_cut), (cost, kinds) in best.items():
            for kind, after in _moves(block, way, setting.nodes):
                more = _cost(block, kind, setting)
                state = after, is_cut or kind in ("columns", "rows")
                found = cost + more, kinds if kind is None else (*kinds, kind)
                if state not in reached or found[0] < reached[state][0]:
                    reached[state] = found
        best = reached
    ends = [
        (cost + loss_received(way, setting), kinds)
        for (way, is_cut), (cost, kinds) in best.items()
        if is_cut
    ]
    return min(ends)[1] if ends else ()


def all_columns(blocks: Sequence[Block], setting: Setting) -> tuple[Kind, ...]:
    """Return the published layout: every layer cut by its output neurons; empty: impossible."""
    kinds: tuple[Kind, ...] = tuple("columns" for b in blocks if isinstance(b, Dense))
    return kinds if ways_between(blocks, kinds, setting.nodes) is not None else ()


def ways_between(
    blocks: Sequence[Block], kinds: Iterable[Kind], nodes: int
) -> tuple[Way, ...] | None:
    """Return how activations lie after each block; None where a layout is impossible."""
    way: Way = "samples"
    left = iter(kinds)
    ways: list[Way] = []
    for block in blocks:
        kind = next(left) if isinstance(block, Dense) else None
        found = dict(_moves(block, way, nodes)).get(kind)
        if found is None:
            return None
        way = found
        ways.append(way)
    return tuple(ways)


def total_received(blocks: Sequence[Block], kinds: Sequence[Kind], setting: Setting) -> float:
    """Return the bytes that a node receives in a step because of all these layers."""
    layers = [block for block in blocks if isinstance(block, Dense)]
    ways = ways_between(blocks, kinds, setting.nodes)
    assert ways is not None
    pairs = zip(layers, kinds, strict=True)
    return sum(received(layer, kind, setting) for layer, kind in pairs) + (
        loss_received(ways[-1], setting) if ways else 0.0
    )


def _moves(block: Block, way: Way, nodes: int) -> list[tuple[Kind | None, Way]]:
    """Return what may become of a block where activations lie in some way."""
    if isinstance(block, Other):
        return [(None, way)] if block.each or way == "samples" else []
    moves: list[tuple[Kind | None, Way]] = [("copy", "samples")] if way == "samples" else []
    if block.may_be_cut and block.outputs >= nodes:
        moves.append(("columns", "neurons"))
    if block.may_be_cut and way == "neurons":
        moves.append(("rows", "samples"))
    return moves


def _cost(block: Block, kind: Kind | None, setting: Setting) -> float:
    if kind is None or not isinstance(block, Dense):
        return 0.0
    begins = 0 if kind == "copy" else 2 * (setting.nodes - 1)
    return received(block, kind, setting) + begins * MESSAGE_WORTH
