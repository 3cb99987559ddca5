"""`convoy train`: train a network, or go on with a run."""

import json as json_format
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convoy.cli.company import Company
from convoy.cli.options import Options, given_values
from convoy.config import Config, changed_on_resume, load_config, read_toml
from convoy.errors import ConfigError
from convoy.machine import usable_cores

if TYPE_CHECKING:
    from convoy.launch.torchrun import Placement
    from convoy.outer.crew import Serving
    from convoy.run import Run

_CLEARLY = 1.1  # a prediction that is closer to 1 says nothing


def train(
    run_file: Path | None = None,
    /,
    *,
    options: Options | None = None,  # type: ignore[valid-type]
    resume: Annotated[Path | None, Parameter(group="Output")] = None,
    watch: Annotated[bool, Parameter(group="Output", negative="")] = False,
    tensorboard: Annotated[bool, Parameter(group="Output", negative="")] = False,
    json: Annotated[bool, Parameter(group="Output", negative="")] = False,
    quiet: Annotated[bool, Parameter(group="Output", negative="")] = False,
) -> None:
    """Train a network.

    Without any option this trains LeNet-5 on the data set that comes with Convoy. Values are
    taken from RUN-FILE (TOML), over it from CONVOY_* variables, over those from the flags.
    Under torchrun every rank is one node: torchrun --nproc-per-node 4 -m convoy train

    Parameters
    ----------
    run_file:
        A TOML file with any of the options below: lr = 0.1
    resume:
        Go on with the run in this folder, exactly where its last checkpoint left it.
    watch:
        Serve a page that shows the run while it goes on, on this machine only; its link is printed.
    tensorboard:
        Write the curves for TensorBoard too, into the run's folder.
    json:
        Print one JSON object about the run as the last line on standard output.
    quiet:
        Show no progress.
    """
    given = given_values(options)
    if resume is not None and run_file is not None:
        raise ConfigError("a resumed run has its own config", got=str(run_file))
    placement = _placement()
    if placement is not None and not placement.is_lead:
        _take_part(placement, run_file, resume, given)
        return
    if resume is None:
        given = load_config(run_file, given).as_dict()
    with ExitStack() as stack:
        serving = None
        if placement is not None:
            from convoy.launch.torchrun import announced, options_of_lead

            config = _config(run_file, resume, given)
            given |= options_of_lead(placement, config, usable_cores())
            serving = stack.enter_context(announced(placement))
        run = start_run(
            given, resume, quiet=quiet, serving=serving, watch=watch, tensorboard=tensorboard
        )
    show_run(run, json=json, quiet=quiet)


def _placement() -> "Placement | None":
    """Return this process's place under torchrun, if that has started it."""
    if "WORLD_SIZE" not in os.environ:
        return None
    from convoy.launch.torchrun import read_placement

    return read_placement(os.environ)


def _config(run_file: Path | None, resume: Path | None, given: dict[str, Any]) -> Config:
    """Return the config of the run to come; a run that cannot be read is told of later."""
    if resume is None:
        return load_config(run_file, given)
    saved = resume / "config.toml"
    return changed_on_resume(Config(**read_toml(saved)) if saved.is_file() else Config(), given)


def _take_part(
    placement: "Placement", run_file: Path | None, resume: Path | None, given: dict[str, Any]
) -> None:
    """Be one of torchrun's other ranks: train, and leave all telling to rank 0."""
    import torch

    from convoy.launch.join import join
    from convoy.launch.torchrun import find_lead, order_of_rank

    lead = find_lead(placement)
    config = _config(run_file, resume, given)  # after rank 0, so that mistakes are told once
    cores, gpus = usable_cores(), torch.cuda.device_count()
    order = order_of_rank(placement, config, lead, cores=cores, gpus=gpus)
    join(order, reconnect_s=config.quorum_timeout_s, tell=lambda _: None)


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
    watch: bool = False,
    tensorboard: bool = False,
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
        around=Company(watch, tensorboard, tell=lambda text: console.print(escape(text))).around,
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
    if "submissions" in summary:
        rows["service"] = (
            f"{summary['submissions']:,} submissions, mean staleness "
            f"{summary['staleness_mean']:.2f}, {sum(summary['refused'].values())} refused, "
            f"{summary['service_restarts']} restarts"
        )
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
    if slowdown is None or len(summary["node_table"]) == 1:
        return
    if slowdown >= _CLEARLY:
        told = f"needed {slowdown:.1f}x the time: all would wait for the slowest node"
    else:
        told = "done as well: these nodes are about equal"
    console.print(f"By the speeds measured, equal shares would have {told}.")
