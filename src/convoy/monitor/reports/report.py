"""A run as one HTML file: the dashboard's page, with what it shows written into it."""

from pathlib import Path

from convoy.errors import StorageError
from convoy.files import write_atomically
from convoy.monitor.reports.bundle import bundle
from convoy.monitor.view import RunView

PAGE = Path(__file__).parents[1] / "dashboard" / "static"


def report_page(view: RunView) -> str:
    """Return a page that shows a run and can be opened, sent and kept without Convoy."""
    return bundle(PAGE, view.snapshot())


def write_report(view: RunView, path: Path) -> None:
    """Write the page of a run."""
    page = report_page(view)
    try:
        write_atomically(path, page)
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error}") from error
