"""`convoy trace`: what every core does during a step, as a picture and as a trace."""

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol, runtime_checkable

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convoy.cli.options import StepOptions, given_values, whole_number
from convoy.config import Config, load_config
from convoy.errors import ConfigError
from convoy.machine import check_can_plot

if TYPE_CHECKING:
    from convoy.data.batches import Batch
    from convoy.inner.tasks.report import StepReport
    from convoy.inner.tasks.timeline import Timeline

_DEFAULT = (Path("trace.svg"), Path("trace.json"))
_FORMATS = (".svg", ".png", ".json")


@runtime_checkable
class Traceable(Protocol):
    """An executor that can tell when each of its tasks ran, and where."""

    def trace(self, batch: "Batch", divisor: float) -> "Timeline":
        """Do one step and return what happened in it."""
        ...


def trace(
    run_file: Path | None = None,
    /,
    *,
    options: StepOptions | None = None,  # type: ignore[valid-type]
    out: Annotated[list[Path] | None, Parameter(group="Output", negative="")] = None,
    steps: Annotated[int, Parameter(group="Output", converter=whole_number)] = 10,
    json: Annotated[bool, Parameter(group="Output", negative="")] = False,
) -> None:
    """Draw what every core does during a training step.

    The step is computed by the executor 'tasks'. Values are taken from RUN-FILE (TOML), over it
    from CONVOY_* variables, over those from the flags; nothing is trained or saved.

    Parameters
    ----------
    run_file:
        A TOML file with a run's options; those that do not matter for a step are passed over.
    out:
        A file to write: .svg or .png for the picture, .json for ui.perfetto.dev. May be given
        several times (default: trace.svg and trace.json).
    steps:
        Show the shortest of so many steps, after a first one that warms up.
    json:
        Print one JSON object with the step's figures as the last line on standard output.
    """
    files = tuple(out) if out else _DEFAULT
    _check_files(files)
    if steps < 1:
        raise ConfigError("'steps' is out of range", got=steps, allowed="at least 1")
    config = load_config(run_file, {**given_values(options), "executor": "tasks"})
    if config.device == "auto":
        config = config.replaced({"device": "cpu"})  # where the tasks run, whatever else is there
    timeline = _trace_step(config, steps, quiet=json)

    from convoy.inner.tasks.report import make_report

    _write(timeline, files, f"{config.model}, batch {config.batch}")
    report = make_report(timeline)
    if json:
        facts = {"model": config.model, "data": config.data, "batch": config.batch}
        print(json_format.dumps({**facts, **report.as_dict(), "files": [str(f) for f in files]}))
    else:
        _print_figures(report, files)


def _check_files(files: tuple[Path, ...]) -> None:
    """Refuse what could not be written, before anything is computed for it."""
    for file in files:
        if file.suffix not in _FORMATS:
            allowed = ", ".join(_FORMATS)
            raise ConfigError("a trace has no such format", got=str(file), allowed=allowed)
        if file.is_dir():
            raise ConfigError("the trace cannot be written: it is a folder", got=str(file))
        if not file.absolute().parent.is_dir():
            raise ConfigError("the trace's folder does not exist", got=str(file))
        if file.suffix == ".png":
            check_can_plot()


def _trace_step(config: Config, steps: int, *, quiet: bool) -> "Timeline":
    """Return the shortest of some steps on the first batch."""
    # Torch takes two seconds to import: only once the options are known to be right.
    from convoy.assembly import Given, check_choices, make_job
    from convoy.inner.tasks.report import make_report
    from convoy.monitor.events import EventStream
    from convoy.monitor.terminal import make_console, make_track
    from convoy.outer.stop import NeverStop

    check_choices(config, Given())
    track = make_track(make_console(quiet=quiet))
    job = make_job(config, Given(), Path(), EventStream([]), NeverStop(), track)
    assert isinstance(job.executor, Traceable)
    epoch = job.train.epoch(0, seed=config.seed, augmentation=job.augmentation)
    batch = epoch.batch(0, config.batch)
    job.executor.trace(batch, len(batch))  # the first one compiles, and fills the caches
    timelines = [job.executor.trace(batch, len(batch)) for _ in range(steps)]
    return min(timelines, key=lambda timeline: make_report(timeline).makespan_s)


def _write(timeline: "Timeline", files: tuple[Path, ...], title: str) -> None:
    from convoy.inner.tasks.gantt import write_gantt
    from convoy.inner.tasks.perfetto import write_trace

    for file in files:
        write = write_trace if file.suffix == ".json" else write_gantt
        write(timeline, file, title)


def _print_figures(report: "StepReport", files: tuple[Path, ...]) -> None:
    from convoy.inner.tasks.times import show_time

    console = Console(highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    size = f"{report.tasks:,} tasks, threads: {report.threads}"
    rows = {
        "step": f"{show_time(report.makespan_s)}, {size}",
        "work": f"{show_time(report.work_s)}, balance of threads {report.balance:.3f}",
        "critical path": f"{show_time(report.critical_s)}, {len(report.critical)} tasks",
        "waits on it": show_time(report.critical_wait_s),
        "bound": f"{show_time(report.bound_s)}, reached to {report.closeness:.1%}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    for file in files:  # not in the table: it would cut a long path short
        console.print(f"wrote {escape(str(file))}", soft_wrap=True)
