"""A figure for print: size, letters, axes and lines that all our pictures share."""

import itertools
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convoy.errors import StorageError
from convoy.monitor.reports.curve import Curve, short, time_unit

_WIDTH, _HEIGHT = 5.0, 3.1  # inches
_LEGEND_ROW = 0.17  # inches: the panels keep their height, however many curves there are
_LETTERS_AN_INCH = 17.5  # of a legend
_DOTS_PER_INCH = 300
_MARKERS_A_CURVE = 8
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "text.parse_math": False,  # a name with two $ is a name, no formula
}


class Figure:
    """A picture of one or more panels, side by side."""

    def __init__(self, panels: int = 1) -> None:
        from matplotlib import rc_context
        from matplotlib.figure import Figure as Canvas

        with rc_context(_STYLE):
            size = (_WIDTH * (1 if panels == 1 else 0.9 * panels), _HEIGHT)
            self._canvas = Canvas(figsize=size, layout="constrained")
            self.panels: list[Any] = list(self._canvas.subplots(1, panels, squeeze=False)[0])

    def draw(self, curves: Sequence[Curve], unit: str, *, panel: int = 0, **look: object) -> None:
        """Draw curves over time; `look` overrides what tells them apart."""
        axes = self.panels[panel]
        length, sign = time_unit(curves)
        for curve in curves:
            x, y = zip(*curve.points(), strict=True) if curve.times else ((), ())
            style = {"dashes": curve.dashes, "marker": curve.marker, **look}
            axes.plot(
                [each / length for each in x],
                y,
                color=curve.colour,
                markevery=_marked(len(x), curve.look),
                **{"linewidth": 1.3, "markersize": 4, **style},
            )
        axes.set_xlabel(f"time since the start ({sign})")
        axes.set_ylabel(unit)

    def legend(self, labels: Sequence[object], handles: Sequence[Any] | None = None) -> None:
        """Name the curves, above the panels, where nothing is hidden by it."""
        from matplotlib import rc_context

        handles = self.panels[0].lines[: len(labels)] if handles is None else handles
        # A label that begins with _ would be taken for none.
        names = [f" {short(label)}" if str(label)[:1] == "_" else short(label) for label in labels]
        width, height = self._canvas.get_size_inches()
        widest = max((len(name) for name in names), default=1)
        columns = max(1, min(len(names), int(_LETTERS_AN_INCH * width / (widest + 11))))
        rows = math.ceil(len(names) / columns)
        self._canvas.set_size_inches(width, height + _LEGEND_ROW * (rows - 1))
        with rc_context(_STYLE):
            self._canvas.legend(handles, names, loc="outside upper left", ncols=columns)

    def matrix(
        self, seconds: Sequence[Sequence[float]], names: list[str], *, numbers: bool
    ) -> None:
        """Draw how long each row's node waited for each column's; dark is long."""
        from matplotlib import rc_context

        axes, places = self.panels[0], range(len(names))
        self._canvas.set_size_inches(_WIDTH, min(4.5, _HEIGHT + 0.25 * max(0, len(names) - 4)))
        image = axes.imshow(seconds, cmap="Blues", vmin=0)
        with rc_context(_STYLE):
            names = [short(name, 14) for name in names]
            axes.set_xticks(places, names, rotation=30, ha="right", rotation_mode="anchor")
            axes.set_yticks(places, names)
            self._canvas.colorbar(image, ax=axes, label="time (s)")
        axes.grid(visible=False)
        axes.set_xlabel("for this node")
        axes.set_ylabel("this node waited")
        longest = max(max(row) for row in seconds)
        for i, j in itertools.product(places, places) if numbers else ():
            colour = "#ffffff" if seconds[i][j] > 0.6 * longest else "#000000"
            text = "-" if i == j else f"{seconds[i][j]:.{'0f' if seconds[i][j] >= 10 else '2g'}}"
            axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=7)

    def save(self, path: Path) -> None:
        """Write the picture."""
        from matplotlib import rc_context

        with rc_context(_STYLE), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")  # a box stands for it
            try:
                self._canvas.savefig(path, dpi=_DOTS_PER_INCH, format="png")
            except OSError as error:
                raise StorageError(f"{path} could not be written: {error}") from error


def _marked(points: int, look: int) -> tuple[int, int]:
    """Return the first place that gets a marker, and the step: of many, not all at one place."""
    step = max(1, points // _MARKERS_A_CURVE)
    return (look * max(1, step // 4)) % step, step
