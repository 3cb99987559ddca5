"""A drawing of boxes, lines and words in pixels, written as SVG, or as PNG by matplotlib."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from xml.sax.saxutils import escape, quoteattr

from convoy.errors import StorageError
from convoy.files import write_atomically
from convoy.machine import check_can_plot

INK = "#1a1a1a"
_FONTS = "Inter, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"
_PNG_SCALE = 2  # pixels of the PNG per pixel of the drawing, for screens of today
_POINTS_PER_PIXEL = 0.72  # what matplotlib calls a point, at 100 pixels an inch
_SIDES: dict[str, Literal["left", "center", "right"]] = {
    "start": "left",
    "middle": "center",
    "end": "right",
}


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle; `role` is its class in SVG, `tip` what is shown when a mouse rests on it."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    line: str = "none"
    line_width: float = 0.0
    role: str = ""
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float
    dashed: bool = False
    role: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """A line of text; `y` is where its letters stand."""

    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: Literal["start", "middle", "end"] = "start"
    bold: bool = False
    colour: str = INK


Shape = Box | Line | Words


@dataclass(frozen=True, slots=True)
class Drawing:
    """Shapes on white, the later ones over the earlier."""

    width: float
    height: float
    title: str
    shapes: tuple[Shape, ...]


def text_width(text: str, size: float) -> float:
    """Return at least the width of a text, in any of the fonts."""
    return 0.62 * size * len(text)


def write_drawing(drawing: Drawing, path: Path) -> None:
    """Write a drawing in the format that the file's name ends in: .svg or .png.

    Raises:
        EnvironmentProblem: a PNG needs matplotlib, which is not there.
        StorageError: the file cannot be written.
    """
    try:
        if path.suffix == ".png":
            _write_png(drawing, path)
        else:
            write_atomically(path, as_svg(drawing))
    except OSError as error:
        raise StorageError(f"{path} could not be written: {error}") from error


def as_svg(drawing: Drawing) -> str:
    """Return a drawing as the text of an SVG file."""
    width, height = _number(drawing.width), _number(drawing.height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{_FONTS}">',
        f"<title>{_text(drawing.title)}</title>",
        f'<path d="M0 0H{width}V{height}H0Z" fill="#ffffff"/>',
        *(_as_element(shape) for shape in drawing.shapes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _as_element(shape: Shape) -> str:
    if isinstance(shape, Box):
        return _box_element(shape)
    if isinstance(shape, Line):
        points = " ".join(f"{_number(x)},{_number(y)}" for x, y in shape.points)
        facts = {
            "class": shape.role,
            "points": points,
            "fill": "none",
            "stroke": shape.colour,
            "stroke-width": _number(shape.width),
            "stroke-linejoin": "round",
            "stroke-dasharray": "5 4" if shape.dashed else "",
        }
        return f"<polyline{_attributes(facts)}/>"
    facts = {
        "x": _number(shape.x),
        "y": _number(shape.y),
        "font-size": _number(shape.size),
        "text-anchor": shape.anchor,
        "font-weight": "bold" if shape.bold else "",
        "fill": shape.colour,
        "pointer-events": "none",  # the box below has the tip
    }
    return f"<text{_attributes(facts)}>{_text(shape.text)}</text>"


def _box_element(box: Box) -> str:
    facts = {
        "class": box.role,
        "x": _number(box.x),
        "y": _number(box.y),
        "width": _number(box.width),
        "height": _number(box.height),
        "fill": box.fill,
        "stroke": box.line if box.line_width else "",
        "stroke-width": _number(box.line_width) if box.line_width else "",
    }
    if not box.tip:
        return f"<rect{_attributes(facts)}/>"
    return f"<rect{_attributes(facts)}><title>{_text(box.tip)}</title></rect>"


def _attributes(facts: dict[str, str]) -> str:
    return "".join(f" {name}={quoteattr(value)}" for name, value in facts.items() if value)


def _text(text: str) -> str:
    """Escape a text; what XML cannot hold at all becomes a question mark."""
    return escape("".join(c if c.isprintable() or c == "\n" else "?" for c in text))


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _write_png(drawing: Drawing, path: Path) -> None:
    check_can_plot()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(drawing.width / 100, drawing.height / 100), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.axis("off")
    for layer, shape in enumerate(drawing.shapes):
        for artist in _artists(shape):
            artist.set_zorder(layer)
            axes.add_artist(artist)
    figure.savefig(path, dpi=100 * _PNG_SCALE, format="png")


def _artists(shape: Shape) -> Iterable[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle
    from matplotlib.text import Text

    if isinstance(shape, Box):
        yield Rectangle(
            (shape.x, shape.y),
            shape.width,
            shape.height,
            facecolor=shape.fill,
            edgecolor=shape.line,
            linewidth=shape.line_width * _POINTS_PER_PIXEL,
        )
    elif isinstance(shape, Line):
        xs, ys = zip(*shape.points, strict=True)
        yield Line2D(
            xs,
            ys,
            color=shape.colour,
            linewidth=shape.width * _POINTS_PER_PIXEL,
            linestyle="dashed" if shape.dashed else "solid",
        )
    else:
        yield Text(
            shape.x,
            shape.y,
            shape.text,
            color=shape.colour,
            fontsize=shape.size * _POINTS_PER_PIXEL,
            fontweight="bold" if shape.bold else "normal",
            horizontalalignment=_SIDES[shape.anchor],
            parse_math=False,  # a "$" in a name is a dollar
        )
