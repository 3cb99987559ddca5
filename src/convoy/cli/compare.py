"""`convoy runs compare`: several runs beside each other."""

import json as json_format
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convoy.cli.past import check_file, read_past
from convoy.errors import ConfigError, StorageError
from convoy.files import write_atomically
from convoy.machine import check_can_plot

_ANY_WIDTH = 10_000  # a name that is cut short could be any run's

if TYPE_CHECKING:
    from convoy.monitor.reports.compare import Comparison, Entry


def compare(
    *runs: Annotated[Path, Parameter(json_list=False)],  # a folder's name may begin with [
    html: Path | None = None,
    png: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Set runs beside each other: how good, how fast, and what was different.

    Parameters
    ----------
    runs:
        The runs' folders, two or more.
    html:
        A file to write as well: a page with the tables and the curves.
    png:
        A file to write as well: the curves of accuracy and loss over time.
    json:
        Print one JSON object instead of tables.
    """
    from convoy.monitor.reports.compare import compare as set_beside

    if html is not None:
        html = check_file(html, "page")
    if png is not None:
        png = check_file(png, "picture")
        check_can_plot()
    entries = _read(runs)
    comparison = set_beside(entries)
    if html is not None:
        _write_page(entries, comparison, html)
    if png is not None:
        _draw(entries, png)
    if json:
        print(json_format.dumps(comparison.as_dict(), default=str))
    else:
        _print_tables(comparison, [file for file in (html, png) if file is not None])


def _read(runs: Sequence[Path]) -> "list[Entry]":
    from convoy.monitor.reports.compare import Entry, tell_apart

    if len(runs) < 2:
        raise ConfigError("a comparison needs at least two runs", got=len(runs))
    folders = [run.resolve() for run in runs]
    for run, folder in zip(runs, folders, strict=True):
        if folders.count(folder) > 1:
            raise ConfigError("this run is named twice", got=str(run))
    found = [read_past(run) for run in runs]
    return [
        Entry(name, view.snapshot(), record.summary, record.config)
        for name, (record, view) in zip(tell_apart(folders), found, strict=True)
    ]


def _write_page(entries: "Sequence[Entry]", comparison: "Comparison", path: Path) -> None:
    from convoy.monitor.reports.compare_page import comparison_page

    try:
        write_atomically(path, comparison_page(entries, comparison))
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error}") from error


def _draw(entries: "Sequence[Entry]", path: Path) -> None:
    from convoy.monitor.reports.compare import evaluation_curves
    from convoy.monitor.reports.plots import write_comparison

    accuracies = evaluation_curves(entries, "test_accuracy", 100.0)
    write_comparison(accuracies, evaluation_curves(entries, "test_loss"), path)


def _print_tables(comparison: "Comparison", files: Sequence[Path]) -> None:
    from convoy.monitor.reports.compare_table import COLUMNS, cells, common_sentence, show_setting

    console = Console(highlight=False, width=_ANY_WIDTH)
    _print(console, COLUMNS, [cells(row) for row in comparison.rows])
    console.print(f"[dim]{common_sentence(comparison)}[/]\n")
    names = [row.run for row in comparison.rows]
    differences = [
        [key, *(show_setting(values[name]) for name in names)]
        for key, values in comparison.differences.items()
    ]
    if differences:
        _print(console, ("option", *names), differences)
    else:
        console.print("all options are the same")
    for file in files:
        console.print(f"wrote {escape(str(file))}")


def _print(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*map(escape, columns), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
