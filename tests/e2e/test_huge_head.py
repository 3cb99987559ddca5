"""The example of a huge classifier, with smaller numbers."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_nodes_learn_and_tell_their_memory() -> None:
    words = "-W error examples/huge_head.py --nodes 2 --classes 3000 --batch 8 --steps 8"
    done = subprocess.run(
        [sys.executable, *words.split()], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] - 1
    assert re.search(r"memory of each node: \d+ MB, \d+ MB$", done.stdout.strip())
