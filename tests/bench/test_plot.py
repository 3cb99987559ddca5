"""A report as a picture."""

from pathlib import Path

import pytest
from matplotlib.axes import Axes
from PIL import Image

from convoy.bench.plot import write_plot
from convoy.bench.report import Bar, Report, Row
from convoy.errors import StorageError


def make_report(tasks: int) -> Report:
    """Return a report of two systems on some tasks."""
    rows = [
        Row(f"task {number}", system, "samples/s", (90.0, 100.0, 120.0))
        for number in range(tasks)
        for system in ("bare", "convoy")
    ]
    return Report("single", 3, tuple(rows), (Bar("ratio", 1.0, at_least=0.97),))


def size_of(path: Path) -> tuple[int, int]:
    """Return a picture's width and height, having read all of it."""
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        return image.size


def test_picture_opens_and_has_a_panel_per_task(tmp_path: Path) -> None:
    for tasks in (1, 2):
        write_plot(make_report(tasks), tmp_path / f"{tasks}.png")
    (width, one), (same_width, two) = (size_of(tmp_path / f"{n}.png") for n in (1, 2))
    assert width == same_width == 1200
    assert two > one


def test_rows_with_a_place_become_curves_named_by_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Axes] = []
    monkeypatch.setattr(Axes, "set_title", lambda axes, *_, **__: drawn.append(axes))
    rows = [Row("net", "plain", "% right", (88.0,), x=2)]
    rows += [Row("net", "stale", "% right", (80.0 + x,), x=x) for x in (4.0, 6.0)]
    write_plot(Report("staleness", 1, tuple(rows), (), "stages"), tmp_path / "curves.png")
    assert size_of(tmp_path / "curves.png")[0] == 1200
    (axes,) = drawn
    assert axes.get_xlabel() == "stages"
    assert axes.get_ylim()[0] > 50  # not from zero: the last points are what matters
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["plain", "stale"]


@pytest.mark.parametrize("name", ["none/x.png", "file/x.png", "folder.png", "x.unknown"])
def test_path_that_cannot_be_written_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(StorageError, match="could not be written"):
        write_plot(make_report(1), tmp_path / name)
