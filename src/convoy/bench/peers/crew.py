"""A crew: processes of one machine that play the nodes of a cluster, and leave nothing behind.

    with Crew(entry, [(first,), (second,)]) as crew:   # entry(link, first), entry(link, second)
        crew.receive()                                 # one message of each, or its failure
        crew.place(lab)                                # only now does a node become slow
        crew.send("go")

The processes are forked from a server that has torch loaded already: importing it costs two
seconds a process. Each leads a process group of its own, so that what a peer's library starts
beneath it ends together with it. What they print goes to a file, of which the end is shown when
one dies without a word.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Protocol

import psutil
import torch

from convoy.errors import ConvoyError
from convoy.inner.memory import keep_freed_memory
from convoy.launch.processes import start_process

_PRELOADED = ["convoy.bench.peers.ddp"]
# A further second of imports, each.
_PRELOADED_IF_USED = ["convoy.bench.peers.dtensor", "convoy.bench.peers.pipelining"]
_FAREWELL_S = 5.0
_AFTERMATH_S = 0.5
_LAST_WORDS = 500  # characters


class Slots(Protocol):
    """What holds processes to the speeds of unequal nodes (the lab)."""

    def place(self, node: int, pid: int) -> None:
        """Hold a process to the speed of a node; several processes can share one."""
        ...


class Link:
    """A node's line to whoever started it."""

    def __init__(self, line: "connection.Connection[Any, Any]") -> None:
        self._line = line

    def send(self, message: object) -> None:
        """Hand a message up."""
        self._line.send((True, message))

    def fail(self, words: str) -> None:
        """Say why this node cannot go on."""
        self._line.send((False, words))

    def receive(self) -> Any:  # noqa: ANN401 - entry and starter agree on what they say
        """Wait for a message."""
        return self._line.recv()

    @property
    def has_message(self) -> bool:
        """Tell whether a message waits."""
        return self._line.poll()


Entry = Callable[..., None]  # called as entry(link, *arguments)


class Crew:
    """Several processes that each run one entry point.

    Leaving the block without an error gives them a moment to end by themselves; whoever has
    not ended then, or at any error, is killed with all its descendants.
    """

    def __init__(self, entry: Entry, arguments: Sequence[tuple[Any, ...]]) -> None:
        self._entry = entry
        self._arguments = arguments
        self._processes: list[BaseProcess] = []
        self._lines: list[connection.Connection[Any, Any]] = []
        self._folder = TemporaryDirectory(prefix="convoy-crew-", ignore_cleanup_errors=True)

    def __enter__(self) -> "Crew":
        try:
            for arguments in self._arguments:
                self._start(arguments)
        except BaseException:
            self._end(farewell_s=0.0)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(farewell_s=_FAREWELL_S if kind is None else 0.0)

    @property
    def pids(self) -> list[int]:
        """Return the processes' numbers, in the order of their nodes."""
        return [process.pid for process in self._processes if process.pid is not None]

    def place(self, slots: Slots | None) -> None:
        """Hold each node, with all that it has started, to its speed; None leaves all alone."""
        if slots is None:
            return
        for node, pid in enumerate(self.pids):
            for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
                slots.place(node, process.pid)

    def send(self, message: object) -> None:
        """Say the same to every node; why one is gone, the next `receive` tells."""
        for line in self._lines:
            with suppress(BrokenPipeError):
                line.send(message)

    def receive(self, timeout_s: float | None = None) -> list[Any]:
        """Return one message of each node, in the order of the nodes.

        Raises:
            ConvoyError: a node failed, died or stayed silent; says which, and why.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        found: dict[int, Any] = {}
        troubles: dict[int, str] = {}
        while waiting := self._nodes_without(found, troubles):
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = connection.wait([self._lines[node] for node in waiting], left_s)
            if not ready:
                break
            for node in waiting:
                if self._lines[node] in ready:
                    self._read(node, found, troubles)
            if troubles:
                # One node's failure makes others fail: hear them all, the cause is among them.
                deadline = time.monotonic() + _AFTERMATH_S
        if troubles:
            raise ConvoyError("; ".join(troubles[node] for node in sorted(troubles)))
        if waiting:
            raise ConvoyError(f"no answer within {timeout_s:g} s from the nodes {waiting}")
        return [found[node] for node in range(len(self._lines))]

    def _nodes_without(self, *answers: Container[int]) -> list[int]:
        nodes = range(len(self._lines))
        return [node for node in nodes if not any(node in known for known in answers)]

    def _start(self, arguments: tuple[Any, ...]) -> None:
        used = [name for name in _PRELOADED_IF_USED if name in sys.modules]
        ours, theirs = multiprocessing.Pipe()
        self._lines.append(ours)
        given = (self._entry, theirs, self._log(len(self._processes)), arguments)
        self._processes.append(start_process(_run, given, preloaded=[*_PRELOADED, *used]))
        theirs.close()

    def _read(self, node: int, found: dict[int, Any], troubles: dict[int, str]) -> None:
        try:
            is_well, message = self._lines[node].recv()
        except (EOFError, ConnectionResetError):
            troubles[node] = self._describe_death(node)
            return
        if is_well:
            found[node] = message
        else:
            troubles[node] = f"node {node} failed: {message}"

    def _describe_death(self, node: int) -> str:
        process = self._processes[node]
        process.join(_FAREWELL_S)
        log = Path(self._log(node))
        said = log.read_text(errors="replace")[-_LAST_WORDS:].strip() if log.exists() else ""
        return f"node {node} died with exit code {process.exitcode}, saying {said!r}"

    def _log(self, node: int) -> str:
        return os.path.join(self._folder.name, f"node{node}.log")

    def _end(self, farewell_s: float) -> None:
        deadline = time.monotonic() + farewell_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            assert process.pid is not None
            with suppress(ProcessLookupError):  # all gone, or it did not come to lead a group
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            process.close()
        for line in self._lines:
            line.close()
        self._processes.clear()
        self._lines.clear()
        self._folder.cleanup()


def _run(
    entry: Entry,
    line: "connection.Connection[Any, Any]",
    log: str,
    arguments: tuple[Any, ...],
) -> None:
    os.setsid()
    _print_to(log)
    threading.Thread(target=_die_with_parent, name="parent-watch", daemon=True).start()
    warnings.simplefilter("ignore")  # what a peer's library should do otherwise is not our say
    torch.set_num_threads(1)
    keep_freed_memory()
    link = Link(line)
    try:
        entry(link, *arguments)
    except BaseException as error:
        link.fail(_in_words(error))
    line.close()


def _print_to(path: str) -> None:
    """Send what this process prints, also from C++ and Rust, to a file."""
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def _die_with_parent() -> None:
    """Outlive the starter in no case, not even when it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def _in_words(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
