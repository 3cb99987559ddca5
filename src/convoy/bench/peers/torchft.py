"""torchft: DDP that survives the loss of a replica, as its own example sets it up.

A lighthouse counts who is there; before each step the replicas agree on a quorum, and after it
on whether all went well. Every node is a replica of its own, with a store of its own.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch import nn, optim

from convoy.bench.peers import Peer, Step, Task
from convoy.bench.peers.alone import Loop, Samples, make_model
from convoy.bench.peers.crew import Crew, Link
from convoy.bench.peers.ddp import BEST_SETTINGS, open_store
from convoy.inner.optimizer import make_optimizer

_HOST = "127.0.0.1"
_TIMEOUT = timedelta(seconds=120)
_PATIENCE_S = 60.0


def _silence() -> None:
    """Keep its log off the terminal: it writes several lines a step, and that costs time."""
    os.environ["RUST_LOG"] = "error"  # read when its library is loaded; it knows no "off"
    logging.disable(logging.WARNING)


@contextmanager
def _meet(num_nodes: int) -> Iterator[str]:
    # In a process of its own: it takes nothing from the nodes, and ends with all its threads.
    with Crew(_keep_lighthouse, [(num_nodes,)]) as crew:
        yield crew.receive(_PATIENCE_S)[0]
        crew.send("end")


def _keep_lighthouse(link: Link, num_nodes: int) -> None:
    _silence()
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"{_HOST}:0", min_replicas=num_nodes, join_timeout_ms=60_000, quorum_tick_ms=10
    )
    port = server.address().rsplit(":", 1)[1]  # it names the host, which may not resolve
    link.send(f"http://{_HOST}:{port}")
    link.receive()
    server.shutdown()


@contextmanager
def _join(task: Task, node: int, address: str) -> Iterator[Step]:
    _silence()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    from torchft import DistributedDataParallel, Optimizer

    model = make_model(task)
    optimizer = make_optimizer(model, task.config)
    with open_store() as store, _managed(task, node, address, store, model, optimizer) as manager:
        loop = Loop(
            task,
            DistributedDataParallel(manager, model, **BEST_SETTINGS),
            Optimizer(manager, optimizer),
            Samples(task, node, task.equal_shares[node]),
            task.batch / task.num_nodes,
        )

        def step() -> int:
            before = manager.current_step()
            samples = loop.step()
            return samples if manager.current_step() > before else 0  # else it was in vain

        yield step


@contextmanager
def _managed(
    task: Task, node: int, address: str, store: str, model: nn.Module, optimizer: optim.Optimizer
) -> Iterator[Any]:
    from torchft import Manager, ProcessGroupGloo

    def load_state_dict(state: dict[str, dict[str, Any]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, dict[str, Any]]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    host, port = store.split(":")
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=task.num_nodes,
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=int(port),
        lighthouse_addr=address,
        replica_id=f"node{node}",
        hostname=_HOST,
        init_sync=False,  # all weights follow from the same seed
    )
    try:
        yield manager
    finally:
        manager.shutdown(wait=False)


TORCHFT = Peer(lockstep=True, meet=_meet, join=_join)
