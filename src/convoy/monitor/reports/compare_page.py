"""A comparison of runs as one HTML file, without any script."""

import html
from collections.abc import Sequence

from convoy.monitor.reports.chart import svg_chart, swatch
from convoy.monitor.reports.compare import Comparison, Entry, evaluation_curves
from convoy.monitor.reports.compare_table import COLUMNS, cells, common_sentence, show_setting
from convoy.monitor.reports.policy import CHARSET, with_policy

_CSS = """
:root { color-scheme: light; font: 15px/1.45 system-ui, sans-serif; color: #1b1f24; }
body { max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #d9dee3;
  vertical-align: top; }
thead th { border-bottom: 2px solid #8a939c; white-space: nowrap; }
tbody th { font-weight: 600; overflow-wrap: anywhere; }
td { white-space: nowrap; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
  gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; font-size: 11px; fill: #3d454d; }
.grid { stroke: #e3e7eb; } .axis { stroke: #5b646d; fill: none; }
.curve { fill: none; stroke-width: 1.8; }
.swatch { width: 36px; height: 10px; margin-right: .5rem; vertical-align: middle; }
@media print { body { margin: 0; } }
"""


def comparison_page(entries: Sequence[Entry], comparison: Comparison) -> str:
    """Return a page with the curves, the table and what the configurations differ in."""
    curves = evaluation_curves(entries, "test_accuracy", 100.0)
    looks = {curve.label: swatch(curve) for curve in curves}
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n{CHARSET}\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{len(entries)} runs of Convoy</title>\n<style>{_CSS}</style>\n</head>\n<body>\n"
        f"<h1>{len(entries)} runs beside each other</h1>\n"
        f"{_runs_table(comparison, looks)}\n<p>{html.escape(common_sentence(comparison))}</p>\n"
        '<div class="charts">\n'
        f"{_figure('Test accuracy', svg_chart(curves, 'test accuracy (%)'))}\n"
        f"{_figure('Test loss', svg_chart(evaluation_curves(entries, 'test_loss'), 'test loss'))}\n"
        f"</div>\n<h2>What their configurations differ in</h2>\n{_settings_table(comparison)}\n"
        "</body>\n</html>\n"
    )
    return with_policy(_encodable(page))


def _runs_table(comparison: Comparison, looks: dict[str, str]) -> str:
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in COLUMNS)
    rows = []
    for row in comparison.rows:
        name, *others = cells(row)
        filled = "".join(f"<td>{html.escape(cell)}</td>" for cell in others)
        rows.append(f'<tr><th scope="row">{looks[row.run]}{html.escape(name)}</th>{filled}</tr>')
    return _table(head, rows)


def _settings_table(comparison: Comparison) -> str:
    if not comparison.differences:
        return "<p>Nothing: they were started with the same options.</p>"
    names = [row.run for row in comparison.rows]
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in ("option", *names))
    rows = []
    for key, values in comparison.differences.items():
        filled = "".join(f"<td>{html.escape(show_setting(values[name]))}</td>" for name in names)
        rows.append(f'<tr><th scope="row">{html.escape(key)}</th>{filled}</tr>')
    return _table(head, rows)


def _table(head: str, rows: Sequence[str]) -> str:
    body = "\n".join(rows)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n'
        "</table></div>"
    )


def _figure(title: str, drawing: str) -> str:
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{drawing}</figure>"


def _encodable(page: str) -> str:
    """Return a page without halves of characters, which names of folders may hold."""
    return page.encode("utf-8", "replace").decode()
