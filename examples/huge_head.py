"""Train a classifier of 100,000 classes of which no process ever has the whole.

python examples/huge_head.py --nodes 2

Each node is a process with its own images. All have the same small convolutional network, and
each has the weights of some classes, which it makes itself. Nodes tell each other their images'
512 features, and three numbers of each image for the loss; neither weights nor logits travel. So a
head that would take 615 MB (weights, gradients, momentum) takes 308 MB on each of two nodes,
and 154 MB on each of four.

The script prints what every node's memory has grown by, and a loss that falls: it learns 64 random
images, each of another class, by heart. On two cores it takes ten
seconds, and each of two nodes grows by 457 MB: its part of the head, activations, messages.
"""

import argparse
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import distributed
from torch.multiprocessing.spawn import spawn

from convoy.bench.head import (
    CONFIG,
    FEATURES,
    Sizes,
    class_weights,
    make_samples,
    make_trunk,
    read_status,
    reset_peak,
)
from convoy.hybrid.huge import HugeHead


def main() -> None:
    """Start the nodes, and wait for them."""
    parser = argparse.ArgumentParser(description="a huge classifier, cut over nodes")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=64, help="images, of all nodes together")
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    if given.batch % given.nodes:
        parser.error("each node must have as many images")
    sizes = Sizes(given.classes, given.batch, given.steps)
    with TemporaryDirectory() as folder:
        meeting_point = f"file://{Path(folder) / 'nodes'}"
        spawn(run_node, (given.nodes, meeting_point, sizes), given.nodes)


def run_node(rank: int, nodes: int, meeting_point: str, sizes: Sizes) -> None:
    """Be one of the nodes."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # they are all on this machine
    distributed.init_process_group("gloo", meeting_point, rank=rank, world_size=nodes)
    images, labels = make_samples(sizes, rank, nodes)
    before = read_status("VmRSS")
    reset_peak()
    network = HugeHead(make_trunk(), FEATURES, sizes.classes, class_weights, CONFIG)
    for step in range(sizes.steps):
        own_loss = network.step(images, labels)
        (loss,) = told_by_all(0, own_loss, 1)
        if rank == 0 and (step % 5 == 0 or step == sizes.steps - 1):
            print(f"step {step + 1:3}: loss {loss / sizes.batch:.3f}", flush=True)
    memory = told_by_all(rank, (read_status("VmHWM") - before) / 1e6, nodes)
    if rank == 0:
        print("memory of each node:", ", ".join(f"{mb:,.0f} MB" for mb in memory))
    del network  # it holds messages of the group
    distributed.barrier()
    distributed.destroy_process_group()


def told_by_all(place: int, number: float, places: int) -> list[float]:
    """Add up what nodes put at some places of a list."""
    told = torch.zeros(places, dtype=torch.float64)
    told[place] = number
    distributed.all_reduce(told)
    found: list[float] = told.tolist()
    return found


if __name__ == "__main__":
    main()
