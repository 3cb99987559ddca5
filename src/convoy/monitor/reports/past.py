"""A run read back from the events it left."""

from pathlib import Path

from convoy.errors import ConfigError
from convoy.monitor.view import RunView


def read_view(path: Path, name: str) -> RunView:
    """Return the view that all lines of a file of events give together.

    A line that is damaged, or that a killed process left half-written, is passed over: the others
    are still worth showing.
    """
    view = RunView(name)
    try:
        with path.open("rb") as file:
            for line in file:
                view.take_line(line)
    except FileNotFoundError:
        raise ConfigError(
            "this run has no events to show",
            got=str(path),
            hint="It ended before it began to train, or the file was removed.",
        ) from None
    except OSError as error:
        raise ConfigError(f"this run's events cannot be read: {error}", got=str(path)) from error
    return view
