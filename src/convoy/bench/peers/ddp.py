"""torch's DistributedDataParallel over gloo: what everybody uses, and the oracle.

With equal shares the loss is each node's mean, as usual. With unequal ones (the oracle: someone
measured the nodes and set the shares by hand) it is weighted so that the gradient is the mean
over the whole batch. Both are one formula: DDP takes the mean over the nodes, so each node
divides the sum of its losses by batch / nodes.
"""

import copy
import itertools
import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from convoy.bench.peers import Peer, Step, Task
from convoy.bench.peers.alone import Loop, Samples, compiled_if_asked, make_model
from convoy.bench.peers.crew import Crew, Link, Slots
from convoy.config import Config
from convoy.data.augment import choose_augmentation
from convoy.data.batches import Batches
from convoy.data.load import load_data
from convoy.inner.arithmetic import Arithmetic
from convoy.inner.executor import make_executor
from convoy.inner.optimizer import make_optimizer
from convoy.inner.schedule import make_schedule
from convoy.launch.links import Links, enter_namespace
from convoy.models.zoo import build_model
from convoy.outer.single import evaluate
from convoy.tracking import untracked

_TIMEOUT = timedelta(seconds=600)
_LOOPBACK = "127.0.0.1"


@contextmanager
def open_store(host: str = _LOOPBACK) -> Iterator[str]:
    """Serve a store on one address only; gives it with the port."""
    with socket.create_server((host, 0)) as listener:
        port = listener.getsockname()[1]
        # Without a bound socket of ours the store would listen on all interfaces. It closes it.
        store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    yield f"{host}:{port}"
    del store


@contextmanager
def _meet(num_nodes: int) -> Iterator[str]:
    del num_nodes
    with open_store() as address:
        yield address


@contextmanager
def group(address: str, node: int, num_nodes: int) -> Iterator[None]:
    """Be in torch's default process group, by the network card that leads to its store."""
    host, port = address.split(":")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if host == _LOOPBACK else "eth0"
    store = TCPStore(host, int(port), is_master=False, timeout=_TIMEOUT)
    distributed.init_process_group(
        "gloo", store=store, rank=node, world_size=num_nodes, timeout=_TIMEOUT
    )
    try:
        yield
    finally:
        distributed.destroy_process_group()


# The fastest by CPU time of a step (ResNet-20, 4 nodes of 8 samples, settings in turn, two runs):
# none set 45 / 39 ms, broadcast_buffers alone 44 / 38, with the next 41 / 37, all three 40 / 35
# (measured with 100 MB, which is one bucket for this network too); a bare loop
# takes 37 / 32. static_graph gained nothing (43 / 38). Naming the usual 25 MB for a bucket drops
# the small first one, so that the gradients of a small network travel at once.
BEST_SETTINGS: dict[str, Any] = {
    "broadcast_buffers": False,
    "gradient_as_bucket_view": True,
    "bucket_cap_mb": 25,
}


def wrap_model(model: nn.Module, **others: Any) -> DistributedDataParallel:
    """Return a network that averages its gradients over the group; `others`: settings."""
    return DistributedDataParallel(model, **{**BEST_SETTINGS, **others})


def make_loop(task: Task, node: int, shares: Sequence[int], model: nn.Module) -> Loop:
    """Return the loop of a node that is in the group."""
    optimizer = make_optimizer(model, task.config)
    samples = Samples(task, node, shares[node])
    wrapped = wrap_model(compiled_if_asked(task, model), **dict(task.ddp))
    return Loop(task, wrapped, optimizer, samples, task.batch / task.num_nodes)


@contextmanager
def _join_with(task: Task, node: int, address: str, shares: Sequence[int]) -> Iterator[Step]:
    with group(address, node, task.num_nodes):
        yield make_loop(task, node, shares, make_model(task)).step


def _join_equal(task: Task, node: int, address: str) -> AbstractContextManager[Step]:
    return _join_with(task, node, address, task.equal_shares)


def _join_oracle(task: Task, node: int, address: str) -> AbstractContextManager[Step]:
    return _join_with(task, node, address, task.shares)


DDP = Peer(lockstep=True, meet=_meet, join=_join_equal)
ORACLE = Peer(lockstep=True, meet=_meet, join=_join_oracle)


Curve = list[tuple[float, float]]  # after each epoch: training seconds so far, test accuracy


def train_ddp(
    config: Config, shares: Sequence[int], lab: Slots | None, links: Links | None = None
) -> Curve:
    """Train as a config says, until its target accuracy or its last epoch.

    Network, order and variation of the images, optimizer and schedule are those of a run of
    Convoy. Reading the data and testing happen outside the clock, unlike in a run of Convoy.

    Args:
        config: the run; where it leaves precision or layout open, fp32 and channels_last.
        shares: how many samples of a batch each node takes.
        lab: slows the nodes down as soon as they have read their data.
        links: the networks that the nodes live in; None: loopback.
    """
    assert sum(shares) == config.batch, "the shares do not add up to the batch"
    with open_store(links.lead_address if links is not None else _LOOPBACK) as address:
        spaces = [links.namespace(n) if links is not None else None for n in range(len(shares))]
        given = [(config, tuple(shares), n, address, space) for n, space in enumerate(spaces)]
        with Crew(_train_node, given) as crew:
            crew.receive()
            crew.place(lab)
            crew.send("go")
            curve: Curve = crew.receive()[0]
    return curve


def _train_node(
    link: Link,
    config: Config,
    shares: tuple[int, ...],
    node: int,
    address: str,
    namespace: str | None,
) -> None:
    if namespace is not None:
        enter_namespace(namespace)
    with group(address, node, len(shares)):
        training = _Training(config, shares, node)
        training.warm_up()
        link.send("ready")
        link.receive()
        link.send(training.run())


class _Training:
    """One node's part of a run."""

    def __init__(self, config: Config, shares: tuple[int, ...], node: int) -> None:
        self._config, self._shares, self._node = config, shares, node
        data = load_data(config, untracked)
        shape = data.train.shape_CHW
        arithmetic = _arithmetic_of(config)
        self._augmentation = choose_augmentation(config, data.augment, shape)
        self._train, self._test = (
            Batches(
                part,
                mean=data.mean,
                std=data.std,
                device=arithmetic.device,
                dtype=arithmetic.dtype,
                memory_format=arithmetic.memory_format,
            )
            for part in (data.train, data.test)
        )
        self._schedule = make_schedule(config, math.ceil(len(self._train) / config.batch))
        self._model = build_model(config.model, shape, len(data.train.classes), config.seed)
        arithmetic.place(self._model)
        self._executor = make_executor(config, wrap_model(self._model), arithmetic, print)

    def warm_up(self) -> None:
        """Do a step with a copy of the network, so that torch has its kernels ready."""
        config = self._config
        epoch = self._train.epoch(0, seed=config.seed, augmentation=self._augmentation)
        replica = make_executor(
            config, copy.deepcopy(self._model), self._executor.arithmetic, print
        )
        replica.gradients(epoch.batch(0, self._shares[self._node]), 1)

    def run(self) -> Curve:
        """Train to the end; node 0 knows the accuracies, the others know when it is over."""
        curve: Curve = []
        seconds = 0.0
        for number in range(self._config.epochs):
            distributed.barrier()
            started = time.perf_counter()
            self._train_epoch(number)
            seconds += time.perf_counter() - started
            accuracy = self._agreed_accuracy()
            curve.append((seconds, accuracy))
            if self._config.target_accuracy and accuracy >= self._config.target_accuracy:
                break
        return curve

    def _train_epoch(self, number: int) -> None:
        config = self._config
        epoch = self._train.epoch(number, seed=config.seed, augmentation=self._augmentation)
        for step in range(self._schedule.steps_per_epoch):
            first = step * config.batch
            size = min(config.batch, len(self._train) - first)
            start, stop = split_batch(size, self._shares)[self._node]
            batch = epoch.batch(first + start, first + stop)
            self._executor.gradients(batch, size / len(self._shares))
            updates = number * self._schedule.steps_per_epoch + step
            self._executor.update(self._schedule.rate(updates))

    def _agreed_accuracy(self) -> float:
        """Let node 0 test while the others wait, and tell them."""
        accuracy = torch.zeros(1, dtype=torch.float64)
        if self._node == 0:
            mirrored = self._config.mirrored_test
            _, accuracy[0] = evaluate(self._executor, self._test, mirrored=mirrored)
        distributed.broadcast(accuracy, 0)
        return float(accuracy)


def split_batch(size: int, shares: Sequence[int]) -> list[tuple[int, int]]:
    """Return where each node's samples start and stop; a short batch is divided alike.

    >>> split_batch(8, (5, 3)), split_batch(4, (5, 3))
    ([(0, 5), (5, 8)], [(0, 2), (2, 4)])
    """
    sums = itertools.accumulate(shares, initial=0)
    bounds = [total * size // sum(shares) for total in sums]
    return list(itertools.pairwise(bounds))


def _arithmetic_of(config: Config) -> Arithmetic:
    precision = "fp32" if config.precision == "auto" else config.precision
    layout = "channels_last" if config.memory_format == "auto" else config.memory_format
    return Arithmetic(torch.device("cpu"), precision, layout)
