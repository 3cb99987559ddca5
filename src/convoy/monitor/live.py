"""The part of the terminal that changes in place: how far the run is, and what each node does."""

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

_REFRESHES_PER_S = 4
_NODES_AT_MOST = 16  # rows; more would push the rest off a small screen
_COLOURS = {"lost": "red", "aside": "yellow", "left": "dim"}


class LiveView:
    """A bar and a table of nodes at the foot of a terminal.

    Args:
        console: the terminal.
    """

    def __init__(self, console: Console) -> None:
        self._nodes: list[dict[str, Any]] = []
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=16), console=console
        )
        self._task = self._bar.add_task("", total=None)
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
        )
        self._live.start()

    def show_nodes(self, nodes: list[dict[str, Any]]) -> None:
        """Show these nodes from the next refresh on, which another thread does."""
        self._nodes = nodes

    def show_step(self, text: str, completed: int, total: int) -> None:
        """Show how far the epoch is, with some words beside it."""
        self._bar.update(self._task, description=text, completed=completed, total=total)

    def close(self) -> None:
        """Take it away."""
        self._live.stop()

    def _render(self) -> RenderableType:
        nodes, bar = self._nodes, self._bar.get_renderable()
        return Group(node_table(nodes), bar) if len(nodes) > 1 else bar


def node_table(nodes: list[dict[str, Any]]) -> Table:
    """Return what each node does, as a table that fits in 80 columns."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("node", max_width=16, no_wrap=True)
    table.add_column("state", no_wrap=True)
    for title in ("samples/s", "share", "waits", "stale", "faults"):
        table.add_column(title, justify="right", no_wrap=True)
    for node in _most_wanted(nodes):
        table.add_row(*_row(node))
    if len(nodes) > _NODES_AT_MOST:
        table.add_row(f"and {len(nodes) - _NODES_AT_MOST} more")
    return table


def _most_wanted(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the nodes that there is room for, those in trouble before the others."""
    if len(nodes) > _NODES_AT_MOST:
        nodes = sorted(nodes, key=lambda node: node["state"] not in ("lost", "aside"))
    return nodes[:_NODES_AT_MOST]


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    colour = _COLOURS.get(node["state"], "green")
    staleness = node["staleness"]
    return (
        escape(node["name"]),
        f"[{colour}]{node['state']}[/]",
        f"{node['speed']:,.0f}",
        f"{node['share']:.1%}",
        f"{node['waiting']:.1%}",
        "-" if staleness is None else str(staleness),
        str(node["faults"]),
    )
