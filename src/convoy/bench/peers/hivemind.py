"""hivemind: peers gather gradients at their own pace and average once enough are together.

Its target batch is larger than ours, because it needs about a second to find a group: with a
step's worth of samples it would mostly search. That changes what is learned per sample; the
speed says nothing about that. Measure over several rounds (60 s and more).

A peer whose averaging fails goes on with its own gradients, with no more than a line in its log:
its speed would be that of nodes that train apart, or that wait for nothing. So rounds are
counted, and a node on which most of them fail gives an error instead of a speed.
"""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from convoy.bench.peers import Peer, Step, Task
from convoy.bench.peers.alone import Loop, Samples, make_model
from convoy.bench.peers.crew import Crew, Link

_ADDRESS = "/ip4/127.0.0.1/tcp/0"
# ResNet-20 on nodes of 0.8 to 0.2 cores, one run each on a busy machine: 141 samples/s with 1024,
# 192 with 4096. Delayed averaging gave 258, but there the slowest node never found a group.
_TARGET_BATCH = 4096
_PATIENCE_S = 60.0
_FAILED_AT_LEAST = 3


def _prepare() -> None:
    """Get a process ready to import hivemind."""
    os.environ["HIVEMIND_LOGLEVEL"] = "CRITICAL"
    # It starts processes from objects that cannot be pickled; a node's default would pickle.
    multiprocessing.set_start_method("fork", force=True)


@contextmanager
def _meet(num_nodes: int) -> Iterator[str]:
    del num_nodes
    with Crew(_keep_table, [()]) as crew:
        yield crew.receive(_PATIENCE_S)[0]
        crew.send("end")


def _keep_table(link: Link) -> None:
    """Hold the first part of the distributed hash table, by which the peers find each other."""
    _prepare()
    from hivemind import DHT

    table = DHT(start=True, host_maddrs=[_ADDRESS])
    link.send(str(table.get_visible_maddrs()[0]))
    link.receive()
    table.shutdown()


@contextmanager
def _join(task: Task, node: int, address: str) -> Iterator[Step]:
    _prepare()
    from hivemind import DHT, Optimizer

    averaged, failed = 0, 0

    class CountingOptimizer(Optimizer):  # type: ignore[misc]
        """Counts how its rounds of averaging end."""

        def _load_averaged_gradients_into_optimizer_(self) -> None:
            nonlocal averaged
            averaged += 1
            super()._load_averaged_gradients_into_optimizer_()

        def _load_local_gradients_into_optimizer(self) -> None:
            nonlocal failed
            failed += 1
            super()._load_local_gradients_into_optimizer()

    share = task.equal_shares[node]
    # Its all-reduce fails on weights that are channels_last. The images still are, by which
    # torch chooses the kernels: measured, a step takes the same time.
    model = make_model(replace(task, memory_format="contiguous"))
    table = DHT(start=True, initial_peers=[address], host_maddrs=[_ADDRESS])
    optimizer = CountingOptimizer(
        dht=table,
        run_id="bench",
        batch_size_per_step=share,
        target_batch_size=max(_TARGET_BATCH, task.batch),
        params=model.parameters(),
        optimizer=partial(
            torch.optim.SGD,
            lr=task.lr,
            momentum=task.momentum,
            nesterov=task.nesterov,
            weight_decay=task.weight_decay,
        ),
        matchmaking_time=1.0,
        averaging_timeout=10.0,
        averager_opts={"request_timeout": 0.5},  # it asks for less than matchmaking_time
    )
    loop = Loop(task, model, optimizer, Samples(task, node, share), share)

    def step() -> int:
        samples = loop.step()
        if failed >= _FAILED_AT_LEAST and failed > averaged:
            raise RuntimeError(f"{failed} rounds of averaging failed, {averaged} succeeded")
        return samples

    yield step
    optimizer.shutdown()
    table.shutdown()


HIVEMIND = Peer(lockstep=False, meet=_meet, join=_join)
