"""Before training: do tasks find what plain PyTorch finds, on a few random samples?

With bf16, rounding would hide a mistake: then the same network is compared in fp64.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from convoy.inner.arithmetic import Arithmetic
from convoy.inner.tasks.capture import CannotCaptureError
from convoy.inner.tasks.decompose import decompose
from convoy.inner.tasks.engines import Engines
from convoy.inner.tasks.recording import Recording
from convoy.inner.tasks.step import Grain, Step, named_tensors

SAMPLES = 5
# On few samples, not of training. In fp32 rounding makes some rectifiers open that are closed by
# PyTorch: up to 1.3 % were seen in parts of the zoo's networks.
_TOLERANCE = {"fp64": 1e-8, "fp32": 0.1}

Found = dict[str, Sequence[Tensor]]  # what was computed, by what it is, for people


class Trial:
    """A network, or a part of one, twice: to be run as tasks, in two groups, and by PyTorch.

    Attributes:
        plain: for PyTorch.
        way: the arithmetic of both.
        step: as tasks.
    """

    def __init__(
        self,
        part: nn.Module,
        arithmetic: Arithmetic,
        engines: Engines,
        record: Callable[[nn.Module, Arithmetic], Recording],
    ) -> None:
        self._part, self.way = _twin_of(part, arithmetic)
        self.plain = copy.deepcopy(self._part).train()
        plan = decompose(record(self._part, self.way), hands=engines.hands(arithmetic))
        self.step = Step(plan, SAMPLES, Grain(2, 1), None, engines.make)
        self._gradients = {n: torch.zeros_like(p) for n, p in self._part.named_parameters()}
        self.step.bind(named_tensors(self._part, self._gradients))

    def compare(self, ours: Found, theirs: Found) -> None:
        """Refuse what differs, be it among these or what the step has left behind.

        Raises:
            CannotCaptureError: something does.
        """
        plain = self.plain
        gradients = [p.grad for p in plain.parameters() if p.grad is not None]
        theirs = {"gradients": gradients, "buffers": [*plain.buffers()]} | theirs
        ours = {"gradients": [*self._gradients.values()], "buffers": [*self._part.buffers()]} | ours
        check_same(ours, theirs, self.way.precision)


def check_same(ours: Found, theirs: Mapping[str, Sequence[Tensor]], precision: str) -> None:
    """Refuse what is not PyTorch's; each kind for itself, so that small ones are seen too.

    Raises:
        CannotCaptureError: something differs.
    """
    for what, expected in theirs.items():
        a, b = (_as_row(tensors) for tensors in (ours[what], expected))
        if len(a) != len(b) or not (a - b).norm() <= _TOLERANCE[precision] * b.norm():
            raise CannotCaptureError(f"its {what} would differ from PyTorch's")


def random_samples(shape: Iterable[int], layout: torch.memory_format, dtype: torch.dtype) -> Tensor:
    """Return some random samples, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(SAMPLES, *shape, generator=generator).to(dtype)
    return found.to(memory_format=layout)


def _as_row(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(0).double(), *(t.detach().flatten().double() for t in tensors)])


def _twin_of(part: nn.Module, way: Arithmetic) -> tuple[nn.Module, Arithmetic]:
    """Return a copy to check with, and the arithmetic to do it in."""
    twin = copy.deepcopy(part)
    if way.precision == "bf16":
        way = replace(way, precision="fp64")
        way.place(twin)
    return twin, way
