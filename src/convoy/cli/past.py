"""A run of the past, as the commands that show one read it."""

from pathlib import Path
from typing import TYPE_CHECKING

from convoy.errors import ConfigError
from convoy.files import user_path

if TYPE_CHECKING:
    from convoy.monitor.view import RunView
    from convoy.storage.runs import RunRecord


def read_past(run: Path) -> "tuple[RunRecord, RunView]":
    """Return what a run's folder says, and what its events show.

    A run that has not ended stays as it is while a process holds it: what was so far is shown.
    """
    from convoy.monitor.dashboard.feed import GONE
    from convoy.monitor.reports.past import read_view
    from convoy.storage.runfolder import RunFolder, is_held
    from convoy.storage.runs import read_run

    record = read_run(user_path(str(run)))
    is_over = not is_held(record.path)  # before its events are read: its end must be among them
    view = read_view(RunFolder(record.path).events, record.path.resolve().name)
    if is_over:
        view.mark_gone(GONE)
    return record, view


def check_file(path: Path, kind: str) -> Path:
    """Return where a file is to be written; refuse what could not be, before work is done."""
    path = user_path(str(path))
    if path.is_dir():
        raise ConfigError(f"the {kind} cannot be written: it is a folder", got=str(path))
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"the {kind}'s folder does not exist", got=str(path))
    return path
