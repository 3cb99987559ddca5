"""The study of accuracy: what is run, and what is made of it."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.bench.results import Results
from convoy.bench.staleness import (
    HYBRID,
    NETS,
    OURS,
    PLAIN,
    PUBLISHED,
    Cell,
    Net,
    all_cells,
    bench_staleness,
    report_of,
    run_cells,
)
from convoy.config import Config
from convoy.errors import ConfigError, ConvoyError
from convoy.models.zoo import build_model, check_model_name
from convoy.pipeline.layout import weight_layers
from convoy.pipeline.partition import cut_by_hand
from convoy.pipeline.recipe import DEFAULT, RECIPES, parse_recipe


def test_every_depth_is_run_in_every_way_and_three_times_where_a_bar_compares() -> None:
    cells = all_cells()
    assert len(set(cells)) == len(cells)
    for net in NETS:
        of_net = [cell for cell in cells if cell.model == net.model]
        assert sum(cell.way == PLAIN for cell in of_net) == (3 if net.bars else 1)
        for cuts in net.cuts:
            ways = Counter(cell.way for cell in of_net if cell.cuts == cuts)
            seeds = 3 if len(cuts) in net.bars else 1
            assert ways == {PUBLISHED: 1, HYBRID: 1, OURS: seeds}, (net.model, cuts)


@pytest.mark.parametrize("cell", all_cells(), ids=lambda cell: f"{cell.label}, {cell.way}")
def test_every_cell_is_a_run_that_can_be_asked_for(cell: Cell) -> None:
    options = dict(cell.options())
    config = Config(
        model=options.pop("model"),
        lr=float(options.pop("lr")),
        seed=int(options.pop("seed")),
        epochs=int(options.pop("epochs")),
        virtual=bool(cell.cuts),
        **options,  # type: ignore[arg-type]
    )
    check_model_name(config.model)
    assert config.cuts == cell.cuts
    assert (config.strategy == "pipeline") == (cell.way != PLAIN)
    expected = RECIPES["convoy" if cell.way in (OURS, PLAIN) else "published"]
    assert parse_recipe(config.recipe) == expected
    assert config.pipelined == ("0.5" if cell.way == HYBRID else "all")


@pytest.mark.parametrize("net", NETS, ids=lambda net: net.model)
def test_every_network_can_be_cut_there(net: Net) -> None:
    shape = (1, 28, 28) if net.data == "fashion" else (3, 32, 32)
    layers = weight_layers(build_model(net.model, shape, 10, seed=0))
    for cuts in net.cuts:
        assert len(cut_by_hand(layers, cuts)) == len(cuts) + 2


def test_the_report_says_how_far_we_are_behind_plain_training() -> None:
    net = Net("lenet5", "fashion", 0.05, ((1,),), {1: 0.5})
    found = {
        Cell("lenet5", "fashion", 0.05, PLAIN, seed=0): 90.0,
        Cell("lenet5", "fashion", 0.05, PLAIN, seed=1): 91.0,
        Cell("lenet5", "fashion", 0.05, OURS, (1,), 0): 90.5,
        Cell("lenet5", "fashion", 0.05, OURS, (1,), 1): 89.5,
    }
    report = report_of(found, [net])
    (bar,) = report.bars
    assert bar.value == pytest.approx(0.5)
    assert bar.is_met
    assert {(row.task, row.x) for row in report.rows} == {("lenet5", 2), ("lenet5", 4)}


def test_a_run_that_diverges_is_as_right_as_by_chance() -> None:
    cell = Cell("lenet5", "fashion-mini", 1e30, PLAIN, epochs=1)
    assert run_cells([cell], {}, Results(None), print) == {cell: 10.0}


def test_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match="data-dir"):
        bench_staleness(quick=False, tell=print)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="GPU"):
        bench_staleness(quick=False, tell=print)


def test_a_study_that_was_cut_off_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [Cell("lenet5", "fashion", 0.05, OURS, (1,), seed) for seed in range(3)]
    made: list[int] = []
    bad = {1}

    def run(cell: Cell, *_: object) -> float:
        made.append(cell.seed)
        if cell.seed in bad:
            raise ConvoyError("out of memory")
        return 90.0 + cell.seed

    monkeypatch.setattr("convoy.bench.staleness._run", run)
    path = Path("kept.json")
    with pytest.raises(ConvoyError, match="out of memory"):
        run_cells(cells, {}, Results(path), print)
    kept = {record["seed"]: record["accuracy"] for record in json.loads(path.read_text())}
    assert kept in ({0: 90.0}, {0: 90.0, 2: 92.0})  # the third one may have begun already
    assert set(made) - bad == set(kept)
    made.clear()
    bad.clear()
    found = run_cells(cells, {}, Results(path), print)
    assert found == {cell: 90.0 + cell.seed for cell in cells}
    assert set(made) == {0, 1, 2} - set(kept)


def test_kept_results_are_reported_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    results = Results(Path("kept.json"))
    for cell in all_cells(net for net in NETS if net.model == "resnet110"):
        results.add(cell.key, 88.0)
        results.add(cell.key, 89.0)  # made twice: the mean counts
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    report = bench_staleness(quick=False, tell=print, only=["resnet110"], keep=Path("kept.json"))
    assert {row.median for row in report.rows} == {88.5}
    with pytest.raises(ConfigError, match="GPU"):
        bench_staleness(quick=False, tell=print, only=["resnet"], keep=Path("kept.json"))


def test_a_run_of_another_length_or_rate_is_another_run() -> None:
    results = Results(None)
    cell = Cell("lenet5", "fashion", 0.05, PLAIN)
    results.add(cell.key, 90.0)
    assert results.find(cell.key) == 90.0
    assert results.find(replace(cell, epochs=30).key) is None
    assert results.find(replace(cell, lr=0.1).key) is None


def test_a_recipe_that_has_changed_its_meaning_is_another_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = Results(None)
    cell = Cell("lenet5", "fashion", 0.05, OURS, cuts=(1,))
    results.add(cell.key, 90.0)
    assert results.find(cell.key) == 90.0
    monkeypatch.setitem(RECIPES, DEFAULT, replace(RECIPES[DEFAULT], damped=0.5))
    assert results.find(cell.key) is None


def test_the_study_in_the_docs_can_be_read() -> None:
    path = Path(__file__).parents[2] / "docs/results/staleness.json"
    cells = all_cells(net for net in NETS if net.model in ("resnet20", "vgg16-bn", "alexnet"))
    results = Results(path)
    assert all(results.find(cell.key) is not None for cell in cells)


@pytest.mark.parametrize(
    "text", ["", "{}", '""', "{}}", "[1]", '[{"model": "lenet5"}]', '{"accuracy": 1}']
)
def test_other_files_are_refused_and_left_alone(text: str) -> None:
    path = Path("other.json")
    path.write_text(text)
    with pytest.raises(ConfigError, match="no results of a study"):
        bench_staleness(quick=False, tell=print, keep=path)
    assert path.read_text() == text
    with pytest.raises(ConfigError, match="not worth keeping"):
        bench_staleness(quick=True, tell=print, keep=path)
