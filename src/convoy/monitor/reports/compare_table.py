"""A comparison in words: what a cell of its tables says."""

from convoy.monitor.reports.compare import Comparison, Row

COLUMNS = (
    *("run", "state", "model", "strategy", "nodes", "best", "last", "time"),
    *("to common", "samples/s", "idle", "faults"),
)


def cells(row: Row) -> list[str]:
    """Return a row as text, in the order of COLUMNS."""
    return [
        row.run,
        row.state,
        _text(row.model),
        _text(row.strategy),
        str(row.nodes),
        _show(row.best_accuracy, ".2%"),
        _show(row.last_accuracy, ".2%"),
        _show(row.seconds, ",.1f", " s"),
        _show(row.seconds_to_common, ",.1f", " s"),
        _show(row.samples_per_s, ",.0f"),
        _show(row.idle, ".1%"),
        str(row.faults),
    ]


def common_sentence(comparison: Comparison) -> str:
    """Return what the columns "best", "last" and "to common" are about."""
    common = comparison.common_accuracy
    what = "best, last: test accuracy; to common: time to the highest that every run reaches"
    return f"{what}, {'unknown yet' if common is None else f'{common:.2%}'}"


def show_setting(value: object) -> str:
    """Return a value of a configuration; one that is not there is a dash."""
    if value is None or value == []:
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _text(value: object) -> str:
    return "-" if value is None else str(value)


def _show(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"
