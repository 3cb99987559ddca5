"""What this machine is, as plain facts to put beside every measurement."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import psutil

from convoy.errors import EnvironmentProblem


def versions() -> dict[str, str]:
    """Return the versions that decide a result."""
    found = {"python": platform.python_version()}
    for package in ("convoy-train", "torch", "numpy", "torchft"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def usable_cores() -> int:
    """Return how many cores this process may use: a batch system may give it a part only."""
    return len(os.sched_getaffinity(0))


def check_can_plot() -> None:
    """Refuse a picture that could not be drawn, before anything is measured for it."""
    if find_spec("matplotlib") is None:
        raise EnvironmentProblem(
            "pictures need matplotlib",
            hint="Run: pip install 'convoy-train[plot]', or in a clone: make setup-dev.",
        )


def machine() -> dict[str, Any]:
    """Return processor, cores, memory and accelerators."""
    import torch

    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def processor_name() -> str:
    """Return what the processor is called."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
