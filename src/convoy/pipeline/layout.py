"""A network as a pipeline's stages: which blocks each has, and how far ahead each runs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from convoy.config import Config
from convoy.errors import ConfigError
from convoy.models.blocks import count_weight_layers, walk_units
from convoy.pipeline.costs import Costs
from convoy.pipeline.partition import Bounds, Worker, cut_by_cost, cut_by_hand, legal_cuts
from convoy.pipeline.recipe import Recipe, parse_recipe
from convoy.pipeline.schedule import LEADS, lead_of


@dataclass(frozen=True, eq=False)
class Layout:
    """Where a network is cut.

    Attributes:
        names, blocks: of the network, in the order in which they run.
        bounds: numbers of each stage's first block, and the number of blocks.
    """

    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    bounds: Bounds

    @property
    def size(self) -> int:
        """Return how many stages there are."""
        return len(self.bounds) - 1

    def blocks_of(self, stage: int) -> tuple[nn.Module, ...]:
        """Return a stage's blocks."""
        return self.blocks[self.bounds[stage] : self.bounds[stage + 1]]

    def leads(self, recipe: Recipe) -> list[int]:
        """Return how many forwards each stage is ahead of its backwards."""
        return [lead_of(recipe.order, self.size, stage) for stage in range(self.size)]

    @property
    def cuts(self) -> tuple[int, ...]:
        """Return the cuts as people name them: weight layers before each."""
        layers = [count_weight_layers(block) for block in self.blocks]
        return tuple(sum(layers[:bound]) for bound in self.bounds[1:-1])


def lay_out(model: nn.Module, bounds: Bounds) -> Layout:
    """Return a network cut at some bounds.

    Raises:
        ConfigError: two stages would share weights.
    """
    names, blocks = zip(*walk_units(model), strict=True)
    layout = Layout(tuple(names), tuple(blocks), bounds)
    owners: dict[Tensor, int] = {}
    for stage in range(layout.size):
        for tensor in _tensors(layout.blocks_of(stage)):
            if owners.setdefault(tensor, stage) != stage:
                raise ConfigError(
                    "two stages would share weights",
                    got=f"stages {owners[tensor] + 1} and {stage + 1}",
                    hint="Cut elsewhere, or give the layers weights of their own.",
                )
    return layout


def _tensors(blocks: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Yield weights and statistics."""
    for block in blocks:
        yield from block.parameters()
        yield from block.buffers()


def weight_layers(model: nn.Module) -> list[int]:
    """Return the number of weight layers of each block."""
    return [count_weight_layers(block) for _, block in walk_units(model)]


def most_stages(model: nn.Module) -> int:
    """Return how many stages a network can be cut into."""
    return len(legal_cuts(weight_layers(model))) + 1


def check_stages(config: Config, model: nn.Module, stages: int) -> None:
    """Refuse cuts and numbers of stages that a network does not allow, naming those that it does.

    Raises:
        ConfigError: what is wrong, and where the network can be cut.
    """
    layers = weight_layers(model)
    legal = legal_cuts(layers)
    if not legal and (stages > 1 or config.cuts):
        raise ConfigError(
            "this network cannot be cut: it is no sequence of blocks",
            got=type(model).__name__,
            hint="Build it as an nn.Sequential of blocks; see docs/pipeline.md.",
        )
    if config.cuts:
        cut_by_hand(layers, whole(config.cuts))
    elif stages > len(legal) + 1:
        raise ConfigError(
            "there are more stages than the network can be cut into",
            got=stages,
            allowed=f"at most {len(legal) + 1}: it can be cut after "
            f"{', '.join(map(str, legal))} weight layers",
        )


def choose_bounds(config: Config, costs: Costs, workers: Sequence[Worker]) -> Bounds:
    """Return where to cut a network for some workers.

    Cuts given by hand hold as long as there are as many workers as they need. Where no cut leaves
    every worker enough memory, the fastest is as good as any: a system that swaps still trains.
    """
    layers = [block.layers for block in costs.blocks]
    if config.cuts and len(config.cuts) + 1 == len(workers):
        return cut_by_hand(layers, whole(config.cuts))
    in_flight = LEADS[parse_recipe(config.recipe).order]
    try:
        return cut_by_cost(costs.blocks, workers, in_flight)
    except ConfigError:
        unlimited = [replace(worker, memory_bytes=0) for worker in workers]
        return cut_by_cost(costs.blocks, unlimited, in_flight)


def whole(cuts: Sequence[float]) -> list[int]:
    """Return cuts as whole numbers."""
    return [int(cut) for cut in cuts]
