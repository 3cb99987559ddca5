"""A benchmark's rows as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convoy.bench.report import Report, Row
from convoy.errors import StorageError


def write_plot(report: Report, path: Path) -> None:
    """Draw every row's median with its spread, a panel per task: as bars, or as a curve."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row.task for row in report.rows))
    counts = [sum(row.task == task for row in report.rows) for task in tasks]
    curves = {row.task for row in report.rows if row.x is not None}
    heights = [
        3.0 if task in curves else 0.9 + 0.26 * count
        for task, count in zip(tasks, counts, strict=True)
    ]
    figure = Figure(figsize=(8, 0.5 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(tasks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for task, panel in zip(tasks, panels, strict=True):
        rows = [row for row in report.rows if row.task == task]
        if task in curves:
            _draw_curves(panel, rows, report.x_name)
        else:
            _draw_bars(panel, rows)
        panel.set_title(task, loc="left")
    figure.suptitle(f"convoy bench {report.bench}")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} could not be written: {error}") from error


def _draw_bars(panel: Any, rows: Sequence[Row]) -> None:  # noqa: ANN401 - matplotlib has no types
    medians, spreads = [row.median for row in rows], _spreads(rows)
    panel.barh([row.system for row in rows], medians, xerr=spreads, color="#0072b2")
    panel.invert_yaxis()
    panel.set_xlabel(rows[0].unit)


def _draw_curves(panel: Any, rows: Sequence[Row], x_name: str) -> None:  # noqa: ANN401
    styles = zip(
        ("#0072b2", "#d55e00", "#009e73", "#cc79a7"), ("o-", "s--", "^:", "d-."), strict=True
    )
    for system, (color, style) in zip(
        dict.fromkeys(row.system for row in rows), styles, strict=False
    ):
        mine = [row for row in rows if row.system == system]
        x, y = [row.x for row in mine], [row.median for row in mine]
        panel.errorbar(x, y, yerr=_spreads(mine), fmt=style, color=color, label=system, capsize=3)
        if len(mine) == 1:  # what the others are compared with
            panel.axhline(y[0], color=color, linewidth=0.8)
    panel.set_xticks(sorted({row.x for row in rows if row.x is not None}))
    panel.set_xlabel(x_name)
    panel.set_ylabel(rows[0].unit)
    if not rows[0].unit.startswith("%"):  # accuracies differ in their last points only
        panel.set_ylim(bottom=0)
    panel.legend()


def _spreads(rows: Sequence[Row]) -> list[list[float]]:
    low = [row.median - min(row.values) for row in rows]
    return [low, [max(row.values) - row.median for row in rows]]
