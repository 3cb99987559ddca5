"""A health check: what a machine has, what it lacks, and how fast it is."""

import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from convoy.config import Config
from convoy.data.catalog import NAMED_SETS, find_source
from convoy.errors import ConvoyError
from convoy.files import default_cache_dir
from convoy.inner.arithmetic import Arithmetic, choose_device
from convoy.inner.probe import candidate_arithmetics, has_fast_bf16, measure
from convoy.inner.way import has_own_convolutions
from convoy.machine import machine, versions
from convoy.models.zoo import build_model
from convoy.storage.runfolder import DEFAULT_ROOT

_MIN_TORCH = (2, 10)
_SPEED_PROBES = (("lenet5", (1, 28, 28)), ("resnet20", (3, 32, 32)))


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `needed` ones must be good for training to work."""

    name: str
    good: bool
    text: str
    needed: bool = False


@dataclass(frozen=True, slots=True)
class Checkup:
    """Everything that was looked at."""

    findings: list[Finding]
    speeds: dict[str, float]
    machine: dict[str, Any]
    versions: dict[str, str]

    @property
    def problems(self) -> list[Finding]:
        """Return what keeps this machine from training."""
        return [finding for finding in self.findings if finding.needed and not finding.good]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def examine() -> Checkup:
    """Look at this machine and measure its speed for a few seconds."""
    device = choose_device("auto")
    findings = [
        _torch_version(),
        _processor(),
        _accelerator(),
        _bf16(device),
        _tasks(),
        _writable("runs", DEFAULT_ROOT.absolute().parent, needed=True),
        _writable("image cache", default_cache_dir(), needed=False),
        *(_named_set(name) for name in NAMED_SETS),
    ]
    speeds = {}
    for model, shape in _SPEED_PROBES:
        best, speed = _fastest(device, model, shape)
        speeds[model] = round(speed, 1)
        how = f"{best.precision}, {best.layout}"
        findings.append(
            Finding(f"speed of {model}", True, f"{speed:,.0f} samples/s on {device} ({how})")
        )
    return Checkup(findings, speeds, machine(), versions())


def _torch_version() -> Finding:
    found = torch.__version__
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    wanted = ".".join(map(str, _MIN_TORCH))
    return Finding(
        "torch", numbers >= _MIN_TORCH, f"{found} (needs {wanted} or newer)", needed=True
    )


def _processor() -> Finding:
    facts = machine()
    threads = torch.get_num_threads()
    text = f"{facts['processor']}, {facts['cores']} cores ({facts['cpu_capability']}), "
    return Finding("processor", True, f"{text}{threads} threads, {facts['memory_gib']} GiB memory")


def _accelerator() -> Finding:
    gpus = machine()["gpus"]
    return Finding("GPU", bool(gpus), ", ".join(gpus) if gpus else "none: training uses the CPU")


def _bf16(device: torch.device) -> Finding:
    fast = has_fast_bf16(device)
    return Finding("bf16", fast, f"{device} has {'' if fast else 'no '}instructions for it")


def _tasks() -> Finding:
    """Tell what the executor `tasks` finds here, without building its engine."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return Finding("tasks", False, "no C++ compiler: tasks run one after the other")
    if not has_own_convolutions():
        return Finding("tasks", True, "their engine can be compiled; convolutions are PyTorch's")
    unit = (
        ", in bf16 on a matrix unit if the system grants it"
        if torch.cpu._is_amx_tile_supported()
        else ""
    )
    return Finding("tasks", True, f"convolutions of their own in vectors of 512 bits{unit}")


def _writable(name: str, folder: Path, *, needed: bool) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            free = shutil.disk_usage(folder).free / 2**30
    except OSError as error:
        return Finding(
            name, False, f"{folder} cannot be written: {os.strerror(error.errno or 0)}", needed
        )
    return Finding(name, True, f"{folder} ({free:.1f} GiB free)", needed)


def _named_set(name: str) -> Finding:
    try:
        find_source(Config(data=name))
    except ConvoyError:
        return Finding(f"data: {name}", False, "not at its usual place; give --data-dir")
    return Finding(f"data: {name}", True, NAMED_SETS[name].description)


def _fastest(
    device: torch.device, name: str, shape: tuple[int, int, int]
) -> tuple[Arithmetic, float]:
    config = Config(batch=64)
    model = build_model(name, shape, 10, seed=0)
    speeds = {}
    for arithmetic in candidate_arithmetics(config, device):
        speeds[arithmetic] = measure(config, arithmetic, model, shape, config.batch)
    best = max(speeds, key=lambda candidate: speeds[candidate])
    return best, speeds[best]
