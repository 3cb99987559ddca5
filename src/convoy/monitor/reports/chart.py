"""Curves over time as SVG that stands in a page: no script draws it, so it also prints."""

import html
import math
from collections.abc import Sequence

from convoy.monitor.reports.curve import Curve, time_unit

_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 12, 40
_TICKS = 6  # about so many on an axis
# Outlines around the place where the pen stands.
_SHAPES = (
    "m-3.2 0a3.2 3.2 0 1 0 6.4 0a3.2 3.2 0 1 0 -6.4 0z",
    "m-3-3h6v6h-6z",
    "m0-4.4l4.4 4.4l-4.4 4.4l-4.4-4.4z",
    "m0-4l4 7h-8z",
)

Range = tuple[float, float]


def svg_chart(curves: Sequence[Curve], what: str) -> str:
    """Return an SVG element with curves; a mouse that rests on a point is told its numbers."""
    length, sign = time_unit(curves)
    drawn = [[(t / length, v) for t, v in curve.points()] for curve in curves]
    good = [point for points in drawn for point in points if _is_there(point)]
    x_range = (0.0, max((x for x, _ in good), default=0.0) or 1.0)
    y_range = _padded([y for _, y in good])
    axes = _axes(x_range, y_range, f"time since the start ({sign})", what)
    lines = [
        _line(curve, points, x_range, y_range) for curve, points in zip(curves, drawn, strict=True)
    ]
    label = html.escape(f"{what} over time")
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f"{axes}{''.join(lines)}</svg>"
    )


def swatch(curve: Curve) -> str:
    """Return an SVG element that shows what a curve looks like, for a legend."""
    return (
        f'<svg class="swatch" viewBox="0 0 36 10" aria-hidden="true">{_stroke(curve, "M0 5H36")}'
        f"{_mark(curve, 18, 5)}</svg>"
    )


def _line(
    curve: Curve, points: Sequence[tuple[float, float]], x_range: Range, y_range: Range
) -> str:
    """Return a curve's line, broken where there is a gap, and its points."""
    path, marks, is_down = [], [], False
    for point in points:
        if not _is_there(point):
            is_down = False
            continue
        x, y = _place_x(point[0], x_range), _place_y(point[1], y_range)
        path.append(f"{'L' if is_down else 'M'}{x:.1f} {y:.1f}")
        tip = html.escape(f"{curve.label}: {point[1]:.4g} at {point[0]:.4g}")
        marks.append(_mark(curve, x, y, f"<title>{tip}</title>"))
        is_down = True
    return f"{_stroke(curve, ''.join(path))}{''.join(marks)}"


def _stroke(curve: Curve, path: str) -> str:
    dashes = " ".join(f"{1.8 * dash:.1f}" for dash in curve.dashes)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<path class="curve" d="{path}" stroke="{curve.colour}"{dashed}/>'


def _mark(curve: Curve, x: float, y: float, tip: str = "") -> str:
    """Return a point: a circle, a square, a diamond or a triangle."""
    shape = _SHAPES[curve.look % len(_SHAPES)]
    return f'<path d="M{x:.1f} {y:.1f}{shape}" fill="{curve.colour}">{tip}</path>'


def _axes(x_range: Range, y_range: Range, x_label: str, y_label: str) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = []
    for value, text in _ticks(x_range):
        x = _place_x(value, x_range)
        parts.append(f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{text}</text>')
    for value, text in _ticks(y_range):
        y = _place_y(value, y_range)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    middle_x, middle_y = (_LEFT + right) / 2, (_TOP + bottom) / 2
    parts.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{bottom}H{right}"/>')
    parts.append(
        f'<text x="{middle_x}" y="{_HEIGHT - 6}" text-anchor="middle">{html.escape(x_label)}</text>'
    )
    parts.append(
        f'<text transform="translate(12 {middle_y}) rotate(-90)" text-anchor="middle">'
        f"{html.escape(y_label)}</text>"
    )
    return "".join(parts)


def _ticks(span: Range) -> list[tuple[float, str]]:
    """Return round numbers within a range, as numbers and as text.

    >>> [text for _, text in _ticks((0.13, 0.62))]
    ['0.2', '0.3', '0.4', '0.5', '0.6']
    """
    rough = (span[1] - span[0]) / _TICKS
    power = math.floor(math.log10(rough))
    step = next(m * 10.0**power for m in (1, 2, 5, 10) if m * 10.0**power >= 0.999 * rough)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    first, last = math.ceil(span[0] / step - 1e-9), math.floor(span[1] / step + 1e-9)
    return [(step * n, f"{step * n:,.{digits}f}") for n in range(first, last + 1)]


def _padded(values: Sequence[float]) -> Range:
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _place_x(value: float, span: Range) -> float:
    return _LEFT + (value - span[0]) / (span[1] - span[0]) * (_WIDTH - _LEFT - _RIGHT)


def _place_y(value: float, span: Range) -> float:
    height = _HEIGHT - _TOP - _BOTTOM
    return _TOP + height - (value - span[0]) / (span[1] - span[0]) * height


def _is_there(point: tuple[float, float]) -> bool:
    return math.isfinite(point[0]) and math.isfinite(point[1])
