"""How a node computes: on which device, in which precision and memory layout."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from convoy.errors import ConfigError, EnvironmentProblem
from convoy.inner.memory import keep_freed_memory


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """A device with a precision ("fp32", "bf16", "fp64") and a layout of images.

    With "bf16" the weights stay fp32 and torch's autocast picks the operations that gain.
    """

    device: torch.device
    precision: str = "fp32"
    layout: str = "contiguous"

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of weights and inputs."""
        return torch.float64 if self.precision == "fp64" else torch.float32

    @property
    def memory_format(self) -> torch.memory_format:
        """Return torch's name for the layout."""
        channels_last = self.layout == "channels_last"
        return torch.channels_last if channels_last else torch.contiguous_format

    def autocast(self, *, cached: bool = True) -> AbstractContextManager[Any]:
        """Return the context in which the forward pass runs.

        Unless `cached`, a weight is rounded anew at each use, as a recording needs it.
        """
        if self.precision != "bf16":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16, cache_enabled=cached)

    def place(self, model: nn.Module) -> nn.Module:
        """Move a network to the device, in place."""
        model.to(device=self.device, dtype=self.dtype)
        # A separate call: `to` accepts a memory format only for tensors of four dimensions.
        return model.to(memory_format=self.memory_format)  # type: ignore[call-overload, no-any-return]


def choose_device(name: str) -> torch.device:
    """Turn the option `device` into a device that this machine has."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError("unknown device", got=name, allowed="auto, cpu, cuda or cuda:N") from None
    if name != "cpu" and device.type != "cuda":
        raise ConfigError("unknown device", got=name, allowed="auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise EnvironmentProblem(
                "this machine has no such GPU",
                got=name,
                allowed=f"{count} GPU(s) here",
                hint="Give --device auto or --device cpu.",
            )
    return device


def prepare_device(device: torch.device, *, threads: int, deterministic: bool) -> None:
    """Set the process-wide switches for a run: threads, memory, cuDNN."""
    keep_freed_memory()
    if threads:
        torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = device.type == "cuda" and not deterministic
    torch.backends.cudnn.deterministic = deterministic
