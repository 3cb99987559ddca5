"""How `convoy plan` shows a hybrid run: which layers are cut, and what travels."""

from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from convoy.config import Config
from convoy.hybrid.allot import allot
from convoy.hybrid.head import check_layers, find_parts, kinds_that_fit
from convoy.hybrid.layout import Dense, Setting, received, total_received
from convoy.hybrid.wording import WORDS
from convoy.models.blocks import count_parameters

_BOUNDLESS = 1e18  # bytes: how much memory other nodes have is not known here
_COPIES = 3  # of a weight: itself, its gradient, its momentum


def as_record(config: Config, model: nn.Module, nodes: int) -> dict[str, Any]:
    """Return which layers would be cut, and what a node would hold and receive."""
    parts, setting = find_parts(model), Setting(nodes, config.batch)
    check_layers(parts, config.layers, setting)
    kinds = kinds_that_fit(parts, config.layers, setting)
    speeds = config.speeds or (1.0,) * nodes
    dense = [block for block in parts.blocks if isinstance(block, Dense)]
    layers = [
        {
            "name": layer.name,
            "weights": layer.weights,
            "kind": kind,
            "neurons": list(allot(layer.outputs, speeds, 4, [_BOUNDLESS] * nodes)),
            "received_bytes": received(layer, kind, setting),
            "received_bytes_if_copied": received(layer, "copy", setting),
        }
        for layer, kind in zip(dense, kinds, strict=True)
    ]
    whole = count_parameters(model)
    cut = sum(layer.weights for layer, kind in zip(dense, kinds, strict=True) if kind != "copy")
    trunk = 2 * (nodes - 1) / nodes * 4 * (whole - sum(layer.weights for layer in dense))
    return {
        **{name: getattr(config, name) for name in ("model", "data", "batch", "layers")},
        "nodes": nodes,
        "table": layers,
        "received_bytes": trunk + total_received(parts.blocks, kinds, setting),
        "received_bytes_data_parallel": 2 * (nodes - 1) / nodes * 4 * whole,
        "held_bytes": [4 * _COPIES * (whole - cut + cut * speed / sum(speeds)) for speed in speeds],
        "held_bytes_data_parallel": 4 * _COPIES * whole,
    }


def print_traffic(record: dict[str, Any]) -> None:
    """Show a plan to a person."""
    console = Console()
    title = f"{record['model']} on {record['nodes']} nodes, batch {record['batch']}"
    table = Table(title=title, title_justify="left")
    for name in ("layer", "weights", "is", "neurons of each node", "MB a step", "copied: MB"):
        right = name in ("weights", "MB a step", "copied: MB")
        table.add_column(name, justify="right" if right else "left")
    for layer in record["table"]:
        neurons = ", ".join(map(str, layer["neurons"])) if layer["kind"] == "columns" else ""
        table.add_row(
            layer["name"],
            f"{layer['weights']:,}",
            WORDS[layer["kind"]],
            neurons,
            f"{layer['received_bytes'] / 1e6:.2f}",
            f"{layer['received_bytes_if_copied'] / 1e6:.2f}",
        )
    console.print(table)
    ours, alone = record["received_bytes"], record["received_bytes_data_parallel"]
    held = ", ".join(f"{value / 1e6:.0f}" for value in record["held_bytes"])
    whole = record["held_bytes_data_parallel"] / 1e6
    console.print(
        f"A node receives {ours / 1e6:.1f} MB a step; data parallel {alone / 1e6:.1f} MB."
    )
    console.print(
        f"It holds {held} MB of weights, gradients and momentum; data parallel {whole:.0f}."
    )
    if ours > alone:
        console.print("Data parallel training sends less: --strategy lockstep suits this better.")
