"""A gloo group that listens on one address only, and that can be broken up at once."""

import contextlib
import os
import socket
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torchft.process_group import ProcessGroupGloo


class BoundGloo(ProcessGroupGloo):  # type: ignore[misc] # torchft has no types
    """torchft's reconfigurable gloo group, on one address, and one that can be broken up.

    gloo's own `abort` does nothing (torch 2.13): whoever waits for a member that has left, but
    lives, would wait on. A group that is broken up here shuts its connections down, so that all
    waiting ends at once, on both sides.
    """

    _bound_to = "127.0.0.1"
    _sockets: tuple[tuple[int, int], ...] = ()

    def bind(self, address: str) -> None:
        """Use this address for all connections."""
        self._bound_to = address

    def _create_pg(self, store: Store, rank: int, world_size: int) -> dist.ProcessGroup:
        before = connected_sockets()
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._bound_to)]
        options._timeout = self._timeout
        backend = dist.ProcessGroupGloo(store, rank, world_size, options)
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        self._sockets = tuple(connected_sockets() - before)
        return group

    def abort(self, errored: bool = True) -> None:
        """Shut down the connections to all members, from any thread."""
        for handle, inode in self._sockets:
            shut_down(handle, inode)
        self._sockets = ()
        super().abort(errored=errored)  # waits for what is under way: it fails at once now


def connected_sockets() -> set[tuple[int, int]]:
    """Return this process's connected TCP sockets: their descriptors and unique numbers."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), _borrowed(int(name)) as own:
            own.getpeername()
            if own.family != socket.AF_UNIX:
                found.add((int(name), os.fstat(own.fileno()).st_ino))
    return found


def shut_down(handle: int, inode: int) -> None:
    """Shut a socket down, if the descriptor is still that socket's."""
    with contextlib.suppress(OSError), _borrowed(handle) as own:
        if os.fstat(own.fileno()).st_ino == inode:
            own.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def _borrowed(handle: int) -> Iterator[socket.socket]:
    """Open a socket a second time; it may be closed, or be no socket at all: an OSError."""
    own = os.dup(handle)
    try:
        opened = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
    with opened:
        yield opened
