"""`convoy train`: train a network, or go on with a run."""

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convoy.cli.options import Options, given_values
from convoy.config import load_config
from convoy.errors import ConfigError

if TYPE_CHECKING:
    from convoy.outer.crew import Serving
    from convoy.run import Run


def train(
    run_file: Path | None = None,
    /,
    *,
    options: Options | None = None,  # type: ignore[valid-type]
    resume: Annotated[Path | None, Parameter(group="Output")] = None,
    json: Annotated[bool, Parameter(group="Output", negative="")] = False,
    quiet: Annotated[bool, Parameter(group="Output", negative="")] = False,
) -> None:
    """Train a network.

    Without any option this trains LeNet-5 on the data set that comes with Convoy. Values are
    taken from RUN-FILE (TOML), over it from CONVOY_* variables, over those from the flags.

    Parameters
    ----------
    run_file:
        A TOML file with any of the options below: lr = 0.1
    resume:
        Go on with the run in this folder, exactly where its last checkpoint left it.
    json:
        Print one JSON object about the run as the last line on standard output.
    quiet:
        Show no progress.
    """
    given = given_values(options)
    if resume is not None and run_file is not None:
        raise ConfigError("a resumed run has its own config", got=str(run_file))
    if resume is None:
        given = load_config(run_file, given).as_dict()
    show_run(start_run(given, resume, quiet=quiet), json=json, quiet=quiet)


def show_run(run: "Run", *, json: bool, quiet: bool) -> None:
    """Print how a run went, for a program or for a person."""
    if json:
        print(json_format.dumps(run.summary))
    elif not quiet:
        print_summary(run, Console(highlight=False), run.directory)


def start_run(
    options: dict[str, Any],
    resume: Path | None,
    *,
    quiet: bool,
    serving: "Serving | None" = None,
) -> "Run":
    """Train, and show progress on standard error."""
    # Torch takes two seconds to import: only once the options are known to be right.
    from convoy.monitor.terminal import TerminalView, make_console, make_track
    from convoy.trainer import run_training

    console = make_console(quiet=quiet)
    return run_training(
        options,
        resume=resume,
        sinks=[TerminalView(console)],
        track=make_track(console),
        serving=serving,
    )


def print_summary(run: "Run", console: Console, shown_folder: Path) -> None:
    """Print how a run went and what it left, for a person."""
    summary = run.summary
    rows = {
        "test accuracy": f"{run.accuracy:.2%} (best {run.best_accuracy:.2%})",
        "speed": f"{summary['samples_per_s']:,.0f} samples/s on {run.config.device}",
        "time": f"{summary['seconds']:.1f} s for {summary['epochs']} epochs",
        "run": str(shown_folder),
    }
    if run.checkpoint is not None:
        rows["checkpoint"] = str(shown_folder / run.checkpoint.relative_to(run.directory))
    for name, value in rows.items():  # no table: it would cut a long path short
        console.print(f"{name:<15}{escape(value)}", soft_wrap=True)
    if "node_table" in summary:
        print_nodes(summary, console)


def print_nodes(summary: dict[str, Any], console: Console) -> None:
    """Print what each node did, and what equal shares would have cost."""
    table = Table("node", "device", "samples/s", "share", "waiting", "faults", "", box=None)
    for row, share in zip(summary["node_table"], summary["shares"], strict=True):
        table.add_row(
            escape(row["name"]),
            row["device"],
            f"{row['speed']:,.0f}",
            f"{share:.1%}",
            f"{row['waiting']:.1%}",
            str(row["faults"]),
            escape(row["reason"] if row["state"] == "aside" else ""),
        )
    console.print()
    console.print(table)
    slowdown = summary["equal_shares_slowdown"]
    if slowdown is not None and len(summary["node_table"]) > 1:
        console.print(
            f"With equal shares every step would have waited for the slowest node: "
            f"{slowdown:.1f}x the time."
        )
