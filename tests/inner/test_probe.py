"""The probe picks a faster way to compute only where it measured one."""

from typing import Any

import pytest
import torch
from torch import nn

import convoy.inner.probe as probe
from convoy.config import Config
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.probe import Measured, candidate_arithmetics, choose_arithmetic
from convoy.inner.tasks.executor import TasksExecutor
from convoy.models.dropout import key_dropout

_CPU = torch.device("cpu")
_SHAPE = (1, 6, 6)


def _model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Dropout(0.5), nn.Flatten(), nn.Linear(32, 2)
    )


def _names(candidates: list[Arithmetic]) -> list[tuple[str, str]]:
    return [(candidate.precision, candidate.layout) for candidate in candidates]


@pytest.mark.parametrize(
    ("options", "bf16", "expected"),
    [
        (
            {},
            True,
            [
                ("fp32", "contiguous"),
                ("fp32", "channels_last"),
                ("bf16", "contiguous"),
                ("bf16", "channels_last"),
            ],
        ),
        ({}, False, [("fp32", "contiguous"), ("fp32", "channels_last")]),
        ({"precision": "bf16"}, False, [("bf16", "contiguous"), ("bf16", "channels_last")]),
        ({"precision": "fp64"}, True, [("fp64", "contiguous"), ("fp64", "channels_last")]),
        (
            {"memory_format": "channels_last"},
            True,
            [("fp32", "channels_last"), ("bf16", "channels_last")],
        ),
        ({"memory_format": "contiguous"}, False, [("fp32", "contiguous")]),
        ({"precision": "fp32", "memory_format": "contiguous"}, True, [("fp32", "contiguous")]),
    ],
)
def test_candidates_are_what_the_config_leaves_open_the_plainest_first(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    bf16: bool,
    expected: list[tuple[str, str]],
) -> None:
    monkeypatch.setattr(probe, "has_fast_bf16", lambda device: bf16)
    candidates = candidate_arithmetics(Config(**options), _CPU)
    assert _names(candidates) == expected
    assert all(candidate.device == _CPU for candidate in candidates)


def _measure_as(monkeypatch: pytest.MonkeyPatch, speeds: list[float]) -> list[int]:
    """Let the candidates reach these speeds; return the list of batch sizes asked for."""
    remaining, sizes = list(speeds), []

    def measure(
        config: Config,
        arithmetic: Arithmetic,
        model: nn.Module,
        in_shape: tuple[int, int, int],
        size: int,
    ) -> float:
        assert in_shape == _SHAPE
        sizes.append(size)
        return remaining.pop(0)

    monkeypatch.setattr(probe, "measure", measure)
    monkeypatch.setattr(probe, "has_fast_bf16", lambda device: True)
    return sizes


def test_fixed_settings_need_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    _measure_as(monkeypatch, [])
    config = Config(precision="fp64", memory_format="channels_last")
    chosen, measured = choose_arithmetic(config, _CPU, _model(), _SHAPE)
    assert chosen == Arithmetic(_CPU, "fp64", "channels_last")
    assert measured == []


@pytest.mark.parametrize(
    ("speeds", "winner"),
    [
        ([100, 100, 100, 100], 0),
        ([100, 104.9, 104.9, 104.9], 0),
        ([100, 105.1, 100, 100], 1),
        ([100, 106, 110, 100], 1),
        ([100, 106, 112, 100], 2),
        ([100, 90, 80, 200], 3),
        ([100, 200, 150, 190], 1),
        ([100, 50, 50, 50], 0),
    ],
)
def test_another_way_must_be_faster_by_five_per_cent(
    monkeypatch: pytest.MonkeyPatch, speeds: list[float], winner: int
) -> None:
    _measure_as(monkeypatch, speeds)
    chosen, measured = choose_arithmetic(Config(), _CPU, _model(), _SHAPE)
    candidates = candidate_arithmetics(Config(), _CPU)
    assert chosen == candidates[winner]
    assert measured == [Measured(c, s) for c, s in zip(candidates, speeds, strict=True)]


@pytest.mark.parametrize(
    ("device", "batch", "size"),
    [("cpu", 8, 8), ("cpu", 512, 64), ("cuda", 512, 512), ("cuda", 5000, 1024)],
)
def test_the_batch_measured_is_the_configs_but_never_huge(
    monkeypatch: pytest.MonkeyPatch, device: str, batch: int, size: int
) -> None:
    sizes = _measure_as(monkeypatch, [1, 1, 1, 1])
    choose_arithmetic(Config(batch=batch), torch.device(device), _model(), _SHAPE)
    assert sizes == [size] * 4


def test_a_real_measurement_chooses_among_the_measured_and_leaves_the_model_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "has_fast_bf16", lambda device: True)
    monkeypatch.setattr(probe, "_BUDGET_S", 0.01)
    model = _model()
    model.eval()
    former = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    chosen, measured = choose_arithmetic(Config(batch=4), _CPU, model, _SHAPE)
    assert len(measured) == 4
    assert chosen in [one.arithmetic for one in measured]
    assert all(one.samples_per_s > 0 for one in measured)
    assert all(torch.equal(former[name], tensor) for name, tensor in model.state_dict().items())
    assert all(tensor.is_contiguous() for tensor in model.state_dict().values())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training


@pytest.mark.parametrize(
    ("avx512", "amx", "expected"),
    [(False, False, False), (True, False, True), (False, True, True)],
)
def test_a_cpu_has_fast_bf16_where_it_has_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, avx512: bool, amx: bool, expected: bool
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert probe.has_fast_bf16(_CPU) is expected


@pytest.mark.parametrize("supported", [True, False])
def test_a_gpu_is_asked_for_bf16(monkeypatch: pytest.MonkeyPatch, supported: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    assert probe.has_fast_bf16(torch.device("cuda")) is supported


def test_a_network_with_dropout_is_measured_as_it_is_trained() -> None:
    """Dropout asks for keys; without them tasks would not be what is measured."""
    model = key_dropout(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    executor = TasksExecutor(model, optimizer, Arithmetic(_CPU), portable=True)
    assert probe.measure_executor(executor, _SHAPE, 8, budget_s=0.0) > 0
    assert executor.why_not is None
    assert list(executor._steps) == [(8, True)]
