"""The picture of a step: whole, legible, and nothing in a name can break it."""

import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from convoy.errors import EnvironmentProblem, StorageError
from convoy.inner.tasks.drawing import Box, Words, as_svg
from convoy.inner.tasks.gantt import COLOURS, draw_gantt, write_gantt
from convoy.inner.tasks.timeline import Help, Span, Timeline
from tests.inner.tasks.graphs import DAG_1

SVG = "{http://www.w3.org/2000/svg}"


def parsed(timeline: Timeline, title: str = "One step") -> ElementTree.Element:
    """Return the picture as XML."""
    return ElementTree.fromstring(as_svg(draw_gantt(timeline, title)))


def of_role(root: ElementTree.Element, element: str, role: str) -> list[ElementTree.Element]:
    """Return the elements of a class."""
    return [found for found in root.iter(f"{SVG}{element}") if found.get("class") == role]


def texts(root: ElementTree.Element) -> str:
    """Return all that is written in the picture."""
    return "\n".join(found.text or "" for found in root.iter(f"{SVG}text"))


def test_every_task_is_a_box_with_its_name_as_tip() -> None:
    boxes = of_role(parsed(DAG_1.run(2)), "rect", "task")
    assert len(boxes) == 13
    tips = [box.findtext(f"{SVG}title") or "" for box in boxes]
    assert {tip.split(" (")[0] for tip in tips} == set(DAG_1.names)
    assert any("c1 (forward, task 0)\n4.00 s from 0, waited 0" in tip for tip in tips)


def test_boxes_are_as_wide_as_their_tasks_are_long() -> None:
    shapes = draw_gantt(DAG_1.run(1)).shapes
    boxes = [shape for shape in shapes if isinstance(shape, Box) and shape.role == "task"]
    longest, shortest = max(b.width for b in boxes), min(b.width for b in boxes)
    assert longest / shortest == pytest.approx(4, rel=0.1)
    assert len({box.y for box in boxes}) == 1


def test_the_critical_path_is_outlined_and_joined() -> None:
    root = parsed(DAG_1.run(4))
    assert len(of_role(root, "rect", "outline")) == 7
    assert len(of_role(root, "polyline", "critical")) == 6
    assert len(of_role(root, "polyline", "bound")) == 1


def test_the_head_tells_the_figures() -> None:
    told = texts(parsed(DAG_1.run(2), "my net"))
    assert "my net: 13 tasks on 2 threads in 19.0 s" in told
    assert "critical path 15.0 s, waits on it 4.00 s" in told
    assert "balance of threads 0.971" in told
    assert "bound 16.5 s, reached to 86.8%" in told
    assert "13 tasks on 1 thread in 33.0 s" in texts(parsed(DAG_1.run(1)))


def test_every_kind_has_a_colour_and_a_place_in_the_legend() -> None:
    kinds = [*COLOURS, "something else"]
    spans = tuple(Span(i, kind, kind, 0, i, i, i + 1.0) for i, kind in enumerate(kinds))
    root = parsed(Timeline(1, spans))
    fills = [box.get("fill") for box in of_role(root, "rect", "task")]
    assert len(set(fills)) == 6
    assert fills[:5] == list(COLOURS.values())
    assert [box.get("fill") for box in of_role(root, "rect", "legend")][:6] == fills


def test_help_is_a_low_box_in_the_helpers_row() -> None:
    spans = (Span(0, "a", "forward", 0, 0.0, 0.0, 4.0), Span(1, "b", "error", 1, 0.0, 0.0, 2.0))
    root = parsed(Timeline(2, spans, (Help(0, 1, 2.0, 3.0),)), "net")
    (low,), tasks = of_role(root, "rect", "help"), of_role(root, "rect", "task")
    assert low.get("fill") == COLOURS["forward"]
    assert low.findtext(f"{SVG}title") == "helps with a (forward, task 0)"
    edges = [float(box.get("y", "0")) + float(box.get("height", "0")) for box in (low, tasks[1])]
    assert edges[0] == pytest.approx(edges[1])
    assert float(low.get("height", "0")) < 0.5 * float(tasks[1].get("height", "0"))
    told = texts(root)
    assert "help with another's task" in told
    assert "forward 71%" in told  # 5 of 7 seconds
    assert "help" not in texts(parsed(Timeline(2, spans), "net"))


def test_a_name_is_written_where_it_has_room() -> None:
    spans = (
        Span(0, "conv1, group 3", "forward", 0, 0.0, 0.0, 1.0),
        Span(1, "no room", "forward", 0, 1.0, 1.0, 1.001),
        Span(2, "conv2, " + "x" * 200, "forward", 0, 1.001, 1.001, 1.5),
    )
    told = texts(parsed(Timeline(1, spans))).splitlines()
    assert "conv1, group 3" in told
    assert "conv2" in told
    assert "no room" not in told


@given(name=st.text(max_size=20), title=st.text(max_size=20))
def test_no_name_breaks_the_picture(name: str, title: str) -> None:
    root = parsed(Timeline(1, (Span(0, name, "forward", 0, 0.0, 0.0, 1.0),)), title)
    assert len(of_role(root, "rect", "task")) == 1


def test_names_are_not_taken_for_markup() -> None:
    evil = '</title><script>alert("1")</script>'
    root = parsed(Timeline(1, (Span(0, evil, "forward", 0, 0.0, 0.0, 1.0),)), evil)
    assert not list(root.iter(f"{SVG}script"))
    assert (of_role(root, "rect", "task")[0].findtext(f"{SVG}title") or "").startswith(evil)


def test_a_step_of_nothing_can_be_drawn() -> None:
    assert of_role(parsed(Timeline(2, ())), "rect", "task") == []
    nothing = Timeline(1, (Span(0, "a", "forward", 0, 0.0, 0.0, 0.0),))
    assert len(of_role(parsed(nothing), "rect", "task")) == 1


@pytest.mark.parametrize("threads", [1, 16, 128])
def test_rows_do_not_overlap_and_nothing_leaves_the_picture(threads: int) -> None:
    spans = tuple(Span(i, "a", "error", i, 0.0, 0.0, 1.0) for i in range(threads))
    drawing = draw_gantt(Timeline(threads, spans))
    boxes = [s for s in drawing.shapes if isinstance(s, Box) and s.role == "task"]
    for above, below in pairwise(boxes):
        assert above.y + above.height < below.y
    for shape in drawing.shapes:
        if isinstance(shape, Box | Words):
            assert 0 <= shape.x <= drawing.width == 1280
            assert 0 <= shape.y <= drawing.height


def test_files_are_written_by_their_names() -> None:
    write_gantt(DAG_1.run(2), Path("a.svg"))
    assert ElementTree.parse("a.svg").getroot().tag == f"{SVG}svg"
    write_gantt(DAG_1.run(2), Path("a.png"), "$x_1$")
    with Image.open("a.png") as image:
        image.load()
        assert (image.format, image.width) == ("PNG", 2560)


@pytest.mark.parametrize("name", ["none/a.svg", "none/a.png"])
def test_a_folder_that_is_not_there_is_told(name: str) -> None:
    with pytest.raises(StorageError, match=f"{name} could not be written"):
        write_gantt(DAG_1.run(2), Path(name))


def test_svg_needs_no_matplotlib_and_png_says_that_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.machine.find_spec", lambda _: None)
    write_gantt(DAG_1.run(2), Path("a.svg"))
    with pytest.raises(EnvironmentProblem, match="pictures need matplotlib"):
        write_gantt(DAG_1.run(2), Path("a.png"))
    assert not Path("a.png").exists()
