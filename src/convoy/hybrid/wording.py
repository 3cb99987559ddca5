"""A layout in words."""

from collections.abc import Sequence

from convoy.hybrid.layout import Block, Dense, Kind, Setting, total_received

_NUMBER_BYTES = 4
WORDS = {
    "copy": "on every node",
    "columns": "by output neurons",
    "rows": "by input neurons",
}


def describe_layout(
    blocks: Sequence[Block],
    kinds: Sequence[Kind],
    widths: Sequence[Sequence[int]],
    setting: Setting,
    shared: int,
) -> str:
    """Say how layers are cut, and what travels; `shared`: weights that all nodes have.

    >>> fc = [Dense("fc1", 1024, 4096), Dense("fc2", 4096, 10)]
    >>> describe_layout(fc, ["columns", "rows"], [(3000, 1096), (5, 5)], Setting(2, 64), 90_000)
    ... # doctest: +NORMALIZE_WHITESPACE
    'fc1 by output neurons (3000, 1096), fc2 by input neurons; a node receives 0.6 MB a step (by
     samples alone 17.3 MB)'
    """
    dense = [block for block in blocks if isinstance(block, Dense)]
    told = []
    for layer, kind, width in zip(dense, kinds, widths, strict=True):
        sizes = f" ({', '.join(map(str, width))})" if kind == "columns" else ""
        told.append(f"{layer.name} {WORDS[kind]}{sizes}")
    copies = sum(d.weights for d, kind in zip(dense, kinds, strict=True) if kind == "copy")
    rest = 2 * (setting.nodes - 1) / setting.nodes * _NUMBER_BYTES
    alone = rest * (shared - copies + sum(layer.weights for layer in dense))
    ours = rest * (shared - copies) + total_received(blocks, kinds, setting)
    return (
        f"{', '.join(told)}; a node receives {ours / 1e6:.1f} MB a step "
        f"(by samples alone {alone / 1e6:.1f} MB)"
    )
