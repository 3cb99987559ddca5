"""The nodes of this machine: started, watched, started again, and never left behind."""

import time
from dataclasses import replace
from multiprocessing.process import BaseProcess

from convoy.launch.node import Order, run_local_node
from convoy.launch.processes import how_it_ended, start_process


class LocalNodes:
    """The processes of a lead's own nodes, one for each slot.

    Args:
        orders: what each node is told; how the lead is reached is filled in at the start.
        restarts: how often each may be started again.
    """

    def __init__(self, orders: list[Order], restarts: int) -> None:
        self._orders = orders
        self._restarts = [restarts] * len(orders)
        self._due: dict[int, float] = {}
        self._processes: dict[int, BaseProcess] = {}
        self._seen: set[int] = set()

    def start(self, lead: str, token: str, certificate: bytes | None = None) -> None:
        """Start every node."""
        self._orders = [
            replace(order, lead=lead, token=token, certificate=certificate)
            for order in self._orders
        ]
        for slot in range(len(self._orders)):
            self._start(slot)

    def _start(self, slot: int) -> None:
        given = (self._orders[slot],)
        self._processes[slot] = start_process(run_local_node, given, name=f"convoy node {slot + 1}")
        self._seen.discard(slot)

    def pid(self, slot: int) -> int | None:
        """Return a node's process number."""
        process = self._processes.get(slot)
        return process.pid if process is not None else None

    def collect_dead(self) -> dict[int, str]:
        """Return the slots whose processes ended since the last call, and how, in words."""
        dead = {}
        for slot, process in self._processes.items():
            if slot not in self._seen and process.exitcode is not None:
                self._seen.add(slot)
                dead[slot] = how_it_ended(process.exitcode)
        return dead

    def plan_restart(self, slot: int) -> bool:
        """Start a node again a little later, if it may be; tell whether it may."""
        if self._restarts[slot] == 0:
            return False
        self._restarts[slot] -= 1
        self._due[slot] = time.monotonic() + 0.2
        return True

    def start_due(self) -> None:
        """Start the nodes whose time has come."""
        for slot, when in list(self._due.items()):
            if time.monotonic() >= when:
                del self._due[slot]
                self._start(slot)

    @property
    def any_left(self) -> bool:
        """Tell whether any node runs or will run."""
        return bool(self._due) or any(p.exitcode is None for p in self._processes.values())

    def end(self, grace_s: float) -> None:
        """Wait for the nodes to end; kill those that do not."""
        deadline = time.monotonic() + grace_s
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes.values():
            if process.exitcode is None:
                process.kill()
            process.join()
            process.close()
        self._processes.clear()
