"""The memory that a stage should take beside what its process really takes."""

import re
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "measure_stage_memory.py"


def test_a_stage_takes_the_memory_that_the_model_says() -> None:
    command = [sys.executable, str(TOOL), "--batch", "64", "--only", "resnet20"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ratios = [float(found) for found in re.findall(r"([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(ratios) == 2, done.stdout
    assert all(0.85 < ratio < 1.2 for ratio in ratios), done.stdout
