"""`convoy bench`: measure Convoy beside its peers."""

import inspect
import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from convoy.errors import ConfigError
from convoy.machine import check_can_plot

if TYPE_CHECKING:
    from collections.abc import Mapping

    from convoy.bench.catalog import Benchmark
    from convoy.bench.report import Bar, Report


def bench(
    name: str | None = None,
    /,
    *,
    json: Annotated[bool, Parameter(negative="")] = False,
    quick: Annotated[bool, Parameter(negative="")] = False,
    png: Path | None = None,
    data_dir: Path | None = None,
    only: Annotated[list[str] | None, Parameter(negative="")] = None,
    keep: Path | None = None,
) -> None:
    """Measure one question beside its peers; without NAME, list the questions.

    Parameters
    ----------
    name:
        Which question to measure.
    json:
        Print one JSON object as the last line on standard output.
    quick:
        A rough answer within 50 seconds on two cores.
    png:
        Draw the result into this file.
    data_dir:
        Where the data lies, for a benchmark that trains on a named data set.
    only:
        Measure only tasks with this text in their names; may be given several times.
    keep:
        Keep the runs of a long study in this file; those that it holds are not made again.
    """
    from convoy.launch.quiet import quiet_engines

    quiet_engines()
    from convoy.bench.catalog import BENCHMARKS

    if name is None:
        _print_list(BENCHMARKS.describe())
        return
    BENCHMARKS.check(name)
    if png is not None:
        _check_picture(png)
    console = Console(stderr=True, highlight=False)
    measure = BENCHMARKS.get(name)
    asked = {"data_dir": data_dir, "only": only, "keep": keep}
    more = {option: value for option, value in asked.items() if value}
    _check_options(more, name, measure)
    if data_dir is not None and not data_dir.is_dir():
        raise ConfigError("the data's folder does not exist", got=str(data_dir))
    if keep is not None and not keep.absolute().parent.is_dir():
        raise ConfigError("the folder of the kept results does not exist", got=str(keep))
    report = measure(quick=quick, tell=console.print, **more)
    if png is not None:
        from convoy.bench.plot import write_plot

        write_plot(report, png)
    if json:
        print(json_format.dumps(report.as_dict()))
    else:
        _print_tables(report)


_WITHOUT = {
    "data_dir": "makes its own data",
    "only": "is measured as a whole",
    "keep": "is no study of many runs: nothing of it can be kept",
}


def _check_options(more: "Mapping[str, object]", name: str, measure: "Benchmark") -> None:
    """Refuse what the benchmark knows nothing of."""
    for option, value in more.items():
        if option not in inspect.signature(measure).parameters:
            shown = ", ".join(value) if isinstance(value, list) else str(value)
            raise ConfigError(f"the benchmark '{name}' {_WITHOUT[option]}", got=shown)


def _check_picture(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise ConfigError("the picture's folder does not exist", got=str(path))
    check_can_plot()


def _print_list(descriptions: dict[str, str]) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, description in descriptions.items():
        table.add_row(f"convoy bench {name}", description)
    Console(highlight=False).print(table)


def _print_tables(report: "Report") -> None:
    console = Console(highlight=False)
    has_curves = any(row.x is not None for row in report.rows)
    places = [report.x_name] if has_curves else []
    rows = Table("task", *places, "system", "median", "spread", "unit", box=None)
    for row in report.rows:
        place = ["" if row.x is None else f"{row.x:g}"] if has_curves else []
        median, spread = _number(row.median), f"{row.spread:.1%}"
        rows.add_row(row.task, *place, row.system, median, spread, row.unit)
    console.print(rows)
    bars = Table("ratio", "value", "bar", "", box=None)
    for bar in report.bars:
        bars.add_row(bar.name, f"{bar.value:.3f}", *_verdict(bar))
    console.print(bars)


def _verdict(bar: "Bar") -> tuple[str, str]:
    """Return what was asked for, if anything was, and whether it was reached."""
    verdict = "met" if bar.is_met else "[red]missed[/]"
    if bar.at_least is not None:
        return f">= {bar.at_least}", verdict
    return (f"<= {bar.at_most}", verdict) if bar.at_most is not None else ("", "")


def _number(value: float) -> str:
    """Show a number with three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.4g}"
