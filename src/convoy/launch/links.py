"""Slow networks on one machine: each node in a network namespace, behind a link of its own rate.

A bridge stands for the switch; one pair of virtual cards leads from it to each node. Only the rate
is emulated, in both directions each for itself; delay and loss are not.
"""

import contextlib
import ctypes
import math
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from convoy.errors import ConfigError, EnvironmentProblem

_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_MOST_NODES = 64
# tc counts rates in bits per second; this is the range its queue handles without distortion.
_LEAST_MBIT, _MOST_MBIT = 0.01, 100_000.0


class Links:
    """One link for each node, while it is entered as a context; a rate of None is no limit."""

    def __init__(self, rates_mbit: Sequence[float | None]) -> None:
        check_rates(rates_mbit)
        self._rates_mbit = list(rates_mbit)
        # The process number lets a later run see whose leftovers may be removed. Names of cards
        # have 15 characters at most.
        self._token = f"{os.getpid()}x{secrets.token_hex(1)}"
        self._bridge = f"cvb{self._token}"
        self._network = ""

    @staticmethod
    def available() -> str | None:
        """Return why links cannot be emulated here, or None if they can: one is really made."""
        if os.geteuid() != 0:
            return "network namespaces need the rights of root"
        try:
            with Links([10.0]):
                return None
        except EnvironmentProblem as error:
            return str(error)

    @property
    def lead_address(self) -> str:
        """The lead's address, outside of all namespaces."""
        return f"{self._entered()}.1"

    def address(self, node: int) -> str:
        """Return a node's address."""
        return f"{self._entered()}.{node + 2}"

    def namespace(self, node: int) -> str:
        """Return the name of a node's network namespace."""
        return f"convoy-{self._token}-{node}"

    def enter(self, node: int) -> None:
        """Move the calling thread to the far end of a node's link."""
        enter_namespace(self.namespace(node))

    def __enter__(self) -> "Links":
        _remove_orphans()
        try:
            self._network = _unused_network()
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("address", "add", f"{self.lead_address}/24", "dev", self._bridge)
            _ip("link", "set", self._bridge, "up")
            for node, rate_mbit in enumerate(self._rates_mbit):
                self._make_link(node, rate_mbit)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _make_link(self, node: int, rate_mbit: float | None) -> None:
        namespace, card = self.namespace(node), self._card(node)
        _ip("netns", "add", namespace)
        far_end = ("peer", "name", "eth0", "netns", namespace)
        _ip("link", "add", card, "type", "veth", *far_end)
        _ip("link", "set", card, "master", self._bridge, "up")
        _ip("-n", namespace, "address", "add", f"{self.address(node)}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        if rate_mbit is not None:
            # A queue limits only what leaves a card, so each end has one.
            _tc(*_limit_of(card, rate_mbit))
            _tc("-n", namespace, *_limit_of("eth0", rate_mbit))

    def _entered(self) -> str:
        assert self._network, "links have addresses only once they are entered"
        return self._network

    def _card(self, node: int) -> str:
        return f"cv{self._token}-{node}"

    def _remove(self) -> None:
        # The cards first: a process that still lives in a namespace would keep its card alive.
        for node in range(len(self._rates_mbit)):
            _remove_quietly("link", "delete", self._card(node))
            _remove_quietly("netns", "delete", self.namespace(node))
        _remove_quietly("link", "delete", self._bridge)


def enter_namespace(name: str) -> None:
    """Move the calling thread, and what it starts from now on, into a network namespace.

    A new process calls this first, while it has one thread: the others would stay outside.
    """
    try:
        handle = os.open(_NAMESPACES / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _setns(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise EnvironmentProblem(
            f"this network namespace cannot be entered: {error}", got=name
        ) from error


def _setns(handle: int) -> None:
    if sys.version_info >= (3, 12):
        os.setns(handle, _CLONE_NEWNET)
    else:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(handle, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def check_rates(rates_mbit: Sequence[float | None]) -> None:
    """Refuse rates that no link can have."""
    if not 1 <= len(rates_mbit) <= _MOST_NODES:
        raise ConfigError(
            "wrong number of links", got=len(rates_mbit), allowed=f"1 to {_MOST_NODES}"
        )
    for rate in rates_mbit:
        if rate is None or (math.isfinite(rate) and _LEAST_MBIT <= rate <= _MOST_MBIT):
            continue
        raise ConfigError(
            "a link has a rate in Mbit/s",
            got=rate,
            allowed=f"{_LEAST_MBIT} to {_MOST_MBIT:.0f}, or none for no limit",
        )


def _limit_of(card: str, rate_mbit: float) -> tuple[str, ...]:
    """Return the words for tc that hold a card to a rate.

    The bucket holds 4 ms of data, so that one timer tick of the kernel (250 Hz) costs no rate, and
    the queue a tenth of a second, as a cheap switch does; both hold some packets at any rate.
    """
    bytes_per_s = rate_mbit * 1e6 / 8
    burst = max(16_384, round(bytes_per_s * 0.004))
    limit = max(131_072, round(bytes_per_s * 0.1))
    rate = f"{round(rate_mbit * 1e6)}bit"
    queue = ("tbf", "rate", rate, "burst", str(burst), "limit", str(limit))
    return ("qdisc", "add", "dev", card, "root", *queue)


def _unused_network() -> str:
    """Return the first three numbers of a network 10.201.X/24 that this machine has no route to."""
    seen = _ip("-4", "address", "show") + _ip("-4", "route", "show")
    used = {int(number) for number in re.findall(r"\b10\.201\.(\d+)\.", seen)}
    # At random, so that two runs that start at the same time hardly choose the same.
    free = sorted(set(range(256)) - used)
    if not free:
        raise EnvironmentProblem("all networks 10.201.X.0/24 are in use")
    return f"10.201.{secrets.choice(free)}"


def _remove_orphans() -> None:
    """Remove what runs that were killed have left."""
    names = re.findall(r"\b((?:cvb|cv)(\d+)x[0-9a-f]{2}(?:-\d+)?)\b", _ip("-br", "link", "show"))
    for card, owner in names:
        if not Path(f"/proc/{owner}").exists():
            _remove_quietly("link", "delete", card)
    for name, owner in re.findall(r"(?m)^(convoy-(\d+)x\S+)", _ip("netns", "list")):
        if not Path(f"/proc/{owner}").exists():
            _remove_quietly("netns", "delete", name)


def _remove_quietly(*words: str) -> None:
    with contextlib.suppress(EnvironmentProblem):
        _ip(*words)


def _ip(*words: str) -> str:
    return _command("ip", *words)


def _tc(*words: str) -> str:
    return _command("tc", *words)


def _command(name: str, *words: str) -> str:
    """Run a command of iproute2 and return what it prints."""
    path = shutil.which(name)
    if path is None:
        raise EnvironmentProblem(
            f"the command '{name}' is missing",
            hint="Install the package iproute2, or run without emulated links.",
        )
    done = subprocess.run(  # noqa: S603 - our own words, and no shell
        [path, *words], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise EnvironmentProblem(
            f"links cannot be emulated here: '{name} {' '.join(words)}' failed",
            got=done.stderr.strip(),
        )
    return done.stdout
