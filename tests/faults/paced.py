"""A small network whose steps take as long as a test wants, without using the processor."""

import os
import time
from pathlib import Path

from torch import Tensor, nn


class Paced(nn.Module):
    """Passes its input on; a training step takes PACE_S seconds longer, stalls, or hurries.

    A file says that a step has begun, for a test that wants to strike in the midst of one.
    """

    def forward(self, x: Tensor) -> Tensor:
        pace_s = float(os.environ.get("PACE_S", "0"))
        if self.training and pace_s and not Path("hurry").exists():
            Path(f"step-of-{os.getpid()}").touch()
            time.sleep(30 if Path("stall").exists() else pace_s)
        return x


def build(in_shape: tuple[int, int, int], num_classes: int) -> nn.Module:
    assert in_shape == (1, 28, 28)
    return nn.Sequential(
        Paced(),
        nn.Conv2d(1, 6, 5, stride=3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 8 * 8, num_classes),
    )
