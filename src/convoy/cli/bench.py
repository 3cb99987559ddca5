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
    from convoy.bench.catalog import Benchmark
    from convoy.bench.report import Report


def bench(
    name: str | None = None,
    /,
    *,
    json: Annotated[bool, Parameter(negative="")] = False,
    quick: Annotated[bool, Parameter(negative="")] = False,
    png: Path | None = None,
    data_dir: Path | None = None,
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
    more = {} if data_dir is None else {"data_dir": _checked_data_dir(data_dir, name, measure)}
    report = measure(quick=quick, tell=console.print, **more)
    if png is not None:
        from convoy.bench.plot import write_plot

        write_plot(report, png)
    if json:
        print(json_format.dumps(report.as_dict()))
    else:
        _print_tables(report)


def _checked_data_dir(path: Path, name: str, measure: "Benchmark") -> Path:
    if "data_dir" not in inspect.signature(measure).parameters:
        raise ConfigError(f"the benchmark '{name}' makes its own data", got=str(path))
    if not path.is_dir():
        raise ConfigError("the data's folder does not exist", got=str(path))
    return path


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
    rows = Table("task", "system", "median", "spread", "unit", box=None)
    for row in report.rows:
        rows.add_row(row.task, row.system, _number(row.median), f"{row.spread:.1%}", row.unit)
    console.print(rows)
    bars = Table("ratio", "value", "bar", "", box=None)
    for bar in report.bars:
        bound = f">= {bar.at_least}" if bar.at_least is not None else f"<= {bar.at_most}"
        bars.add_row(bar.name, f"{bar.value:.3f}", bound, "met" if bar.is_met else "[red]missed[/]")
    console.print(bars)


def _number(value: float) -> str:
    """Show a number with three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
