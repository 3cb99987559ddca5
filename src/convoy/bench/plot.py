"""A benchmark's rows as a picture."""

from pathlib import Path

from convoy.bench.report import Report
from convoy.errors import StorageError


def write_plot(report: Report, path: Path) -> None:
    """Draw every row's median as a bar with its spread, a panel per task."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(row.task for row in report.rows))
    counts = [sum(row.task == task for row in report.rows) for task in tasks]
    heights = [0.9 + 0.26 * count for count in counts]
    figure = Figure(figsize=(8, 0.5 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(tasks), 1, squeeze=False, height_ratios=heights)[:, 0]
    for task, panel in zip(tasks, panels, strict=True):
        rows = [row for row in report.rows if row.task == task]
        medians = [row.median for row in rows]
        low = [row.median - min(row.values) for row in rows]
        high = [max(row.values) - row.median for row in rows]
        panel.barh([row.system for row in rows], medians, xerr=[low, high], color="#0072b2")
        panel.invert_yaxis()
        panel.set_title(task, loc="left")
        panel.set_xlabel(rows[0].unit)
    figure.suptitle(f"convoy bench {report.bench}")
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} could not be written: {error}") from error
