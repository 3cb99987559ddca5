"""`convoy doctor`: what this machine can do."""

import json as json_format
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from convoy.errors import EnvironmentProblem


def doctor(*, json: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Check this machine and measure it for a few seconds.

    Exits with code 3 if something that training needs is missing.

    Parameters
    ----------
    json:
        Print one JSON object instead of a table.
    """
    from convoy.checkup import examine

    checkup = examine()
    if json:
        print(json_format.dumps(checkup.as_dict()))
    else:
        table = Table(show_header=False, box=None, pad_edge=False)
        for finding in checkup.findings:
            mark = "[green]ok[/]" if finding.good else "[red]no[/]"
            table.add_row(mark, finding.name, escape(finding.text))
        Console(highlight=False, soft_wrap=True).print(table)
    if checkup.problems:
        raise EnvironmentProblem(f"this machine is not fit to train: {checkup.problems[0].text}")
