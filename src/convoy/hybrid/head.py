"""Where a network's fully connected layers begin, and what may become of each layer after that."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from convoy.errors import ConfigError
from convoy.hybrid.layout import (
    Block,
    Dense,
    Kind,
    Other,
    Setting,
    Way,
    all_columns,
    choose_kinds,
    ways_between,
)
from convoy.models.blocks import walk_blocks
from convoy.models.dropout import SampleDropout

# Layers that treat every neuron by itself: they need not see the others.
_EACH = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Identity,
    SampleDropout,
)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A network as two: what is the same on all nodes, and what can be cut.

    Attributes:
        trunk: the modules up to the first fully connected layer.
        head: the modules from there on.
        blocks: what may become of each of the head's.
    """

    trunk: tuple[nn.Module, ...]
    head: tuple[nn.Module, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """A layer of the head.

    Attributes:
        kind: what became of a fully connected layer; None for any other.
        widths: neurons of each node after it, where activations lie by neurons.
        before, after: how activations lie.
    """

    module: nn.Module
    kind: Kind | None
    before: Way
    after: Way
    widths: tuple[int, ...]


def find_parts(model: nn.Module) -> Parts:
    """Find the fully connected layers at a network's end.

    Raises:
        ConfigError: there is nothing that could be cut over nodes.
    """
    walked = list(walk_blocks(model))
    modules = [module for _, module in walked]
    first = next((i for i, m in enumerate(modules) if type(m) is nn.Linear), None)
    if first is None:
        raise ConfigError(
            "the network has no fully connected layer that could be cut over nodes",
            got=f"{len(walked)} blocks, no nn.Linear among them",
            hint="Write it as an nn.Sequential that ends in nn.Linear layers, "
            "or give --strategy lockstep.",
        )
    if not any(p.requires_grad for module in modules[:first] for p in module.parameters()):
        raise ConfigError(
            "nothing is trained before the first fully connected layer",
            got=walked[first][0] or type(modules[first]).__name__,
            hint="Give --strategy lockstep.",
        )
    used = Counter(id(p) for module in modules for p in module.parameters())
    blocks = tuple(_block(name, module, used) for name, module in walked[first:])
    return Parts(tuple(modules[:first]), tuple(modules[first:]), blocks)


def _block(name: str, module: nn.Module, used: Counter[int]) -> Block:
    if type(module) is nn.Linear:
        alone = used[id(module.weight)] == 1  # one that serves twice is not cut
        return Dense(name, module.in_features, module.out_features, alone)
    return Other(name, isinstance(module, _EACH))


def kinds_that_fit(parts: Parts, layers: str, setting: Setting) -> tuple[Kind, ...]:
    """Return what becomes of each fully connected layer, by the option `layers`; empty: nothing."""
    return (all_columns if layers == "columns" else choose_kinds)(parts.blocks, setting)


def check_layers(parts: Parts, layers: str, setting: Setting) -> None:
    """Refuse a network that cannot be cut over so many nodes.

    Raises:
        ConfigError: it cannot.
    """
    if kinds_that_fit(parts, layers, setting):
        return
    dense = [block for block in parts.blocks if isinstance(block, Dense)]
    hint = "A layer needs as many neurons as there are nodes, and weights of its own"
    if layers == "columns":
        hint += "; for --layers columns all must, with nothing but activations between them"
    raise ConfigError(
        f"the fully connected layers cannot be cut over {setting.nodes} nodes",
        got=", ".join(f"{layer.name} ({layer.outputs} neurons)" for layer in dense),
        hint=f"{hint}.",
    )


def lay_out(
    parts: Parts, kinds: Sequence[Kind], widths: Sequence[tuple[int, ...]], nodes: int
) -> tuple[list[nn.Module], list[Layer]]:
    """Return the modules that every node has, and the layers from the first that is cut on.

    Args:
        parts: of the network.
        kinds: of its fully connected layers.
        widths: each node's neurons of every fully connected layer.
        nodes: how many there are.
    """
    ways = ways_between(parts.blocks, kinds, nodes)
    assert ways is not None
    layers: list[Layer] = []
    way: Way = "samples"
    neurons: tuple[int, ...] = ()
    left, sizes = iter(kinds), iter(widths)
    for module, block, after in zip(parts.head, parts.blocks, ways, strict=True):
        kind = next(left) if isinstance(block, Dense) else None
        size = next(sizes) if isinstance(block, Dense) else ()
        neurons = size if kind == "columns" else neurons
        layers.append(Layer(module, kind, way, after, neurons))
        way = after
    first = next(i for i, layer in enumerate(layers) if layer.kind in ("columns", "rows"))
    shared = [*parts.trunk, *(layer.module for layer in layers[:first])]
    return shared, layers[first:]
