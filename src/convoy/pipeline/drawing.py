"""A pipeline's timeline as a picture: text for a terminal, shapes for a file.

stage 1 F0-F1-....B0====F2-B1====F3-B2====
stage 2 ...F0-B0====F1-B1====F2-B2====F3-B3====
        0       10 ms    20 ms    30 ms

Forwards are drawn with "-", backwards with "=", waits with ".".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from convoy.inner.tasks.drawing import Box, Drawing, Line, Shape, Words, text_width, write_drawing
from convoy.inner.tasks.gantt import COLOURS as TASK_COLOURS
from convoy.inner.tasks.times import show_time, ticks, unit_of
from convoy.pipeline.schedule import Slot, paper_timeline
from convoy.pipeline.timeline import Span, Timeline

COLOURS = {"forward": TASK_COLOURS["forward"], "backward": TASK_COLOURS["gradient"]}
_STYLES = {"forward": "black on cyan", "backward": "black on yellow"}
_STRIPES = {"forward": "-", "backward": "="}
_WAIT = "."
_MORE = ">"
_LEAST_WIDTH = 40  # columns; a narrower terminal must wrap lines
_TICK_COLUMNS = 8  # that a mark of the axis needs


def name_of(span: Span, parts: int) -> str:
    """Return what a job is called: F3 is the forward of batch 3, or of part 3 of all."""
    return f"{span.kind[0].upper()}{span.batch * parts + span.part}"


# ---------------------------------------------------------------- text


def draw_text(timeline: Timeline, width: int) -> Text:
    """Return a timeline as lines of at most some columns, coloured for terminals that can.

    Jobs of the slowest stage keep room for their names: what is too long for the lines is cut
    off, which a ">" at their ends tells.
    """
    label = len(f"stage {timeline.stages} ")
    room = max(width, _LEAST_WIDTH) - label
    scale = _columns_per_s(timeline, room - 1)
    columns = min(room - 1, round(timeline.makespan_s * scale))
    more = _MORE if round(timeline.makespan_s * scale) > columns else ""
    drawn = Text(no_wrap=True)
    for number, spans in enumerate(timeline.by_stage(), start=1):
        drawn.append(f"stage {number}".ljust(label))
        drawn.append_text(_row(spans, timeline.parts, scale, columns))
        drawn.append(f"{more}\n")
    drawn.append(" " * label + _axis_text(columns / scale if scale else 0.0, scale, room))
    return drawn


def _columns_per_s(timeline: Timeline, room: int) -> float:
    if not timeline.makespan_s:
        return 0.0
    longest_s = max(s.end_s - s.start_s for s in timeline.spans if s.kind == "forward")
    name = len(str(timeline.batches * timeline.parts - 1)) + 2  # with a stripe after it
    return max(room / timeline.makespan_s, name / longest_s if longest_s else 0.0)


def _row(spans: Sequence[Span], parts: int, scale: float, columns: int) -> Text:
    row, at = Text(), 0
    for span in spans:
        start, end = (min(columns, round(s * scale)) for s in (span.start_s, span.end_s))
        row.append(_WAIT * (start - at))
        row.append(_job(span, parts, end - start), _STYLES[span.kind])
        at = end
    return row.append(_WAIT * (columns - at))


def _job(span: Span, parts: int, width: int) -> str:
    """Return a job in some columns: by its name where that fits, else by its letter."""
    name = name_of(span, parts)
    return (name if len(name) <= width else name[:1]).ljust(width, _STRIPES[span.kind])[:width]


def _axis_text(end_s: float, scale: float, room: int) -> str:
    axis = ""
    for moment_s in ticks(end_s, max(1, room // _TICK_COLUMNS)):
        mark = _moment(moment_s, end_s)
        at = round(moment_s * scale)
        if len(axis) <= at <= room - len(mark):
            axis = axis.ljust(at) + mark
    return axis


def _moment(moment_s: float, end_s: float) -> str:
    unit, size = unit_of(end_s)
    return f"{moment_s / size:.4g} {unit}" if moment_s else "0"


def draw_paper(cuts: int, batches: int, width: int) -> Text:
    """Return the paper's own picture: 2K+1 workers, cycles to the right, versions read.

    FS are the stages' forwards, BKS their backwards, counted from the other end; the last
    stage's two share a worker and a cycle (FB).
    """
    slots = paper_timeline(cuts, batches)
    cells: dict[tuple[int, int], list[Slot]] = {}
    for slot in slots:
        cells.setdefault((slot.worker, slot.cycle), []).append(slot)
    words = {place: _cell(found) for place, found in cells.items()}
    names = [_worker_name(worker, cuts) for worker in range(2 * cuts + 1)]
    label, cell = max(map(len, names)) + 2, max(map(len, words.values())) + 2
    cycles = batches + 2 * cuts
    shown = min(cycles, (max(width, _LEAST_WIDTH) - label - 1) // cell)
    more = _MORE if shown < cycles else ""
    drawn = Text(no_wrap=True)
    marks = "".join(str(cycle).ljust(cell) for cycle in range(shown))
    drawn.append(f"{'cycle'.ljust(label)}{marks.rstrip()}")
    for worker, name in enumerate(names):
        drawn.append(f"\n{name.ljust(label)}")
        for cycle in range(shown):
            word = words.get((worker, cycle), _WAIT)
            style = {"F": _STYLES["forward"], "B": _STYLES["backward"]}.get(word[0], "")
            drawn.append(word, style)
            drawn.append(" " * (cell - len(word)))
        drawn.append(more)
    return drawn


def _cell(slots: list[Slot]) -> str:
    letters = "".join(slot.job.kind[0].upper() for slot in slots)
    return f"{letters}{slots[0].job.batch} v{slots[0].version}"


def _worker_name(worker: int, cuts: int) -> str:
    forward, backward = f"FS{worker + 1}", f"BKS{worker - cuts + 1}"
    if worker == cuts:
        return f"{forward}+{backward}"
    return forward if worker < cuts else backward


# ---------------------------------------------------------------- a file

_WIDTH = 1280.0
_LEFT, _RIGHT = 84.0, 64.0  # room for the stages' names, and for how busy they are
_TOP, _BOTTOM, _ROW = 112.0, 40.0, 44.0
_SMALL = 11.0
_IDLE, _GRID, _FAINT = "#f1f1f1", "#d9d9d9", "#666666"


@dataclass(frozen=True, slots=True)
class _Scale:
    """Where times and stages lie in the picture."""

    end_s: float
    height: float = _ROW * 0.86  # the rest keeps rows apart

    def x(self, moment_s: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (moment_s / self.end_s if self.end_s else 0.0)

    def y(self, stage: int) -> float:
        return _TOP + _ROW * stage


def write_picture(timeline: Timeline, path: Path, title: str) -> None:
    """Draw a timeline into a file, as SVG, or as PNG where its name ends in .png."""
    write_drawing(draw_picture(timeline, title), path)


def draw_picture(timeline: Timeline, title: str) -> Drawing:
    """Return the picture of a timeline."""
    scale = _Scale(timeline.makespan_s)
    shapes: list[Shape] = [*_head(timeline, title), *_rows(timeline, scale)]
    shapes += _axis(timeline, scale)
    for span in timeline.spans:
        shapes += _job_shapes(span, timeline.parts, scale)
    return Drawing(_WIDTH, _TOP + _ROW * timeline.stages + _BOTTOM, title, tuple(shapes))


def _head(timeline: Timeline, title: str) -> list[Shape]:
    stages = f"{timeline.stages} stage{'s' if timeline.stages > 1 else ''}"
    facts = (
        f"order {timeline.order}: {timeline.batches} batches through {stages} "
        f"in {show_time(timeline.makespan_s)}, one every {show_time(timeline.period_s)} once it is "
        f"full; stages are busy {1 - timeline.bubble:.0%} of the time"
    )
    shapes: list[Shape] = [
        Words(24, 34, title, size=19, bold=True),
        Words(24, 58, facts, size=13, colour="#404040"),
    ]
    x, y = 24.0, 86.0
    for kind, colour in COLOURS.items():
        shapes += [Box(x, y - 11, 14, 14, colour, role="legend"), Words(x + 20, y, kind)]
        x += 42 + text_width(kind, 12)
    return shapes


def _rows(timeline: Timeline, scale: _Scale) -> list[Shape]:
    left, right = _LEFT, _WIDTH - _RIGHT
    shapes: list[Shape] = [Words(right + 8, _TOP - 8, "busy", size=_SMALL, colour=_FAINT)]
    for stage, part in enumerate(timeline.utilisation):
        y = scale.y(stage)
        middle = y + scale.height / 2 + 4
        shapes += [
            Box(left, y, right - left, scale.height, _IDLE, role="idle"),
            Words(left - 10, middle, f"stage {stage + 1}", size=_SMALL, anchor="end"),
            Words(right + 8, middle, f"{part:.0%}", size=_SMALL),
        ]
    return shapes


def _axis(timeline: Timeline, scale: _Scale) -> list[Shape]:
    bottom = scale.y(timeline.stages)
    shapes: list[Shape] = []
    for moment_s in ticks(timeline.makespan_s):
        x, label = scale.x(moment_s), _moment(moment_s, timeline.makespan_s)
        shapes.append(Line(((x, _TOP), (x, bottom + 4)), _GRID, 1))
        shapes.append(Words(x, bottom + 19, label, size=_SMALL, anchor="middle", colour=_FAINT))
    return shapes


def _job_shapes(span: Span, parts: int, scale: _Scale) -> list[Shape]:
    x, end, y = scale.x(span.start_s), scale.x(span.end_s), scale.y(span.stage)
    part = f", part {span.part + 1} of {parts}" if parts > 1 else ""
    tip = (
        f"{span.kind} of batch {span.batch}{part}, stage {span.stage + 1}\n"
        f"{show_time(span.end_s - span.start_s)} from {show_time(span.start_s)}, "
        f"weights of {span.version} updates"
    )
    gap = 0.6 if end - x > 2 else 0.0  # a white hair between boxes that are wide enough for it
    width, colour = max(end - x - gap, 0.3), COLOURS[span.kind]
    shapes: list[Shape] = [Box(x, y, width, scale.height, colour, role=span.kind, tip=tip)]
    name = name_of(span, parts)
    if text_width(name, _SMALL) + 4 <= end - x:
        middle = y + scale.height / 2 + 4
        shapes.append(Words((x + end) / 2, middle, name, size=_SMALL, anchor="middle"))
    return shapes
