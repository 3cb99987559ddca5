"""A step as a picture: a row per thread, a box per task, the critical path marked.

thread 0 |[fwd][fwd][error  ][gradient]   [update]|  94 %
thread 1 |[fwd]   [error][gradient][combine]      |  81 %
         0        2 ms        4 ms        6 ms

A low box is help with a task of another thread.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from convoy.inner.tasks.drawing import (
    INK,
    Box,
    Drawing,
    Line,
    Shape,
    Words,
    text_width,
    write_drawing,
)
from convoy.inner.tasks.report import StepReport, make_report
from convoy.inner.tasks.timeline import Span, Timeline
from convoy.inner.tasks.times import show_time, ticks, unit_of

# Okabe and Ito's colours: told apart by all eyes, and black letters are legible on each.
COLOURS = {
    "forward": "#56b4e9",
    "error": "#d55e00",
    "gradient": "#e69f00",
    "combine": "#cc79a7",
    "update": "#009e73",
}
_OTHER = "#b0b0b0"
_IDLE = "#f1f1f1"
_GRID = "#d9d9d9"
_FAINT = "#666666"

_WIDTH = 1280.0
_LEFT, _RIGHT = 84.0, 64.0  # room for the threads' names, and for how busy they were
_TOP, _BOTTOM = 118.0, 40.0
_ROWS_HEIGHT = 640.0  # of all rows together, as long as each is legible
_SMALL = 11.0  # pixels of the smallest letters
_LOW = 0.4  # of a row's height: help with another thread's task
_NARROW = 5.0  # pixels; in a narrower box an outline would leave no colour


@dataclass(frozen=True, slots=True)
class _Scale:
    """Where times and threads lie in the picture."""

    end_s: float
    row: float

    def x(self, moment_s: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (moment_s / self.end_s if self.end_s else 0.0)

    def y(self, thread: int) -> float:
        return _TOP + self.row * thread

    @property
    def height(self) -> float:
        return self.row * 0.86  # the rest keeps rows apart


def write_gantt(timeline: Timeline, path: Path, title: str = "One step") -> None:
    """Draw a timeline into a file, as SVG, or as PNG where its name ends in .png."""
    write_drawing(draw_gantt(timeline, title), path)


def draw_gantt(timeline: Timeline, title: str = "One step") -> Drawing:
    """Return the picture of a timeline."""
    report = make_report(timeline)
    row = min(40.0, max(14.0, _ROWS_HEIGHT / timeline.threads))
    scale = _Scale(report.makespan_s, row)
    shapes = [
        *_head(timeline, report, title),
        *_rows(report, scale),
        *_axis(report, scale),
        *(_task(span, scale) for span in timeline.spans),
        *_helps(timeline, scale),
        *_bound(report, scale),
        *_critical(timeline, report, scale),
        *(word for span in timeline.spans for word in _name(span, scale)),
    ]
    height = _TOP + row * timeline.threads + _BOTTOM
    return Drawing(_WIDTH, height, title, tuple(shapes))


def _head(timeline: Timeline, report: StepReport, title: str) -> list[Shape]:
    threads = f"{report.threads} thread{'s' if report.threads > 1 else ''}"
    step = f"{report.tasks:,} tasks on {threads} in {show_time(report.makespan_s)}"
    figures = (
        f"critical path {show_time(report.critical_s)}, "
        f"waits on it {show_time(report.critical_wait_s)}"
        f"   |   work {show_time(report.work_s)}, balance of threads {report.balance:.3f}"
        f"   |   bound {show_time(report.bound_s)}, reached to {report.closeness:.1%}"
    )
    return [
        Words(24, 34, f"{title}: {step}", size=19, bold=True),
        Words(24, 58, figures, size=13, colour="#404040"),
        *_legend(timeline, report),
    ]


def _legend(timeline: Timeline, report: StepReport) -> list[Shape]:
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in timeline.spans:
        seconds[span.kind] += span.end_s - span.start_s
    kinds = {span.task: span.kind for span in timeline.spans}
    for help_ in timeline.helps:
        seconds[kinds[help_.task]] += help_.end_s - help_.start_s
    shapes: list[Shape] = []
    x, y = 24.0, 86.0
    for kind in sorted(seconds, key=_place):
        part = seconds[kind] / report.work_s if report.work_s else 0.0
        text = f"{kind} {part:.0%}" if part >= 0.005 else f"{kind} <1%"
        shapes.append(Box(x, y - 11, 14, 14, _colour(kind), role="legend"))
        shapes.append(Words(x + 20, y, text, size=12))
        x += 42 + text_width(text, 12)
    shapes.append(Box(x + 1, y - 10, 24, 12, "#ffffff", INK, 2, role="legend"))
    shapes.append(Words(x + 32, y, "critical path", size=12))
    if timeline.helps:
        x += 42 + text_width("critical path", 12)
        shapes.append(Box(x, y - 4, 14, 7, _OTHER, role="legend"))
        shapes.append(Words(x + 20, y, "help with another's task", size=12))
    return shapes


def _place(kind: str) -> tuple[int, str]:
    """Return where a kind comes in the legend: as in a step."""
    known = list(COLOURS)
    return (known.index(kind) if kind in known else len(known), kind)


def _colour(kind: str) -> str:
    return COLOURS.get(kind, _OTHER)


def _rows(report: StepReport, scale: _Scale) -> list[Shape]:
    left, right = _LEFT, _WIDTH - _RIGHT
    shapes: list[Shape] = [Words(right + 8, _TOP - 8, "busy", size=_SMALL, colour=_FAINT)]
    for thread, busy_s in enumerate(report.busy_s):
        y = scale.y(thread)
        middle = y + scale.height / 2 + 4
        part = busy_s / report.makespan_s if report.makespan_s else 0.0
        shapes += [
            Box(left, y, right - left, scale.height, _IDLE, role="idle"),
            Words(left - 10, middle, f"thread {thread}", size=_SMALL, anchor="end"),
            Words(right + 8, middle, f"{part:.0%}", size=_SMALL),
        ]
    return shapes


def _axis(report: StepReport, scale: _Scale) -> list[Shape]:
    bottom = scale.y(report.threads)
    shapes: list[Shape] = []
    for moment_s in ticks(report.makespan_s):
        x = scale.x(moment_s)
        shapes.append(Line(((x, _TOP), (x, bottom + 4)), _GRID, 1))
        unit, size = unit_of(report.makespan_s)
        label = f"{moment_s / size:.4g} {unit}" if moment_s else "0"
        shapes.append(Words(x, bottom + 19, label, size=_SMALL, anchor="middle", colour=_FAINT))
    return shapes


def _bound(report: StepReport, scale: _Scale) -> list[Shape]:
    x, bottom = scale.x(report.bound_s), scale.y(report.threads)
    return [
        Line(((x, _TOP - 16), (x, bottom + 4)), INK, 1.2, dashed=True, role="bound"),
        Words(x - 5, _TOP - 8, "bound", size=_SMALL, anchor="end"),
    ]


def _task(span: Span, scale: _Scale) -> Box:
    x, end = scale.x(span.start_s), scale.x(span.end_s)
    tip = (
        f"{span.name} ({span.kind}, task {span.task})\n"
        f"{show_time(span.end_s - span.start_s)} from {show_time(span.start_s)}, "
        f"waited {show_time(span.start_s - span.ready_s)}"
    )
    y, colour = scale.y(span.thread), _colour(span.kind)
    gap = 0.6 if end - x > 2 else 0.0  # a white hair between boxes that are wide enough for it
    return Box(x, y, max(end - x - gap, 0.3), scale.height, colour, role="task", tip=tip)


def _helps(timeline: Timeline, scale: _Scale) -> list[Shape]:
    """Return a low box for each piece that an idle thread did of another's task."""
    spans = {span.task: span for span in timeline.spans}
    low = scale.height * _LOW
    shapes: list[Shape] = []
    for help_ in timeline.helps:
        helped = spans[help_.task]
        x, end = scale.x(help_.start_s), scale.x(help_.end_s)
        y = scale.y(help_.thread) + scale.height - low
        tip = f"helps with {helped.name} ({helped.kind}, task {helped.task})"
        width = max(end - x, 0.3)
        shapes.append(Box(x, y, width, low, _colour(helped.kind), role="help", tip=tip))
    return shapes


def _name(span: Span, scale: _Scale) -> list[Shape]:
    """Return a task's name, or its part before the comma, if the box has room for it."""
    x, end = scale.x(span.start_s), scale.x(span.end_s)
    y = scale.y(span.thread) + scale.height / 2 + 4
    for name in (span.name, span.name.partition(",")[0]):
        if text_width(name, _SMALL) + 6 <= end - x and scale.height > _SMALL:
            return [Words((x + end) / 2, y, name, size=_SMALL, anchor="middle")]
    return []


def _critical(timeline: Timeline, report: StepReport, scale: _Scale) -> list[Shape]:
    """Return outlines around the tasks of the critical path, and lines from each to the next."""
    spans = {span.task: span for span in timeline.spans}
    chain = [spans[task] for task in report.critical]
    ways = [_way(before, after, scale) for before, after in pairwise(chain)]
    shapes: list[Shape] = [Line(way, "#ffffff", 3.6, role="halo") for way in ways]
    shapes += [Line(way, INK, 1.6, role="critical") for way in ways]
    shapes += [mark for span in chain for mark in _marks(span, scale)]
    return shapes


def _way(before: Span, after: Span, scale: _Scale) -> tuple[tuple[float, float], ...]:
    """Return the way from a task to the next: a wait is gone along the gap between rows."""
    middle, gap = scale.height / 2, scale.row - scale.height
    x, y = scale.x(before.end_s), scale.y(before.thread) + middle
    next_x, next_y = scale.x(after.start_s), scale.y(after.thread) + middle
    if next_x - x < 2:
        return (x, y), (next_x, next_y)
    from_below = before.thread > after.thread
    between = next_y + (middle + gap / 2) * (1 if from_below else -1)
    return (x, y), (x, between), (next_x, between), (next_x, next_y)


def _marks(span: Span, scale: _Scale) -> list[Shape]:
    x, y, height = scale.x(span.start_s), scale.y(span.thread), scale.height
    width = scale.x(span.end_s) - x
    if width >= _NARROW:
        return [Box(x + 1, y + 1, width - 2.6, height - 2, "none", INK, 2, role="outline")]
    width = max(width, 1.0)
    return [Box(x, edge, width, 3, INK, role="outline") for edge in (y, y + height - 3)]
