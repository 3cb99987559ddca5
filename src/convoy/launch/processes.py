"""How a lead starts processes on its machine, and how they end."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from convoy.launch.quiet import quiet_engines

_PRELOADED = (
    "convoy.launch.node",
    "convoy.launch.parameters.process",
    "convoy.outer.lockstep",
    "convoy.inner.eager",
)


def start_process(
    target: Callable[..., None],
    args: tuple[Any, ...],
    *,
    name: str | None = None,
    preloaded: Sequence[str] = _PRELOADED,
) -> BaseProcess:
    """Start a process of this machine, in the environment that this one has now."""
    # One process imports torch, which takes two seconds, and the others are forked from it
    # before it has any threads. It keeps the environment it was born with, so ours goes along.
    quiet_engines()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preloaded])
    given = (dict(os.environ), target, args)
    process = context.Process(target=_run_in, args=given, name=name)
    process.start()
    return process


def _run_in(
    environment: dict[str, str], target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*args)


def how_it_ended(code: int) -> str:
    """Say in words how a process ended."""
    return f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
