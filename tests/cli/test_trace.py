"""`convoy trace`: a picture, a trace and the figures of one step."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from PIL import Image

from convoy.data.batches import Batch
from convoy.errors import ConvoyError
from convoy.inner.eager import EagerExecutor
from convoy.inner.executor import EXECUTORS
from convoy.inner.tasks.schedule import simulate
from convoy.inner.tasks.timeline import Timeline
from convoy.registry import Entry
from tests.cli.conftest import Refused
from tests.conftest import Outcome
from tests.inner.tasks.graphs import DAG_1

Convoy = Callable[..., Outcome]

# No probe: which arithmetic is fastest does not matter here.
PLAIN = ("--precision", "fp32", "--memory-format", "contiguous")


class StandIn(EagerExecutor):
    """Computes nothing; its steps become shorter until the third, then longer again."""

    asked: ClassVar[list[tuple[int, float]]] = []
    reason: str | None = None

    def __init__(self, model: Any, optimizer: Any, arithmetic: Any, **more: Any) -> None:
        super().__init__(model, optimizer, arithmetic)
        del more

    def trace(self, batch: Batch, divisor: float) -> Timeline:
        if self.reason is not None:
            raise ConvoyError(self.reason)
        self.asked.append((len(batch), divisor))
        factor = 1e-3 * (0.5 if len(self.asked) == 1 else 1 + abs(len(self.asked) - 3))
        costs = [cost * factor for cost in DAG_1.costs]
        return simulate(costs, DAG_1.successors, [0.0] * len(costs), 1, names=DAG_1.names)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """Put a fake in the executor's place; return the batches it was given."""
    monkeypatch.setitem(EXECUTORS._entries, "tasks", Entry(f"{__name__}:StandIn", "a fake"))
    monkeypatch.setattr(StandIn, "asked", [])
    return StandIn.asked


@pytest.fixture
def untouched(asked: list[tuple[int, float]], refused: Refused) -> Refused:
    """Return a function that checks a refusal, which must come before any work."""

    def call(*arguments: object, words: tuple[str, ...], code: int = 2) -> None:
        refused(*arguments, words=words, code=code)
        assert asked == []

    return call


def test_picture_and_trace_lie_in_the_current_folder(
    convoy: Convoy, asked: list[tuple[int, float]]
) -> None:
    outcome = convoy("trace", *PLAIN, "--batch", 32)
    assert (outcome.code, outcome.err) == (0, "")
    assert ElementTree.parse("trace.svg").getroot().tag.endswith("svg")
    assert json.loads(Path("trace.json").read_text())["otherData"]["tasks"] == 13
    assert sorted(path.name for path in Path().iterdir()) == ["trace.json", "trace.svg"]
    assert asked == [(32, 32)] * 11


def test_the_figures_are_shown_as_a_table(convoy: Convoy, asked: list[tuple[int, float]]) -> None:
    lines = [" ".join(line.split()) for line in convoy("trace", *PLAIN).out.splitlines()]
    assert lines[0] == "step 33.0 ms, 13 tasks, threads: 1"
    assert lines[2] == "critical path 15.0 ms, 7 tasks"
    assert lines[4] == "bound 33.0 ms, reached to 100.0%"
    assert lines[5:] == ["wrote trace.svg", "wrote trace.json"]
    assert asked


def test_json_is_one_object_on_standard_output(
    convoy: Convoy, asked: list[tuple[int, float]]
) -> None:
    outcome = convoy("trace", *PLAIN, "--json", "--out", "a.json")
    assert (outcome.code, outcome.err, outcome.out.count("\n")) == (0, "", 1)
    record = json.loads(outcome.out)
    assert record["files"] == ["a.json"]
    assert (record["model"], record["tasks"], record["threads"]) == ("lenet5", 13, 1)
    assert not Path("trace.svg").exists()
    assert asked


@pytest.mark.parametrize(("steps", "makespan"), [(1, 66e-3), (2, 33e-3), (9, 33e-3)])
def test_the_best_step_is_shown_but_never_the_first(
    convoy: Convoy, asked: list[tuple[int, float]], steps: int, makespan: float
) -> None:
    outcome = convoy("trace", *PLAIN, "--steps", steps, "--json")
    assert json.loads(outcome.out)["makespan_s"] == pytest.approx(makespan)
    assert len(asked) == steps + 1


def test_several_files_in_their_formats(convoy: Convoy, asked: list[tuple[int, float]]) -> None:
    Path("sub").mkdir()
    Path("a.svg").write_text("an older one")
    names = ("a.svg", "sub/b.png", "c.json")
    outcome = convoy("trace", *PLAIN, *(word for name in names for word in ("--out", name)))
    assert outcome.code == 0
    assert "<svg" in Path("a.svg").read_text()
    with Image.open("sub/b.png") as image:
        assert image.format == "PNG"
    assert "traceEvents" in json.loads(Path("c.json").read_text())
    assert asked


def test_a_run_file_and_flags_over_it(convoy: Convoy, asked: list[tuple[int, float]]) -> None:
    Path("run.toml").write_text('batch = 16\nexecutor = "eager"\nnodes = 2\nepochs = 3\n')
    for flags in ((), ("--batch", 8)):
        assert convoy("trace", "run.toml", *PLAIN, "--steps", 1, *flags).code == 0
    assert asked == [(16, 16), (16, 16), (8, 8), (8, 8)]


def test_why_tasks_cannot_be_used_is_told(
    refused: Refused, asked: list[tuple[int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandIn, "reason", "there is no compiler")
    refused("trace", *PLAIN, words=("there is no compiler",), code=1)
    assert asked == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("trace --out none/x.svg", ("folder does not exist", "'none/x.svg'")),
        ("trace --out a.svg --out none/x.json", ("folder does not exist", "'none/x.json'")),
        ("trace --out x.pdf", ("no such format", "'x.pdf'", ".svg, .png, .json")),
        ("trace --out x", ("no such format", "'x'")),
        ("trace --out folder.svg", ("it is a folder", "'folder.svg'")),
        ("trace --steps 0", ("'steps'", "got 0", "at least 1")),
        ("trace --steps 1.5", ("--steps", '"1.5"')),
        ("trace --batch 0", ("'batch'", "at least 1")),
        ("trace --batch 1000000", ("'batch' is larger than the training data",)),
        ("trace --model lenet", ("unknown model", "'lenet5'?")),
        ("trace --data fashion-mni", ("data set", "'fashion-mni'")),
        ("trace --executor eager", ("--executor",)),
        ("trace --epochs 3", ("--epochs",)),
        ("trace none.toml", ("does not exist", "'none.toml'")),
    ],
)
def test_bad_input_is_refused_before_any_work(
    untouched: Refused, line: str, words: tuple[str, ...]
) -> None:
    Path("folder.svg").mkdir()
    untouched(*line.split(), words=words)


def test_without_matplotlib_nothing_is_measured_in_vain(
    untouched: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoy.machine.find_spec", lambda _: None)
    untouched("trace", "--out", "x.png", words=("pictures need matplotlib",), code=3)
