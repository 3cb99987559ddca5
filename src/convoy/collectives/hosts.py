"""Which ranks can share memory."""

import hashlib
import os
import platform
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from convoy.collectives.rendezvous import MOST_RANKS, is_possible

_KEY_BYTES = 32

Hosts = tuple[tuple[int, ...], ...]  # the ranks of each, in the order of their first ones


def host_key() -> str:
    """Return what ranks that share this host's memory have in common, and others have not.

    Ranks in other network namespaces count as other hosts, because they are there to play them.
    """
    about = [platform.node()]
    for name in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        path = Path(name)
        about.append(path.read_text().strip() if path.exists() else "")
    for name in ("net", "pid"):
        with suppress(OSError):
            about.append(os.readlink(f"/proc/self/ns/{name}"))  # its name and number
    return " ".join(about)


def key_row(key: str | None) -> Tensor:
    """Return a host's key as bytes; where memory cannot be shared, bytes that nobody else has."""
    if not is_possible():
        return torch.frombuffer(bytearray(secrets.token_bytes(_KEY_BYTES)), dtype=torch.uint8)
    return digest_row(key or host_key())


def digest_row(key: str) -> Tensor:
    """Return a key as so many bytes, however long it is."""
    digest = hashlib.sha256(key.encode()).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def group_by_host(keys: Sequence[bytes]) -> Hosts:
    """Return the ranks of each host.

    >>> group_by_host([b"a", b"b", b"a"])
    ((0, 2), (1,))
    """
    found: dict[bytes, list[int]] = {}
    for rank, key in enumerate(keys):
        found.setdefault(key, []).append(rank)
    groups = [
        tuple(ranks[start : start + MOST_RANKS])
        for ranks in found.values()
        for start in range(0, len(ranks), MOST_RANKS)
    ]
    return tuple(sorted(groups))
