"""A run's curves as PNG files for papers: told apart in black and white as well as in colour."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from convoy.errors import StorageError
from convoy.monitor.reports.curve import Curve, number, short
from convoy.monitor.reports.figure import Figure

Snapshot = Mapping[str, Any]

_MANY_EPOCHS = 12
_DASHED = (4, 1.8)
_NUMBERED_NODES = 12  # as many fit into a matrix with a number in each place


def write_plots(snapshot: Snapshot, folder: Path) -> list[Path]:
    """Write a picture of everything that was measured into a folder; return the files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} could not be made: {error}") from error
    written = []
    for name, draw in _PICTURES.items():
        figure = draw(snapshot)
        if figure is not None:
            figure.save(folder / f"{name}.png")
            written.append(folder / f"{name}.png")
    return written


def _draw_loss(snapshot: Snapshot) -> Figure | None:
    return _draw_learning(snapshot, "loss", "loss", 1.0)


def _draw_accuracy(snapshot: Snapshot) -> Figure | None:
    return _draw_learning(snapshot, "accuracy", "accuracy (%)", 100.0)


def _draw_learning(snapshot: Snapshot, what: str, unit: str, factor: float) -> Figure | None:
    test = _curve(snapshot, "test", f"test_{what}", "test", 1, factor)
    if len(test.times) < _MANY_EPOCHS:
        train = _curve(snapshot, "train", what, "training, epoch so far", 0, factor)
    else:  # that would be a saw with many teeth
        train = _curve(snapshot, "test", f"train_{what}", "training", 0, factor)
    curves = [curve for curve in (train, test) if curve.times]
    if not curves:
        return None
    figure = Figure()
    figure.draw(curves, unit)
    figure.legend([curve.label for curve in curves])
    return figure


def _draw_speeds(snapshot: Snapshot) -> Figure | None:
    return _draw_nodes(snapshot, "speed", "speed (samples/s)", 1.0)


def _draw_waiting(snapshot: Snapshot) -> Figure | None:
    return _draw_nodes(snapshot, "waiting", "time spent waiting (%)", 100.0)


def _draw_nodes(snapshot: Snapshot, series: str, unit: str, factor: float) -> Figure | None:
    curves = _node_curves(snapshot, series, factor)
    if not curves:
        return None
    figure = Figure()
    figure.draw(curves, unit)
    figure.panels[0].set_ylim(bottom=0)
    figure.legend([curve.label for curve in curves])
    return figure


def _draw_shares(snapshot: Snapshot) -> Figure | None:
    """Draw what each node trained, and, dashed, what its speed asks for."""
    from matplotlib.lines import Line2D

    real = _node_curves(snapshot, "real", 100.0)
    if not real:
        return None
    figure = Figure()
    figure.draw(real, "share of a batch (%)", dashes=())
    nodes = list(figure.panels[0].lines)
    predicted = _node_curves(snapshot, "predicted", 100.0)
    figure.draw(predicted, "share of a batch (%)", dashes=_DASHED, marker="", linewidth=1.0)
    figure.panels[0].set_ylim(bottom=0)
    kinds = [
        Line2D([], [], color="#555555"),
        Line2D([], [], color="#555555", dashes=_DASHED, linewidth=1.0),
    ]
    labels = [*(curve.label for curve in real), "real", "predicted from speeds"]
    figure.legend(labels, [*nodes, *kinds])
    return figure


def _draw_staleness(snapshot: Snapshot) -> Figure | None:
    staleness = snapshot["staleness"]
    if staleness is None:
        return None
    counts = staleness["counts"]
    figure = Figure()
    panel = figure.panels[0]
    panel.bar(range(len(counts)), counts, color="#0072b2", edgecolor="#000000", linewidth=0.6)
    panel.axvline(staleness["mean"], color="#000000", dashes=_DASHED, linewidth=1.2)
    panel.grid(visible=False, axis="x")
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.set_xlabel("staleness (versions missed; the last place: that many or more)")
    panel.set_ylabel("submissions")
    figure.legend([f"mean {staleness['mean']:.2f}"], panel.lines)
    return figure


def _draw_waits(snapshot: Snapshot) -> Figure | None:
    """Draw a matrix: the row's node waited for the column's."""
    waits = snapshot["waits"]
    if not waits:
        return None
    nodes = [node["node"] for node in snapshot["nodes"]]
    places = {node: place for place, node in enumerate(nodes)}
    matrix = [[0.0] * len(nodes) for _ in nodes]
    for wait in waits:
        if wait["node"] in places and wait["for"] in places:
            matrix[places[wait["node"]]][places[wait["for"]]] = number(wait["seconds"]) or 0.0
    figure = Figure()
    names = [_name(snapshot, node) for node in nodes]
    figure.matrix(matrix, names, numbers=len(nodes) <= _NUMBERED_NODES)
    return figure


def _node_curves(snapshot: Snapshot, series: str, factor: float) -> list[Curve]:
    columns = snapshot["series"][series]["columns"]
    nodes = sorted((name for name in columns if name.isdigit()), key=int)
    if not columns["time"]:
        return []
    return [
        _curve(snapshot, series, node, _name(snapshot, int(node)), look, factor)
        for look, node in enumerate(nodes)
    ]


def _curve(
    snapshot: Snapshot, series: str, column: str, label: str, look: int, factor: float
) -> Curve:
    columns = snapshot["series"][series]["columns"]
    cells = [number(cell) for cell in columns[column]]
    values = [None if cell is None else factor * cell for cell in cells]
    return Curve(label, columns["time"], values, look)


def _name(snapshot: Snapshot, node: int) -> str:
    known: Sequence[Mapping[str, Any]] = snapshot["nodes"]
    names = [each["name"] for each in known if each["node"] == node]
    return short(names[0] if names else f"node {node + 1}")


_PICTURES: dict[str, Callable[[Snapshot], Figure | None]] = {
    "loss": _draw_loss,
    "accuracy": _draw_accuracy,
    "shares": _draw_shares,
    "speeds": _draw_speeds,
    "waiting": _draw_waiting,
    "staleness": _draw_staleness,
    "waits": _draw_waits,
}


def write_comparison(accuracies: Sequence[Curve], losses: Sequence[Curve], path: Path) -> None:
    """Draw several runs' accuracy and loss over each other."""
    figure = Figure(panels=2)
    figure.draw(accuracies, "test accuracy (%)", panel=0)
    figure.draw(losses, "test loss", panel=1)
    figure.legend([curve.label for curve in accuracies])
    figure.save(path)
