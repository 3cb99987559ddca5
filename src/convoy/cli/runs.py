"""`convoy runs`: look at what was trained."""

import json as json_format
from pathlib import Path
from typing import Annotated

import cyclopts
from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convoy.cli.compare import compare
from convoy.storage.runfolder import DEFAULT_ROOT

runs = cyclopts.App(name="runs", help="Look at past runs.")
runs.command(compare)


@runs.command(name="list")
def list_(
    root: Path = DEFAULT_ROOT, /, *, json: Annotated[bool, Parameter(negative="")] = False
) -> None:
    """List the runs below a folder.

    Parameters
    ----------
    root:
        The folder that runs lie in.
    json:
        Print one JSON object instead of a table.
    """
    from convoy.storage.runs import list_runs

    records = list_runs(root)
    if json:
        rows = [{**r.summary, "run_dir": str(r.path), "state": r.state} for r in records]
        print(json_format.dumps({"runs": rows}))
        return
    table = Table("run", "state", "model", "data", "epochs", "accuracy", "seconds", box=None)
    # A name that is cut short cannot be given to --resume.
    table.columns[0].min_width = max((len(record.path.name) for record in records), default=0)
    for record in records:
        summary = record.summary
        table.add_row(
            escape(record.path.name),
            escape(record.state),
            escape(str(record.config.get("model"))),
            escape(str(record.config.get("data"))),
            escape(str(summary.get("epochs", "-"))),
            _show(summary.get("test_accuracy"), ".2%"),
            _show(summary.get("seconds"), ".1f"),
        )
    Console(soft_wrap=True).print(table if records else f"no runs in {escape(str(root))}")


@runs.command
def show(run: Path, /, *, json: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Show one run: how it was set up, how it went, what it left.

    Parameters
    ----------
    run:
        The run's folder.
    json:
        Print one JSON object instead of tables.
    """
    from convoy.storage.runs import read_run

    record = read_run(run)
    if json:
        whole = {
            "run_dir": str(record.path),
            "state": record.state,
            "config": record.config,
            "summary": record.summary,
            "checkpoints": record.checkpoints,
        }
        print(json_format.dumps(whole))
        return
    console = Console(highlight=False, soft_wrap=True)
    reason = record.summary.get("reason", "it has not ended, or was killed")
    console.print(
        f"[bold]{escape(str(record.path))}[/]: {escape(record.state)} ({escape(str(reason))})"
    )
    settings = ", ".join(f"{key}={value}" for key, value in record.config.items())
    console.print(f"[dim]{escape(settings)}[/]")
    console.print(_history_table(record.summary.get("history")))
    console.print(f"checkpoints: {', '.join(record.checkpoints) or 'none'}")


def _history_table(history: object) -> Table:
    table = Table("epoch", "train loss", "train acc", "test loss", "test acc", "seconds", box=None)
    columns = {
        "epoch": "d",
        "train_loss": ".4f",
        "train_accuracy": ".2%",
        "test_loss": ".4f",
        "test_accuracy": ".2%",
        "seconds": ".1f",
    }
    for record in history if isinstance(history, list) else []:
        if isinstance(record, dict):
            table.add_row(*(_show(record.get(name), form) for name, form in columns.items()))
    return table


def _show(value: object, form: str) -> str:
    """Format a number of a summary, which anyone may have edited."""
    good = isinstance(value, int if form == "d" else int | float)
    return format(value, form) if good else "-"
