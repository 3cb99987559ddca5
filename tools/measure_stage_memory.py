"""Compare the memory that a pipeline's stage should take with what its process really takes.

    python tools/measure_stage_memory.py [--batch 128] [--only resnet20]

For the paper's networks, cut once as in its table of memory: a process trains the first stage with
one batch on its way at a time, another one with as many as the schedule lets in. What the second
takes more is set beside the model: lead * (what the stage keeps of a batch), and with a recipe that
stashes weights, lead copies of these.
"""

import argparse
import ctypes
import json
import subprocess
import sys

import psutil
import torch
from torch import nn

from convoy.config import Config
from convoy.inner.arithmetic import Arithmetic
from convoy.models.zoo import build_model
from convoy.pipeline.costs import measure_blocks
from convoy.pipeline.layout import lay_out, weight_layers
from convoy.pipeline.partition import cut_by_hand
from convoy.pipeline.passes import EagerPasses
from convoy.pipeline.recipe import RECIPES
from convoy.pipeline.stage import Stage

NETS = (
    ("lenet5", (1, 28, 28), 2),
    ("alexnet", (3, 32, 32), 3),
    ("vgg16", (3, 32, 32), 2),
    ("resnet20", (3, 32, 32), 7),
)
ARITHMETIC = Arithmetic(torch.device("cpu"), "fp32", "channels_last")
ROUNDS = 4  # of filling and draining, until memory has settled


def main() -> None:
    """Print a table, or be one of its processes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--only", choices=[model for model, *_ in NETS])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        model, cut, recipe, lead = json.loads(chosen.child)
        print(_train_stage(model, cut, recipe, lead, chosen.batch))
        return
    print("network, cut, recipe: extra MiB by the model, measured, their ratio")
    for model, _, cut in NETS:
        if chosen.only not in (None, model):
            continue
        for recipe, lead in (("published", 2), ("convoy", 1)):
            expected = lead * _expected(model, cut, recipe, chosen.batch)
            one, more = (_measure(model, cut, recipe, n, chosen.batch) for n in (0, lead))
            extra = more - one
            print(
                f"{model} ({cut}) {recipe}: {expected / 2**20:.1f}, {extra / 2**20:.1f}, "
                f"{extra / expected:.2f}"
            )


def _expected(name: str, cut: int, recipe: str, batch: int) -> int:
    """Return what a batch on its way should take."""
    model, shape = _model(name)
    first = lay_out(model, cut_by_hand(weight_layers(model), [cut])).bounds[1]
    blocks = measure_blocks(model, shape, batch, ARITHMETIC, budget_s=0.0).blocks[:first]
    stashed = sum(block.weight_bytes for block in blocks)
    kept = sum(block.kept_bytes for block in blocks)
    return kept + (stashed if RECIPES[recipe].needs_own_weights else 0)


def _measure(model: str, cut: int, recipe: str, lead: int, batch: int) -> int:
    child = json.dumps([model, cut, recipe, lead])
    command = [sys.executable, __file__, "--batch", str(batch), "--child", child]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    return int(done.stdout.splitlines()[-1])


def _train_stage(name: str, cut: int, recipe: str, lead: int, batch: int) -> int:
    """Return the bytes in use while as many batches as may be are on their way."""
    torch.set_num_threads(1)
    model, shape = _model(name)
    layout = lay_out(model, cut_by_hand(weight_layers(model), [cut]))
    blocks = layout.blocks_of(0)
    passes = EagerPasses(nn.Sequential(*blocks), ARITHMETIC, is_first=True, postpones=False)
    stage = Stage(blocks, lead, RECIPES[recipe], Config(), ARITHMETIC, {}, passes)
    images, keys = torch.randn(batch, *shape), torch.arange(batch)
    images = images.to(memory_format=torch.channels_last)
    gradient = torch.zeros_like(stage.forward(0, images, keys))
    stage.backward(0, gradient, 0.0)
    stage.update(0.0)
    used = 0
    for _ in range(ROUNDS):
        stage.fill(0.0, 0.0)
        for number in range(lead + 1):
            stage.forward(number, images, keys)
        ctypes.CDLL(None).malloc_trim(0)  # what is free is not used
        used = psutil.Process().memory_info().rss
        for number in range(lead + 1):
            stage.backward(number, gradient, 0.0)
            stage.update(0.0)
    return used


def _model(name: str) -> tuple[nn.Module, tuple[int, int, int]]:
    shape = next(shape for model, shape, _ in NETS if model == name)
    return ARITHMETIC.place(build_model(name, shape, 10, seed=0)), shape


if __name__ == "__main__":
    main()
