"""Pictures for papers: which there are, how they are drawn, and that no name breaks them."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from convoy.errors import StorageError
from convoy.monitor.reports.figure import Figure
from convoy.monitor.reports.plots import (
    _draw_accuracy,
    _draw_shares,
    _draw_speeds,
    write_comparison,
    write_plots,
)
from convoy.monitor.view import RunView
from tests.monitor.reports.made_runs import events, records, start

EVERY_RUN = ["loss", "accuracy"]
OF_NODES = [*EVERY_RUN, "shares", "speeds", "waiting"]


def snapshot_of(**more: Any) -> dict[str, Any]:
    """Return the snapshot of a run made by hand."""
    view = RunView("a run")
    for record in records(events(**more)):
        view.take(record)
    return view.snapshot()


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("lockstep", [*OF_NODES, "waits"]),
        ("server", [*OF_NODES, "staleness"]),
        ("single", [*EVERY_RUN, "speeds"]),
    ],
)
def test_there_is_a_picture_of_all_that_was_measured(strategy: str, names: list[str]) -> None:
    more = {"names": (), "accuracies": (0.5,)} if strategy == "single" else {}
    written = write_plots(snapshot_of(strategy=strategy, **more), Path("new/png"))
    assert written == [Path("new/png", f"{name}.png") for name in names]
    assert sorted(written) == sorted(Path("new/png").iterdir())
    for path in written:
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            assert picture.info["dpi"] == pytest.approx((300, 300), abs=0.1)
            assert picture.width == 1500


def test_a_run_that_only_started_has_no_pictures() -> None:
    view = RunView("a run")
    view.take(records([(start(), 0.0)])[0])
    assert write_plots(view.snapshot(), Path("png")) == []


def lines_of(figure: Figure | None) -> list[Any]:
    """Return the lines of a figure's first panel."""
    assert figure is not None
    return list(figure.panels[0].lines)


@pytest.mark.parametrize(("epochs", "points"), [(3, 15), (20, 20)])
def test_training_is_shown_by_step_or_where_there_are_many_by_epoch(
    epochs: int, points: int
) -> None:
    train, test = lines_of(_draw_accuracy(snapshot_of(accuracies=[0.5] * epochs)))
    assert (len(train.get_xdata()), len(test.get_xdata())) == (points, epochs)


def test_shares_show_real_lines_and_predicted_ones_dashed_in_the_same_colour() -> None:
    snapshot = snapshot_of()
    lines = lines_of(_draw_shares(snapshot))
    real, predicted = lines[:3], lines[3:]
    assert [line.is_dashed() for line in lines] == [False] * 3 + [True] * 3
    assert [line.get_color() for line in real] == [line.get_color() for line in predicted]
    assert len({line.get_marker() for line in real}) == 3
    columns = snapshot["series"]["real"]["columns"]
    assert list(real[1].get_ydata()) == pytest.approx([100 * share for share in columns["1"]])
    assert list(real[1].get_xdata()) == pytest.approx(columns["time"])


def test_lines_differ_in_black_and_white_too() -> None:
    lines = lines_of(_draw_speeds(snapshot_of(names=[f"node {n}" for n in range(1, 9)])))
    looks = {(line.get_marker(), str(line._unscaled_dash_pattern)) for line in lines}
    assert len(looks) == 8


def test_a_node_that_was_away_leaves_a_gap() -> None:
    snapshot = snapshot_of()
    snapshot["series"]["speed"]["columns"]["1"][2] = None
    drawn = [str(value) for value in lines_of(_draw_speeds(snapshot))[1].get_ydata()]
    assert [place for place, value in enumerate(drawn) if value == "nan"] == [2]


def test_no_name_breaks_a_picture() -> None:
    names = ["$\\frac{", "_hidden", "日本\ud800", "<b>\n</b>", "x" * 300, "", "%s {0}"]
    for strategy in ("lockstep", "server"):
        assert len(write_plots(snapshot_of(names=names, strategy=strategy), Path("png"))) == 6


def test_a_folder_that_cannot_be_made_is_named() -> None:
    Path("file").touch()
    with pytest.raises(StorageError, match="could not be made"):
        write_plots(snapshot_of(), Path("file/png"))


def test_a_picture_that_cannot_be_written_is_named() -> None:
    with pytest.raises(StorageError, match="could not be written"):
        write_comparison([], [], Path("no/such/folder/x.png"))
