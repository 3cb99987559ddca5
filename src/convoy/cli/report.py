"""`convoy report`: a run as one page that can be kept and sent, and as pictures for papers."""

import json as json_format
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape

from convoy.cli.past import check_file, read_past
from convoy.errors import ConfigError
from convoy.files import user_path
from convoy.machine import check_can_plot

_NAME = "report.html"


def report(
    run: Path,
    /,
    *,
    out: Path | None = None,
    png: Path | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Write a run's page as one HTML file that needs no server, no network and no Convoy.

    Parameters
    ----------
    run:
        The run's folder; the run may still be going on.
    out:
        The file to write (default: report.html in the run's folder).
    png:
        A folder that pictures for papers are written to as well.
    json:
        Print one JSON object with the files' names instead of lines.
    """
    from convoy.monitor.reports.report import write_report

    if png is not None:
        png = _check_folder(png)
    record, view = read_past(run)
    page = check_file(record.path / _NAME if out is None else out, "report")
    write_report(view, page)
    pictures = [] if png is None else _draw(view.snapshot(), png)
    if json:
        _print_json(view.sections(), record.path, page, pictures)
        return
    console = Console(highlight=False)
    for file in (page, *pictures):
        console.print(f"wrote {escape(str(file))}", soft_wrap=True)


def _check_folder(folder: Path) -> Path:
    """Return the folder that pictures go to; refuse what could not be, before work is done."""
    folder = user_path(str(folder))
    if folder.exists() and not folder.is_dir():
        raise ConfigError("pictures go into a folder, and this is a file", got=str(folder))
    check_can_plot()
    return folder


def _draw(snapshot: dict[str, Any], folder: Path) -> list[Path]:
    from convoy.monitor.reports.plots import write_plots

    return write_plots(snapshot, folder)


def _print_json(sections: dict[str, Any], run: Path, page: Path, pictures: list[Path]) -> None:
    facts = {
        "run_dir": str(run),
        "state": sections["run"]["state"],
        "test_accuracy": sections["progress"]["test_accuracy"],
        "report": str(page),
        "pictures": [str(picture) for picture in pictures],
    }
    print(json_format.dumps(facts))
