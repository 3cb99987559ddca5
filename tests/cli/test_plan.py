"""`convoy plan`: a pipeline before it runs, and what cannot be one."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from convoy.inner.arithmetic import Arithmetic
from convoy.models.blocks import count_weight_layers, walk_units
from convoy.pipeline.costs import Costs
from convoy.pipeline.partition import Block
from tests.cli.conftest import Refused
from tests.conftest import Outcome

Convoy = Callable[..., Outcome]

# No probe: which arithmetic is fastest does not matter here.
PLAIN = ("--precision", "fp32", "--memory-format", "contiguous")
PIPELINE = ("plan", "--strategy", "pipeline", *PLAIN)


@pytest.fixture(autouse=True)
def _recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan by a recipe that is not ours to improve."""
    monkeypatch.setenv("CONVOY_RECIPE", "pipedream")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, str]]:
    """Let every block take 3 ms; return the batches, threads and devices of the measurements."""
    asked: list[tuple[int, int, str]] = []

    def measure(
        model: nn.Module, shape_chw: tuple[int, ...], batch: int, arithmetic: Arithmetic
    ) -> Costs:
        assert len(shape_chw) == 3
        asked.append((batch, torch.get_num_threads(), str(arithmetic.device)))
        blocks = tuple(
            Block(name, count_weight_layers(block), 10**6, 2**20, 2**18)
            for name, block in walk_units(model)
        )
        return Costs(blocks, (0.003,) * len(blocks))

    monkeypatch.setattr("convoy.pipeline.costs.measure_blocks", measure)
    return asked


@pytest.fixture
def planned(convoy: Convoy, measured: list[tuple[int, int, str]]) -> Callable[..., dict[str, Any]]:
    """Return a function that plans, and returns the record of it."""

    def call(*arguments: object) -> dict[str, Any]:
        outcome = convoy(*PIPELINE, *arguments, "--json")
        assert (outcome.code, outcome.err, outcome.out.count("\n")) == (0, "", 1)
        assert len(measured) == 1
        record: dict[str, Any] = json.loads(outcome.out)
        return record

    return call


Planned = Callable[..., dict[str, Any]]


def test_a_real_measurement_of_a_small_network(convoy: Convoy) -> None:
    outcome = convoy(*PIPELINE, "--batch", 8, "--stages", 3)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert (
        lines[0] == "lenet5 on fashion-mini, batch 8: 3 stages by the recipe pipedream (order 1f1b)"
    )
    assert "cpu, 1 thread, fp32" in lines[1]
    assert " ".join(lines[3].split()) == "stage blocks layers a batch work behind held memory sends"
    assert [line.split()[0] for line in lines[4:7]] == ["1", "2", "3"]
    told = {line[:15].strip(): line[15:].strip() for line in lines[8:]}
    assert told["possible cuts"] == "1, 2, 3, 4"
    assert "times as fast" in told["this pipeline"]
    assert "over an epoch of 1,250 batches" in told["this pipeline"]
    assert "by 2 updates at most" in told["stale weights"]
    assert any(line.startswith("1f1b * ") for line in lines)
    for order in ("stale", "gpipe", "1f1b-sync", "plain"):
        assert any(line.startswith(f"{order} ") for line in lines)
    assert any(line.startswith("stage 3 ...") for line in lines)
    assert list(Path().iterdir()) == []


def test_stages_are_cut_where_they_take_equally_long(planned: Planned) -> None:
    record = planned("--model", "resnet20", "--stages", 3, "--batch", 100)
    layers = [stage["layers"] for stage in record["stages"]]
    assert record["cuts"] == [layers[0], layers[0] + layers[1]]
    assert sorted(stage["seconds"] for stage in record["stages"]) == pytest.approx(
        [0.009, 0.012, 0.012]
    )
    assert record["legal"] == [1, 3, 5, 7, 9, 11, 13, 15, 17, 19]
    assert (record["alone_s"], record["slowest_s"]) == pytest.approx((0.033, 0.012))
    assert record["bound"] == pytest.approx(2.75)
    assert record["batch_s"] == pytest.approx(0.012)
    assert record["steps"] == 100
    assert 2.6 < record["speedup"] < 2.75
    assert [stage["lead"] for stage in record["stages"]] == [2, 1, 0]
    assert [stage["held"] for stage in record["stages"]] == [3, 2, 1]
    assert record["hybrid_speedup"] is None
    orders = {(made["order"], made["parts"]) for made in record["orders"]}
    assert {("stale", 1), ("1f1b", 1), ("plain", 1), ("gpipe", 4), ("1f1b-sync", 16)} <= orders


def test_cuts_by_hand_and_the_papers_recipe(planned: Planned) -> None:
    record = planned("--model", "resnet20", "--cuts", "7,13", "--recipe", "published")
    assert (record["order"], record["cuts"]) == ("stale", [7, 13])
    assert [stage["lead"] for stage in record["stages"]] == [4, 2, 0]
    assert record["stale"] == pytest.approx(0.2412, abs=1e-4)  # one channel; 0.2420 with three
    spans = [s for s in record["timeline"] if s["stage"] == 1 and s["kind"] == "forward"]
    assert [span["version"] for span in spans] == [0, 0, 0, 0, 0, 1, 2, 3]


def test_unequal_workers_get_unequal_stages(planned: Planned) -> None:
    record = planned("--model", "resnet20", "--speeds", "1,0.5")
    first, last = record["stages"]
    assert first["work"] > 1.5 * last["work"]
    assert max(first["seconds"], last["seconds"]) == pytest.approx(0.024)
    assert last["seconds"] / last["work"] == pytest.approx(2 * first["seconds"] / first["work"])
    assert record["device"] == "cpu"


def test_slow_links_are_part_of_the_timeline(
    convoy: Convoy, measured: list[tuple[int, int, str]]
) -> None:
    links = ("--speeds", "1,1", "--links", "1000,800")
    outcome = convoy(*PIPELINE, "--model", "resnet20", *links)
    head, first = outcome.out.splitlines()[3:5]
    assert head.split()[-2:] == ["sends", "in"]
    assert first.split()[-2:] == ["10.0", "ms"]  # a megabyte at 800 Mbit/s
    advice = [line for line in outcome.out.splitlines() if line.startswith("advice ")]
    assert len(advice) == 1
    assert "pipedream:order=stale hides transfers" in advice[0]
    assert measured


def test_a_hybrid_run_is_faster_in_its_pipelined_part_only(planned: Planned) -> None:
    record = planned("--pipelined", "0.5", "--epochs", 10)
    speedup = record["speedup"]
    assert record["hybrid_speedup"] == pytest.approx(1 / (0.5 / speedup + 0.5))


@pytest.mark.parametrize(
    ("pipelined", "words"), [("0.5", "the rest of the run being plain (0.5)"), ("plateau", "when")]
)
def test_a_hybrid_run_is_told(
    convoy: Convoy, measured: list[tuple[int, int, str]], pipelined: str, words: str
) -> None:
    outcome = convoy(*PIPELINE, "--pipelined", pipelined, "--plain-first")
    row = [line for line in outcome.out.splitlines() if line.startswith("hybrid ")]
    assert len(row) == 1
    assert words in row[0]
    assert measured


@pytest.mark.parametrize(("flags", "threads"), [((), 1), (("--threads", 2), 2)])
def test_threads_are_as_configured(
    convoy: Convoy,
    measured: list[tuple[int, int, str]],
    flags: tuple[object, ...],
    threads: int,
) -> None:
    assert convoy(*PIPELINE, "--stages", 2, "--batch", 16, *flags).code == 0
    assert measured == [(16, threads, "cpu")]


def test_a_run_file_and_flags_over_it(planned: Planned) -> None:
    Path("run.toml").write_text(
        'strategy = "pipeline"\nstages = 4\nmodel = "resnet20"\nexecutor = "tasks"\nlr = 0.1\n'
    )
    record = planned("run.toml", "--stages", 5)
    assert (record["model"], len(record["stages"])) == ("resnet20", 5)


def test_the_papers_picture(convoy: Convoy, measured: list[tuple[int, int, str]]) -> None:
    outcome = convoy(*PIPELINE, "--cuts", "2", "--batches", 4, "--paper")
    assert "\nFS2+BKS1  .       FB0 v0  FB1 v1  FB2 v2  FB3 v3  .  " in outcome.out
    assert "stage 1 F0" not in outcome.out
    assert measured


@pytest.mark.parametrize("name", ["plan.svg", "plan.png"])
def test_a_picture_is_written(
    convoy: Convoy, measured: list[tuple[int, int, str]], name: str
) -> None:
    outcome = convoy(*PIPELINE, "--batches", 3, "--out", name)
    assert (outcome.code, outcome.out.splitlines()[-1]) == (0, f"wrote {name}")
    if name.endswith("svg"):
        assert ElementTree.parse(name).getroot().tag.endswith("svg")
    else:
        with Image.open(name) as image:
            assert image.format == "PNG"
    assert measured


def test_all_fits_into_a_narrow_terminal(
    convoy: Convoy, measured: list[tuple[int, int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = convoy(*PIPELINE, "--model", "resnet20", "--stages", 4, "--batches", 20)
    assert max(map(len, outcome.out.splitlines())) <= 80
    assert measured


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "plan",
            ("only pipelines and hybrid runs can be planned yet", "'auto'", "--strategy pipeline"),
        ),
        (
            "plan --strategy lockstep",
            ("only pipelines and hybrid runs can be planned yet", "'lockstep'"),
        ),
        ("plan --strategy pipeline --cuts 2,9", ("cannot be cut", "'2, 9'", "1, 2, 3, 4")),
        ("plan --strategy pipeline --cuts 3,2", ("must rise", "1, 2, 3, 4")),
        ("plan --strategy pipeline --cuts 1.5", ("'cuts'", "whole numbers")),
        ("plan --strategy pipeline --stages 6", ("more stages", "at most 5", "1, 2, 3, 4")),
        ("plan --strategy pipeline --stages 3 --cuts 2", ("'stages' and 'cuts' disagree",)),
        ("plan --strategy pipeline --stages 3 --speeds 1,1", ("disagree", "speeds: 2")),
        ("plan --strategy pipeline --model lenet", ("unknown model", "'lenet5'?")),
        ("plan --strategy pipeline --recipe convoi", ("unknown recipe", "'convoy'?")),
        ("plan --strategy pipeline --recipe convoy:ordr=stale", ("no such choice", "'order'?")),
        ("plan --strategy pipeline --pipelined soon", ("'pipelined'", "'soon'")),
        ("plan --strategy pipeline --links 10,10", ("'links'", "--speeds")),
        ("plan --strategy pipeline --speeds 1,1 --links 0,10", ("Mbit/s", "0.01")),
        ("plan --strategy pipeline --batches 0", ("'batches'", "got 0", "1 to 1000")),
        ("plan --strategy pipeline --batches 1.5", ("--batches", '"1.5"')),
        ("plan --strategy pipeline --batch 1000000", ("larger than the training data",)),
        ("plan --strategy pipeline --out x.pdf", ("no such format", "'x.pdf'", ".svg, .png")),
        ("plan --strategy pipeline --out none/x.svg", ("folder does not exist", "none/x.svg")),
        ("plan --lr 0.1", ("--lr",)),
        ("plan none.toml", ("does not exist", "'none.toml'")),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(
    refused: Refused, measured: list[tuple[int, int, str]], line: str, words: tuple[str, ...]
) -> None:
    command = line.split()
    refused(*command, *(PLAIN if "pipeline" in command else ()), words=words)
    assert measured == []


def test_a_network_that_is_no_sequence_is_refused(refused: Refused) -> None:
    Path("mine.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc = nn.Linear(784, 10)\n"
        "    def forward(self, x):\n"
        "        return self.fc(x.flatten(1))\n"
    )
    sys.path.insert(0, "")
    refused(*PIPELINE, "--model", "mine:Net", words=("cannot be cut", "'Net'"))


def test_help_does_not_wait_for_torch() -> None:
    program = (
        "import sys; from convoy.cli.app import run; "
        "run(['plan', '--help']); run(['plan', '--strategy', 'lockstep']); "
        "assert 'torch' not in sys.modules"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, check=False
    )
    assert found.returncode == 0
    assert b"Show how a pipeline would run" in found.stdout


def test_a_hybrid_run_is_planned_by_what_travels(convoy: Convoy) -> None:
    asked = ("--model=alexnet", "--image-size=32", "--batch=256", "--speeds=1,0.5,0.5")
    outcome = convoy("plan", "--strategy=hybrid", *PLAIN, *asked, "--json")
    assert outcome.code == 0, outcome.err
    record = json.loads(outcome.out.splitlines()[-1])
    assert [layer["kind"] for layer in record["table"]] == ["columns", "rows", "copy"]
    assert record["table"][0]["neurons"] == [2048, 1024, 1024]
    assert record["received_bytes"] < 0.25 * record["received_bytes_data_parallel"]
    assert record["held_bytes"][0] > record["held_bytes"][1] == record["held_bytes"][2]
    told = convoy("plan", "--strategy=hybrid", *PLAIN, *asked, "--layers=columns")
    assert told.out.count("by output neurons") == 3
    assert "data parallel" in told.out
    small = convoy("plan", "--strategy=hybrid", *PLAIN, "--model=lenet5", "--nodes=2")
    assert "Data parallel training sends less" in small.out


def test_a_network_that_cannot_be_cut_over_nodes_is_no_hybrid_plan(convoy: Convoy) -> None:
    outcome = convoy("plan", "--strategy=hybrid", *PLAIN, "--model=resnet20", "--nodes=2")
    assert outcome.code == 2
    assert "no fully connected layer" in outcome.err
