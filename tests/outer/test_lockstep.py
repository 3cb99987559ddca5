"""Lockstep computes what one machine would: whoever takes part, however batches are shared."""

import copy
import itertools
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from convoy.config import Config
from convoy.data.augment import choose_augmentation
from convoy.data.batches import Batches
from convoy.data.load import wrap_data
from convoy.inner.schedule import make_schedule
from convoy.models.dropout import drop_by, key_dropout
from convoy.outer.allocation.plan import Rules, make_plan
from convoy.outer.allocation.speeds import SpeedBook
from convoy.outer.ledger import Update, find_faults
from convoy.outer.lockstep import Lockstep
from convoy.run import Run
from convoy.trainer import fit
from tests.conftest import make_stripes

SAMPLES, BATCH, EPOCHS = 800, 64, 4
STEPS = 13 * EPOCHS  # the last batch of an epoch is half as large as the others
COMMON: dict[str, Any] = {
    "epochs": EPOCHS,
    "batch": BATCH,
    "lr": 0.05,
    "memory_format": "contiguous",
    "device": "cpu",
    "augment": "none",
    "min_share": 1,
}
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-4}


def network(*, dropout: bool = False, wide: int = 12) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        *([nn.Dropout(0.4)] if dropout else []),
        nn.Linear(96, wide),
        nn.ReLU(),
        nn.Linear(wide, 2),
    )


class Unequal(nn.Module):
    """Makes each process take another time per sample, and another one after 30 steps."""

    _number: int | None = None
    _calls = 0

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and len(x) > 1:
            if Unequal._number is None:
                Unequal._number = _claim(self.folder)
            Unequal._calls += 1
            place = Unequal._number + (2 if Unequal._calls > 30 else 0)
            time.sleep(len(x) * (0.0006, 0.0012, 0.0018, 0.0024)[place % 4])
        return x


def _claim(folder: Path) -> int:
    for number in itertools.count():
        try:
            os.close(os.open(folder / str(number), os.O_CREAT | os.O_EXCL))
            return number
        except FileExistsError:
            continue
    raise AssertionError


def train(model: nn.Module, out: str, **options: Any) -> Run:
    data, test = make_stripes(SAMPLES), make_stripes(40, seed=1)
    chosen = {**COMMON, "precision": "fp64", **options, "out": out}
    run = fit(model, data, test, quiet=True, **chosen)
    assert run.state == "finished"
    if chosen.get("strategy") != "single":
        assert find_faults(ledger(out), SAMPLES, chosen["epochs"]) == []
    return run


def by_hand(model: nn.Module, precision: str = "fp64", augment: str = "none") -> nn.Module:
    """Train with torch alone; Convoy only says which samples come when, and how they vary."""
    config = Config(**{**COMMON, "precision": precision, "augment": augment})
    data = wrap_data(make_stripes(SAMPLES), make_stripes(40, seed=1))
    dtype = torch.float64 if precision == "fp64" else torch.float32
    batches = Batches(
        data.train, mean=data.mean, std=data.std, device=torch.device("cpu"), dtype=dtype
    )
    augmentation = choose_augmentation(config, data.augment, data.train.shape_CHW)
    schedule = make_schedule(config, 13)
    model = key_dropout(copy.deepcopy(model)).to(dtype).train()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    step = 0
    for number in range(EPOCHS):
        epoch = batches.epoch(number, seed=0, augmentation=augmentation)
        for batch in epoch.batches(BATCH):
            optimizer.param_groups[0]["lr"] = schedule.rate(step)
            optimizer.zero_grad()
            with drop_by(batch.keys):
                functional.cross_entropy(model(batch.images_NCHW), batch.labels).backward()
            optimizer.step()
            step += 1
    assert step == STEPS
    return model


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).detach().abs().max().item() for a, b in pairs)


def ledger(out: str) -> list[Update]:
    text = Path(out, "ledger.jsonl").read_text()
    return [Update.from_line(json.loads(line)) for line in text.splitlines()]


def full_shares(out: str) -> set[tuple[tuple[int, int], ...]]:
    """Return the different ways in which whole batches were shared."""
    return {update.shares for update in ledger(out) if update.stop - update.start == BATCH}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("single", {"strategy": "single"}),
        ("one", {"strategy": "lockstep", "nodes": 1}),
        ("three", {"strategy": "lockstep", "nodes": 3, "allocation": "uniform"}),
    ],
)
def test_equal_nodes_give_the_weights_of_a_loop_written_by_hand(
    name: str, options: dict[str, Any]
) -> None:
    start = network()
    run = train(copy.deepcopy(start), name, **options)
    assert difference(run.model, by_hand(start)) < TOLERANCES["fp64"]
    if name == "three":
        assert {tuple(s for _, s in shares) for shares in full_shares(name)} == {(22, 21, 21)}


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_unequal_nodes_whose_shares_change_give_the_same_weights(
    precision: str, tmp_path: Path
) -> None:
    start = network()
    (tmp_path / "claims").mkdir()
    model = nn.Sequential(Unequal(tmp_path / "claims"), *copy.deepcopy(start))
    run = train(model, "run", nodes=4, allocation="speed", precision=precision)
    assert difference(run.model, by_hand(start, precision)) < TOLERANCES[precision]
    found = full_shares("run")
    assert len(found) >= 3, found  # shares really changed
    assert max(len(shares) for shares in found) >= 3, found  # a slow probe may send one away
    widest = max(max(s for _, s in shares) / min(s for _, s in shares) for shares in found)
    assert widest > 2, found  # and were unequal


def test_a_node_with_a_share_of_nothing_changes_nothing() -> None:
    start = network()
    options = {"nodes": 4, "allocation": "fixed", "shares": (5, 3, 0, 1)}
    run = train(copy.deepcopy(start), "run", **options)
    assert difference(run.model, by_hand(start)) < 1e-9
    assert full_shares("run") == {((0, 36), (1, 21), (3, 7))}


def test_dropout_and_augmentation_belong_to_the_sample_not_to_the_node() -> None:
    start = network(dropout=True)
    options = {"allocation": "fixed", "shares": (5, 3, 1, 2), "augment": "crop+flip"}
    run = train(copy.deepcopy(start), "run", nodes=4, **options)
    reference = by_hand(start, augment="crop+flip")
    assert difference(run.model, reference) < 1e-9
    assert difference(reference, by_hand(start)) > 1e-3  # the variation is not nothing
    without = copy.deepcopy(start)
    without[5] = nn.Identity()
    assert difference(reference, by_hand(without, augment="crop+flip")) > 1e-3


def test_gradients_rounded_on_the_wire_come_close_but_are_not_the_same() -> None:
    start = network()
    run = train(copy.deepcopy(start), "run", nodes=2, wire="bf16", allocation="uniform")
    found = difference(run.model, by_hand(start))
    assert 1e-9 < found < 1e-2
    assert run.accuracy > 0.9


def test_sending_gradients_early_changes_no_bit() -> None:
    start = network(wide=5600)  # in fp64 more than one bucket
    options = {"nodes": 2, "allocation": "uniform", "epochs": 1}
    runs = [
        train(copy.deepcopy(start), str(overlap), overlap=overlap, **options)
        for overlap in (True, False)
    ]
    assert difference(runs[0].model, runs[1].model) == 0
    assert difference(runs[0].model, start.double()) > 1e-3


def test_batch_norm_statistics_are_those_of_all_nodes() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(400, 2)
    )
    alone = train(copy.deepcopy(model), "alone", strategy="single")
    together = train(copy.deepcopy(model), "together", nodes=3, allocation="uniform")
    names = ("1.running_mean", "1.running_var")
    for name in names:
        a, b = alone.model.state_dict()[name], together.model.state_dict()[name]
        torch.testing.assert_close(a, b, rtol=0.1, atol=0.05)
    assert abs(alone.accuracy - together.accuracy) <= 0.1


def test_a_new_plan_is_tried_for_three_steps() -> None:
    rules = Rules(batch=100)
    said: list[str] = []
    node: Any = SimpleNamespace(
        _held=0,
        _book=SpeedBook([50.0, 50.0]),
        _plan=make_plan([50.0, 50.0], rules),
        _group_rules=lambda: rules,
        _emit_shares=said.append,
        formation=SimpleNamespace(rank=0),
    )
    shares = []
    for speeds in ([90.0, 10.0], [10.0, 90.0]):
        node._book = SpeedBook(speeds)
        for _ in range(3):
            assert Lockstep._replan(node)
            shares.append(node._plan.shares)
    assert shares == [(50, 50)] * 2 + [(90, 10)] * 3 + [(10, 90)]
    assert len(said) == 2
