"""Find out by a short measurement which precision and layout this node is fastest with."""

import copy
import itertools
import time
from dataclasses import dataclass

import torch
from torch import nn

from convoy.config import Config
from convoy.data.batches import Batch
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.executor import Executor, make_executor
from convoy.randomness import sample_keys

_BUDGET_S = 0.5  # for each candidate, after its warm-up
_MIN_GAIN = 1.05  # less is within the noise of so short a measurement


@dataclass(frozen=True, slots=True)
class Measured:
    """One way to compute and the samples per second it reached."""

    arithmetic: Arithmetic
    samples_per_s: float


def choose_arithmetic(
    config: Config,
    device: torch.device,
    model: nn.Module,
    in_shape: tuple[int, int, int],
) -> tuple[Arithmetic, list[Measured]]:
    """Return the fastest way to compute among those a config leaves open, and what was measured.

    The first candidate is the plainest (fp32, contiguous); another must be faster by 5 %.
    """
    candidates = candidate_arithmetics(config, device)
    if len(candidates) == 1:
        return candidates[0], []
    size = min(config.batch, 1024 if device.type == "cuda" else 64)
    measured = [Measured(c, measure(config, c, model, in_shape, size)) for c in candidates]
    best = measured[0]
    for other in measured[1:]:
        if other.samples_per_s > best.samples_per_s * _MIN_GAIN:
            best = other
    return best.arithmetic, measured


def candidate_arithmetics(config: Config, device: torch.device) -> list[Arithmetic]:
    """List the combinations that a config allows on a device, the plainest first."""
    precisions = [config.precision]
    if config.precision == "auto":
        precisions = ["fp32", "bf16"] if has_fast_bf16(device) else ["fp32"]
    layouts = [config.memory_format]
    if config.memory_format == "auto":
        layouts = ["contiguous", "channels_last"]
    return [Arithmetic(device, p, layout) for p, layout in itertools.product(precisions, layouts)]


def has_fast_bf16(device: torch.device) -> bool:
    """Tell whether a device has instructions for bf16, so that trying it can pay."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def measure(
    config: Config,
    arithmetic: Arithmetic,
    model: nn.Module,
    in_shape: tuple[int, int, int],
    size: int,
    budget_s: float = _BUDGET_S,
) -> float:
    """Return how many samples per second a copy of a network trains with."""
    replica = arithmetic.place(copy.deepcopy(model))
    executor = make_executor(config, replica, arithmetic, silent)
    return measure_executor(executor, in_shape, size, budget_s)


def measure_executor(
    executor: Executor, in_shape: tuple[int, int, int], size: int, budget_s: float = _BUDGET_S
) -> float:
    """Return how many samples per second an executor trains with; its rate is zero meanwhile."""
    batch = _blank_batch(executor.arithmetic, in_shape, size)
    _step(executor, batch)
    _step(executor, batch)  # where a step is recorded, it is the second one
    steps, started = 0, time.perf_counter()
    while steps == 0 or (steps < 20 and time.perf_counter() - started < budget_s):
        _step(executor, batch)
        steps += 1
    return steps * size / (time.perf_counter() - started)


def silent(why: str) -> None:
    """Say nothing: whoever trains in earnest will."""


def _blank_batch(arithmetic: Arithmetic, in_shape: tuple[int, int, int], size: int) -> Batch:
    images = torch.zeros(size, *in_shape, device=arithmetic.device, dtype=arithmetic.dtype)
    labels = torch.zeros(size, dtype=torch.int64, device=arithmetic.device)
    # With keys, as in training: dropout asks for them, and executors do otherwise without.
    keys = sample_keys(0, 0, torch.arange(size)).to(arithmetic.device)
    return Batch(images.to(memory_format=arithmetic.memory_format), labels, keys)


def _step(executor: Executor, batch: Batch) -> None:
    executor.step(batch, len(batch), 0.0)
    if executor.arithmetic.device.type == "cuda":
        torch.cuda.synchronize(executor.arithmetic.device)
