"""How a node finds out what it computes fastest with, and remembers it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from convoy.config import Config
from convoy.inner import way
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.executor import Executor
from convoy.inner.probe import Measured
from convoy.inner.tasks.executor import TasksExecutor
from convoy.inner.way import Way, candidate_grains, choose_way

_CPU = torch.device("cpu")
_SHAPE = (1, 8, 8)
_LONG = 10**9
_PLAIN = Arithmetic(_CPU, "fp32", "contiguous")


@pytest.fixture(autouse=True)
def _own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    )


def _pretend(
    monkeypatch: pytest.MonkeyPatch, eager: float, tasks: Callable[[Executor], float]
) -> list[str]:
    """Let the plain executor and tasks have these speeds; return what was measured."""
    log: list[str] = []

    def plain(config: Config, *args: object) -> float:
        log.append(f"{config.executor} on {torch.get_num_threads()}")
        return eager

    def measured(executor: Executor, *args: object) -> float:
        log.append("tasks")
        return tasks(executor)

    def arithmetic(*args: object) -> tuple[Arithmetic, list[Measured]]:
        return _PLAIN, []

    monkeypatch.setattr(way, "measure", plain)
    monkeypatch.setattr(way, "measure_executor", measured)
    monkeypatch.setattr(way, "choose_arithmetic", arithmetic)
    return log


def _choose(samples: int = _LONG, **options: object) -> Way:
    config = Config(batch=32).replaced(options)
    return choose_way(config, _CPU, _model(), _SHAPE, samples)


def test_a_short_run_is_not_worth_a_probe(
    monkeypatch: pytest.MonkeyPatch, two_threads: object
) -> None:
    log = _pretend(monkeypatch, 1000, lambda executor: 9999)
    assert _choose(samples=119_000) == Way("eager", _PLAIN)
    assert log == ["eager on 2"]


def _processor_with(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)


def test_one_thread_needs_no_tasks_without_convolutions_of_our_own(
    monkeypatch: pytest.MonkeyPatch, two_threads: object
) -> None:
    log = _pretend(monkeypatch, 1000, lambda executor: 9999)
    _processor_with(monkeypatch, "AVX2")
    torch.set_num_threads(1)
    assert _choose().executor == "eager"
    assert log == []


@pytest.mark.parametrize(
    ("samples", "speed", "chosen"),
    [(601_000, 1400, "tasks"), (601_000, 1010, "eager"), (599_000, 1400, "eager")],
)
def test_one_thread_takes_tasks_for_their_convolutions_on_a_long_run(
    monkeypatch: pytest.MonkeyPatch, two_threads: object, samples: int, speed: float, chosen: str
) -> None:
    log = _pretend(monkeypatch, 1000, lambda executor: speed)
    _processor_with(monkeypatch, "AVX512")
    torch.set_num_threads(1)
    found = _choose(samples)
    assert (found.executor, found.threads) == (chosen, int(chosen == "tasks"))
    assert ("tasks" in log) == (samples > 600_000)


@pytest.mark.parametrize(("speed", "chosen"), [(1020, "eager"), (1040, "tasks")])
def test_tasks_must_be_faster_by_three_per_cent(
    monkeypatch: pytest.MonkeyPatch, two_threads: object, speed: float, chosen: str
) -> None:
    _pretend(monkeypatch, 1000, lambda executor: speed)
    assert _choose().executor == chosen


def test_tasks_that_were_asked_for_stay_where_they_cannot_be_and_nothing_is_remembered(
    monkeypatch: pytest.MonkeyPatch, two_threads: object, tmp_path: Path
) -> None:
    def measured(executor: Executor) -> float:
        assert isinstance(executor, TasksExecutor)
        executor._why_not = "for a test"
        return 500.0

    _pretend(monkeypatch, 1000, measured)
    found = _choose(executor="tasks")
    assert (found.executor, found.threads) == ("tasks", 0)
    assert not (tmp_path / "convoy" / "ways").exists()


def test_what_was_found_for_any_threads_is_not_for_those_asked_for(
    monkeypatch: pytest.MonkeyPatch, two_threads: object
) -> None:
    log = _pretend(monkeypatch, 1000, lambda executor: 2000)
    _choose()
    asked = len(log)
    _choose(threads=2)
    assert len(log) > asked


def test_one_thread_does_not_try_tasks_that_would_have_pytorchs_convolutions(
    monkeypatch: pytest.MonkeyPatch, two_threads: object
) -> None:
    log = _pretend(monkeypatch, 1000, lambda executor: 9999)
    _processor_with(monkeypatch, "AVX512")
    torch.set_num_threads(1)
    assert _choose(memory_format="contiguous").executor == "eager"
    assert log == []


def test_the_best_cut_is_taken(monkeypatch: pytest.MonkeyPatch, two_threads: object) -> None:
    def speed(executor: Executor) -> float:
        assert isinstance(executor, TasksExecutor)
        assert executor._grain is not None
        return {2: 1500, 4: 2000, 8: 1900}[executor._grain.groups]

    _pretend(monkeypatch, 1000, speed)
    found = _choose(precision="fp32", memory_format="channels_last")
    assert (found.executor, found.groups, found.threads) == ("tasks", 4, 2)
    assert found.arithmetic == Arithmetic(_CPU, "fp32", "channels_last")


def test_a_batch_too_large_to_try_is_cut_into_groups_of_the_same_size(
    monkeypatch: pytest.MonkeyPatch, two_threads: object
) -> None:
    tried: list[int] = []

    def speed(executor: Executor) -> float:
        assert isinstance(executor, TasksExecutor)
        assert executor._grain is not None
        tried.append(executor._grain.groups)
        return 2000.0 + (executor._grain.groups == 64)

    _pretend(monkeypatch, 1000, speed)
    found = _choose(batch=1536, precision="fp32", memory_format="channels_last")
    assert 64 in tried  # of 512 samples
    assert found.groups == 192


def test_what_was_found_is_remembered_for_the_same_question(
    monkeypatch: pytest.MonkeyPatch, two_threads: object
) -> None:
    log = _pretend(monkeypatch, 1000, lambda executor: 2000)
    first = _choose()
    asked = len(log)
    assert _choose() == first
    assert len(log) == asked
    _choose(batch=64)
    assert len(log) > asked


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"executor": 1, "precision": "fp32"}'])
def test_a_damaged_memory_is_probed_anew(
    monkeypatch: pytest.MonkeyPatch, two_threads: object, tmp_path: Path, text: str
) -> None:
    _pretend(monkeypatch, 1000, lambda executor: 2000)
    first = _choose()
    (file,) = (tmp_path / "convoy" / "ways").iterdir()
    file.write_text(text)
    assert _choose() == first


def test_a_disk_that_refuses_costs_only_the_memory(
    monkeypatch: pytest.MonkeyPatch, two_threads: object, tmp_path: Path
) -> None:
    _pretend(monkeypatch, 1000, lambda executor: 2000)
    (tmp_path / "convoy").write_text("in the way")
    assert _choose().executor == "tasks"


def test_a_named_executor_is_taken_without_comparing(
    monkeypatch: pytest.MonkeyPatch, two_threads: object
) -> None:
    log = _pretend(monkeypatch, 1000, lambda executor: 10)
    assert _choose(executor="eager") == Way("eager", _PLAIN)
    assert _choose(executor="tasks", groups=3) == Way("tasks", _PLAIN, 3)
    assert log == []
    assert _choose(executor="tasks").executor == "tasks"


def test_a_network_that_cannot_be_captured_stays_with_eager(
    monkeypatch: pytest.MonkeyPatch, two_threads: object
) -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.flatten(1)
            logits: torch.Tensor = self.fc(x if x.sum().item() > 0 else -x)
            return logits

    config = Config(batch=8, precision="fp32", memory_format="contiguous")
    monkeypatch.setattr(way, "_LONG_RUN_S", {"cpu": 0.0})
    found = choose_way(config, _CPU, Deciding(), _SHAPE, _LONG)
    assert found.executor == "eager"


def test_half_the_threads_are_tried_for_the_plain_executor(
    monkeypatch: pytest.MonkeyPatch, two_threads: object
) -> None:
    log = _pretend(monkeypatch, 1000, lambda executor: 10)
    monkeypatch.setattr(
        way, "measure", lambda *a: 3000.0 if torch.get_num_threads() == 1 else 1000.0
    )
    found = _choose()
    assert (found.executor, found.threads) == ("eager", 1)
    assert torch.get_num_threads() == 2
    assert "tasks" in log


def test_cuts_are_never_finer_than_two_samples() -> None:
    assert candidate_grains(128, [16, 8]) == [(16, 16), (16, 32), (8, 8)]
    assert candidate_grains(8, [2, 1]) == [(2, 2)]
    assert candidate_grains(2, [2, 1]) == []


def test_a_stage_on_a_gpu_is_no_single_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    log = _pretend(monkeypatch, 1000, lambda executor: 9999)
    config = Config(strategy="pipeline", stages=2)
    found = choose_way(config, torch.device("cuda"), _model(), _SHAPE, _LONG)
    assert found.executor == "eager"
    assert log == []
