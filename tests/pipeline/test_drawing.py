"""Drawings of timelines: the staircase is the specification, and every width is kept."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from convoy.inner.tasks.drawing import Box, Words, as_svg
from convoy.pipeline.drawing import draw_paper, draw_picture, draw_text, write_picture
from convoy.pipeline.timeline import Pace, simulate

EQUAL = Pace((0.001, 0.001), (0.002, 0.002))
SVG = "{http://www.w3.org/2000/svg}"


def test_two_equal_stages() -> None:
    drawn = draw_text(simulate(EQUAL, "1f1b", 4), width=54)
    assert drawn.plain.splitlines() == [
        "stage 1 F0-F1-......B0====F2-B1====F3-B2====...B3====",
        "stage 2 ...F0-B0====F1-B1====F2-B2====F3-B3====......",
        "        0              5 ms           10 ms",
    ]


def test_a_batch_in_parts() -> None:
    drawn = draw_text(simulate(EQUAL, "gpipe", 1, parts=2), width=45)
    assert drawn.plain.splitlines()[:2] == [
        "stage 1 F0--F1--............B0======B1======",
        "stage 2 ....F0--F1--B0======B1======........",
    ]


def test_what_does_not_fit_is_cut_off_and_told() -> None:
    rows = draw_text(simulate(EQUAL, "stale", 30), width=60).plain.splitlines()
    assert [row[-1] for row in rows[:2]] == [">", ">"]
    assert rows[0].startswith("stage 1 F0--F1--F2--")  # names still have room
    assert "B29" not in rows[0]


def test_a_job_too_short_for_its_name_has_its_letter() -> None:
    pace = Pace((1.0, 0.3), (2.0, 0.6))
    rows = draw_text(simulate(pace, "1f1b", 3), width=40).plain.splitlines()
    assert "FB0" in rows[1]


@given(
    st.integers(1, 5),
    st.sampled_from(["stale", "1f1b", "plain"]),
    st.integers(1, 30),
    st.integers(10, 150),
    st.lists(st.floats(1e-6, 10.0), min_size=10, max_size=10),
)
def test_every_row_is_as_long_as_the_others_and_fits(
    stages: int, order: str, batches: int, width: int, seconds: list[float]
) -> None:
    pace = Pace(tuple(seconds[:stages]), tuple(seconds[5 : 5 + stages]))
    *rows, axis = draw_text(simulate(pace, order, batches), width).plain.splitlines()
    assert len(rows) == stages
    assert len({len(row) for row in rows}) == 1
    assert max(len(line) for line in (*rows, axis)) <= max(width, 40)
    assert axis.split()[0] == "0"


def test_passes_differ_without_colours_and_with_them() -> None:
    drawn = draw_text(simulate(EQUAL, "1f1b", 2), 60)
    assert "\x1b" not in drawn.plain
    styles = {str(span.style) for span in drawn.spans}
    assert len(styles) == 2
    coloured = Console(force_terminal=True, color_system="standard", width=80)
    with coloured.capture() as capture:
        coloured.print(drawn)
    assert "\x1b[" in capture.get()


def test_the_papers_picture_is_vector_a0() -> None:
    assert draw_paper(1, 4, width=80).plain.splitlines() == [
        "cycle     0       1       2       3       4       5",
        "FS1       F0 v0   F1 v0   F2 v0   F3 v1   .       .       ",
        "FS2+BKS1  .       FB0 v0  FB1 v1  FB2 v2  FB3 v3  .       ",
        "BKS2      .       .       B0 v0   B1 v1   B2 v2   B3 v3   ",
    ]


def test_the_papers_picture_fits() -> None:
    lines = draw_paper(3, 20, width=60).plain.splitlines()
    assert len(lines) == 1 + 7
    assert max(map(len, lines)) <= 60
    assert all(line.endswith(">") for line in lines[1:])


def test_the_picture_has_a_box_for_each_job_and_a_tip() -> None:
    timeline = simulate(EQUAL, "stale", 3)
    root = ElementTree.fromstring(as_svg(draw_picture(timeline, "my <net>")))
    boxes = [box for box in root.iter(f"{SVG}rect") if box.get("class") in ("forward", "backward")]
    assert len(boxes) == 12
    tips = [box.findtext(f"{SVG}title") or "" for box in boxes]
    told = "backward of batch 2, stage 1\n2.00 ms from 10.0 ms, weights of 2 updates"
    assert told in tips
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"my <net>", "F0", "B2", "stage 2", "busy"} <= set(texts)
    assert any("order stale: 3 batches through 2 stages" in (text or "") for text in texts)


def test_parts_are_told_in_the_tips() -> None:
    shapes = draw_picture(simulate(EQUAL, "gpipe", 2, parts=2), "x").shapes
    tips = [shape.tip for shape in shapes if isinstance(shape, Box) and shape.tip]
    assert any(tip.startswith("forward of batch 1, part 2 of 2, stage 1") for tip in tips)
    assert "F3" in [shape.text for shape in shapes if isinstance(shape, Words)]


def test_nothing_lies_outside_of_the_picture() -> None:
    drawing = draw_picture(simulate(Pace((1.0,) * 9, (2.0,) * 9), "stale", 20), "x")
    for shape in (shape for shape in drawing.shapes if isinstance(shape, Box)):
        assert 0 <= shape.x <= shape.x + shape.width <= drawing.width
        assert 0 <= shape.y <= shape.y + shape.height <= drawing.height


@pytest.mark.parametrize("name", ["a.svg", "a.png"])
def test_files(name: str) -> None:
    write_picture(simulate(EQUAL, "1f1b", 2), Path(name), "x")
    start = Path(name).read_bytes()[:5]
    assert start == (b"<svg " if name.endswith("svg") else b"\x89PNG\r")
