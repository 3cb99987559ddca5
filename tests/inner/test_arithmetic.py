"""A node computes on a device it has, in the precision and layout it was told."""

import pytest
import torch
from torch import nn

from convoy.errors import ConfigError, EnvironmentProblem
from convoy.inner.arithmetic import Arithmetic, choose_device, prepare_device

_CPU = torch.device("cpu")


@pytest.mark.parametrize(("present", "expected"), [(False, "cpu"), (True, "cuda")])
def test_auto_takes_a_gpu_where_there_is_one(
    monkeypatch: pytest.MonkeyPatch, present: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)
    assert choose_device("auto").type == expected


def test_the_cpu_is_always_there() -> None:
    assert choose_device("cpu") == _CPU


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "cuda:-1", "meta", "mps", "cpu cuda"])
def test_an_unknown_device_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown device") as caught:
        choose_device(name)
    assert f"got {name!r}; allowed: auto, cpu, cuda or cuda:N" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), ("cuda:7", 4)]
)
def test_a_gpu_that_is_not_there_is_a_problem_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(EnvironmentProblem, match=rf"no such GPU; got '{name}'.*{count} GPU\(s\)"):
        choose_device(name)


@pytest.mark.parametrize(("name", "count"), [("cuda", 1), ("cuda:0", 1), ("cuda:1", 2)])
def test_a_gpu_that_is_there_is_taken(
    monkeypatch: pytest.MonkeyPatch, name: str, count: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert choose_device(name) == torch.device(name)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.float32), ("fp64", torch.float64)],
)
def test_weights_have_the_type_of_the_precision(precision: str, dtype: torch.dtype) -> None:
    arithmetic = Arithmetic(_CPU, precision)
    model = arithmetic.place(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)))
    assert arithmetic.dtype == dtype
    assert all(parameter.dtype == dtype for parameter in model.parameters())


@pytest.mark.parametrize(
    ("layout", "memory_format"),
    [("contiguous", torch.contiguous_format), ("channels_last", torch.channels_last)],
)
def test_weights_are_laid_out_as_told(layout: str, memory_format: torch.memory_format) -> None:
    arithmetic = Arithmetic(_CPU, layout=layout)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(3, 2))
    former = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert arithmetic.memory_format == memory_format
    assert arithmetic.place(model) is model
    weight = model.state_dict()["0.weight"]
    assert weight.is_contiguous(memory_format=memory_format)
    assert all(torch.equal(former[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp64", torch.float64)],
)
def test_the_forward_pass_runs_in_the_precision(precision: str, dtype: torch.dtype) -> None:
    arithmetic = Arithmetic(_CPU, precision)
    layer = arithmetic.place(nn.Linear(4, 3))
    with arithmetic.autocast():
        assert layer(torch.zeros(2, 4, dtype=arithmetic.dtype)).dtype == dtype
    assert layer(torch.zeros(2, 4, dtype=arithmetic.dtype)).dtype == arithmetic.dtype


@pytest.mark.parametrize(
    ("device", "deterministic", "benchmark"),
    [("cpu", False, False), ("cuda", False, True), ("cuda", True, False)],
)
def test_cudnns_switches_follow_device_and_determinism(
    monkeypatch: pytest.MonkeyPatch, device: str, deterministic: bool, benchmark: bool
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not benchmark)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", not deterministic)
    prepare_device(torch.device(device), threads=0, deterministic=deterministic)
    assert torch.backends.cudnn.benchmark == benchmark
    assert torch.backends.cudnn.deterministic == deterministic


@pytest.mark.parametrize(("threads", "calls"), [(0, []), (3, [3])])
def test_the_number_of_threads_is_set_only_if_given(
    monkeypatch: pytest.MonkeyPatch, threads: int, calls: list[int]
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", seen.append)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    prepare_device(_CPU, threads=threads, deterministic=False)
    assert seen == calls


def test_a_numbered_cpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown device"):
        choose_device("cpu:3")
