"""A network as a flat sequence of named blocks: what can be cut, scheduled or split.

The zoo's networks are plain `nn.Sequential`s of blocks, so the walk needs no second definition
of any of them, and a user's own `nn.Sequential` can be walked the same way.
"""

from collections.abc import Iterator

from torch import nn

_WEIGHT_LAYERS = (nn.Conv2d, nn.Linear)


def walk_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a network's blocks in the order in which they run, with their dotted names.

    Running the blocks one after the other on an input equals running the network. Nested
    sequences are entered; whatever is no sequence, or runs in its own way, is one block.
    """
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        yield "", model
        return
    # Not named_children, which leaves out a module's second use.
    for name, child in model._modules.items():
        assert child is not None
        for inner_name, block in walk_blocks(child):
            yield f"{name}.{inner_name}" if inner_name else name, block


def walk_units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return a network's blocks, each with those after it that have no weights of their own.

    These are the parts that a cut may lie between: pooling goes with what it makes smaller, and
    an activation that writes over its input with what has made that.
    """
    units: list[tuple[str, list[nn.Module]]] = []
    for name, block in walk_blocks(model):
        if count_weight_layers(block) and (not units or _has_weights(units[-1][1])):
            units.append((name, [block]))
        elif units:
            units[-1][1].append(block)
        else:
            units.append((name, [block]))
    return [
        (name, blocks[0] if len(blocks) == 1 else nn.Sequential(*blocks)) for name, blocks in units
    ]


def _has_weights(blocks: list[nn.Module]) -> bool:
    return any(count_weight_layers(block) for block in blocks)


def count_weight_layers(block: nn.Module) -> int:
    """Count convolutions and fully connected layers: the unit the pipeline paper cuts by."""
    return sum(isinstance(module, _WEIGHT_LAYERS) for module in block.modules())


def count_parameters(module: nn.Module) -> int:
    """Count the trainable numbers of a network or block."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)
