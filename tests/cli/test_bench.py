"""`convoy bench`: the report as a table, as JSON and as a picture."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from convoy.bench.report import Bar, Report, Row
from tests.conftest import Outcome

Convoy = Callable[..., Outcome]

REPORT = Report(
    "single",
    3,
    (
        Row("lenet5", "bare PyTorch", "samples/s", (1000.0, 1100.0, 1200.0)),
        Row("lenet5", "convoy", "samples/s", (1000.0, 1000.0, 1000.0)),
    ),
    (
        Bar("ours / theirs", 0.909, at_least=0.97),
        Bar("theirs / ours", 1.1, at_most=2.0),
        Bar("for information", 3.0),
    ),
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Put a fake in the benchmark's place; return what it was asked for."""
    quick_of: list[bool] = []

    def fake(*, quick: bool, tell: Callable[[str], None]) -> Report:
        quick_of.append(quick)
        tell("round 1 of 1")
        return REPORT

    monkeypatch.setattr("convoy.bench.single.bench_single", fake)
    return quick_of


def test_json_is_one_object_on_standard_output(convoy: Convoy, asked: list[bool]) -> None:
    outcome = convoy("bench", "single", "--json")
    assert (outcome.code, outcome.err) == (0, "round 1 of 1\n")
    assert outcome.out.count("\n") == 1
    record = json.loads(outcome.out)
    assert list(record) == ["bench", "machine", "versions", "repeats", "rows", "bars"]
    assert [row["median"] for row in record["rows"]] == [1100.0, 1000.0]
    assert [bar["met"] for bar in record["bars"]] == [False, True, True]
    assert asked == [False]


def test_quick_is_handed_on(convoy: Convoy, asked: list[bool]) -> None:
    assert convoy("bench", "single", "--quick").code == 0
    assert asked == [True]


def test_tables_show_medians_spreads_and_bars(convoy: Convoy, asked: list[bool]) -> None:
    outcome = convoy("bench", "single")
    assert asked == [False]
    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert "lenet5 bare PyTorch 1,100 18.2% samples/s" in lines
    assert "ours / theirs 0.909 >= 0.97 missed" in lines
    assert "theirs / ours 1.100 <= 2.0 met" in lines
    assert "for information 3.000" in lines


def test_picture_is_drawn(convoy: Convoy, asked: list[bool]) -> None:
    assert convoy("bench", "single", "--json", "--png", "x.png").code == 0
    assert asked == [False]
    with Image.open("x.png") as image:
        image.load()
        assert image.format == "PNG"


def test_a_part_of_a_benchmark_can_be_asked_for(
    convoy: Convoy, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def fake(*, quick: bool, tell: Callable[[str], None], only: list[str]) -> Report:
        asked.append(only)
        return REPORT

    monkeypatch.setattr("convoy.bench.single.bench_single", fake)
    assert convoy("bench", "single", "--only", "lenet5, fp32", "--only", "vgg").code == 0
    assert asked == [["lenet5, fp32", "vgg"]]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("loading", "is measured as a whole"),
        ("inner", "nothing of this benchmark is called so; got 'no'; allowed: resnet20, fp32"),
        ("pipeline", "allowed: resnet56, 2 stages, batch 128; resnet110, 2 stages"),
    ],
)
def test_a_part_that_is_not_there_is_refused(convoy: Convoy, name: str, says: str) -> None:
    outcome = convoy("bench", name, "--only", "no")
    assert outcome.code == 2
    assert says in outcome.err.replace("\n", " ")


def test_results_are_kept_where_there_is_a_study_and_a_folder(convoy: Convoy) -> None:
    outcome = convoy("bench", "loading", "--keep", "kept.json")
    assert outcome.code == 2
    assert "is no study of many runs" in outcome.err.replace("\n", " ")
    outcome = convoy("bench", "staleness", "--keep", "nowhere/kept.json")
    assert outcome.code == 2
    assert "folder of the kept results does not exist" in outcome.err.replace("\n", " ")


def test_unknown_benchmark_is_refused_with_a_suggestion(convoy: Convoy) -> None:
    outcome = convoy("bench", "sinlge")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("convoy: error: unknown benchmark; got 'sinlge'; allowed: single")
    assert outcome.err.endswith("Did you mean 'single'?\n")


@pytest.mark.parametrize("png", ["none/x.png", "file/x.png"])
def test_picture_without_a_folder_is_refused_before_anything_is_measured(
    convoy: Convoy, asked: list[bool], png: str
) -> None:
    Path("file").write_text("x")
    outcome = convoy("bench", "single", "--png", png)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == f"convoy: error: the picture's folder does not exist; got '{png}'\n"
    assert asked == []


def test_picture_of_an_unknown_format_is_told(convoy: Convoy, asked: list[bool]) -> None:
    outcome = convoy("bench", "single", "--png", "x.unknown")
    assert outcome.code == 1
    assert "x.unknown could not be written" in outcome.err
    assert asked == [False]


def test_without_matplotlib_nothing_is_measured_in_vain(
    convoy: Convoy, asked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoy.machine.find_spec", lambda _: None)
    outcome = convoy("bench", "single", "--png", "x.png")
    assert (outcome.code, outcome.out) == (3, "")
    assert "pictures need matplotlib" in outcome.err
    assert asked == []


def test_without_a_name_the_questions_are_listed(convoy: Convoy) -> None:
    outcome = convoy("bench")
    assert outcome.code == 0
    assert "convoy bench single" in outcome.out
    assert "convoy bench loading" in outcome.out
