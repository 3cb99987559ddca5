"""How a lead starts processes on its machine, and how they end."""

import multiprocessing
from multiprocessing.context import ForkServerContext

from convoy.launch.quiet import quiet_engines

_PRELOADED = [
    "convoy.launch.node",
    "convoy.launch.parameters.process",
    "convoy.outer.lockstep",
    "convoy.inner.eager",
]


def process_context() -> ForkServerContext:
    """Return how processes of this machine are started."""
    # One process imports torch, which takes two seconds, and the nodes are forked from it
    # before it has any threads.
    quiet_engines()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def how_it_ended(code: int) -> str:
    """Say in words how a process ended."""
    return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
