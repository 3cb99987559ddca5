"""What a node makes of the waits that it was told of at a segment's end."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from convoy.config import Config
from convoy.inner.arithmetic import Arithmetic
from convoy.models.zoo import build_model
from convoy.monitor.events import NoteEvent
from convoy.pipeline import runner
from convoy.pipeline.layout import lay_out
from convoy.pipeline.recipe import Recipe
from convoy.pipeline.runner import Pipeline
from convoy.pipeline.schedule import can_postpone

LEADS = [1, 0]


class Told:
    """Keeps the events."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def emit(self, event: NoteEvent) -> None:
        self.notes.append(event.text)


def node(monkeypatch: pytest.MonkeyPatch, told: Told, precision: str = "fp32") -> Pipeline:
    """Return the last of two stages, without a group."""
    found = object.__new__(Pipeline)
    model = build_model("lenet5", (1, 28, 28), 10, seed=0)
    executor = SimpleNamespace(arithmetic=Arithmetic(torch.device("cpu"), precision))
    job = SimpleNamespace(executor=executor, config=Config(), events=told, model=model)
    job.train = SimpleNamespace(device=executor.arithmetic.device)
    found._job = cast(Any, job)
    found._layout = lay_out(model, (0, 3, len(list(model.children()))))
    found._recipe = Recipe()
    found._can_postpone = can_postpone(precision)
    found._postponing = None
    found._by_tasks = False
    monkeypatch.setattr(Pipeline, "formation", SimpleNamespace(rank=1, size=2), raising=False)
    monkeypatch.setattr(found, "_momentum", dict)
    return found


def postpones(found: Pipeline, leads: list[int] = LEADS) -> bool:
    return found._make_stage(leads)._passes._postponed is not None  # type: ignore[attr-defined]


def test_stages_that_all_wait_send_gradients_first_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told()
    found = node(monkeypatch, told)
    found._look_at_waits([0.5, 0.01], LEADS, 20)  # the second is the slowest, and never waits
    found._look_at_waits([0.5, 0.5], LEADS, 3)  # too few batches to tell
    assert not postpones(found)
    found._look_at_waits([0.2, 0.1], LEADS, 20)
    assert postpones(found)
    found._look_at_waits([0.0, 0.0], LEADS, 20)  # it helps: that is no reason to end it
    found._look_at_waits([0.2, 0.1], LEADS, 20)
    assert postpones(found)
    (note,) = told.notes
    assert note.startswith("all stages wait, 10% of the time and more")


def test_another_cut_or_order_is_looked_at_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    found = node(monkeypatch, Told())
    found._look_at_waits([0.2, 0.1], LEADS, 20)
    assert not postpones(found, [0, 0])
    found._layout = lay_out(build_model("lenet5", (1, 28, 28), 10, seed=0), (0, 6, 12))
    assert not postpones(found)


def test_a_new_group_begins_without(monkeypatch: pytest.MonkeyPatch) -> None:
    found = node(monkeypatch, Told())
    found._look_at_waits([0.2, 0.1], LEADS, 20)
    found._costs = cast(Any, SimpleNamespace(seconds=[1.0]))
    found._forms, found._group = cast(Any, None), cast(Any, None)
    monkeypatch.setattr(runner, "Between", lambda *_: SimpleNamespace(link_speed=lambda: 1.0))
    monkeypatch.setattr(runner, "choose_bounds", lambda *_: found._layout.bounds)
    monkeypatch.setattr(found, "_shared", lambda rows: rows)
    monkeypatch.setattr(found, "_cut", lambda bounds: None)
    found._begin_group()  # with the same cut: other nodes, other waits
    assert not postpones(found)


def test_rounded_weights_cannot_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()
    found = node(monkeypatch, told, "bf16")
    found._look_at_waits([0.2, 0.1], LEADS, 20)
    assert not postpones(found)
    assert told.notes == []
