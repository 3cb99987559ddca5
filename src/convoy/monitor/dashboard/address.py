"""Where the page is reached: loopback, or one address of this machine behind TLS."""

import errno
import ipaddress
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path

from convoy.errors import ConfigError, EnvironmentProblem

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8765
_PORTS_TRIED = 21  # the default one and those that follow it


@dataclass(frozen=True)
class Tls:
    """What a server shows who it is with.

    Attributes:
        certificate: a PEM file, with all that lead to the authority.
        key: its key, a PEM file.
    """

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Address:
    """A page's address.

    Attributes:
        host: as its user named it.
        ip: what that stands for.
        port: the port.
        is_encrypted: it is reached by https.
    """

    host: str
    ip: str
    port: int
    is_encrypted: bool = False

    @property
    def base(self) -> str:
        """Return the page's address as links begin with it."""
        return f"{self._scheme}://{_in_link(self.host)}:{self.port}"

    @property
    def hosts(self) -> frozenset[str]:
        """Return what a browser that means this page calls its host, with the port."""
        names = {"127.0.0.1", "localhost", "[::1]", _in_link(self.host), _in_link(self.ip)}
        names = {name.lower() for name in names}
        is_usual = self.port == (443 if self.is_encrypted else 80)  # then browsers leave it out
        return frozenset({f"{name}:{self.port}" for name in names} | (names if is_usual else set()))

    @property
    def origins(self) -> frozenset[str]:
        """Return what a browser calls the origin of this page's own requests."""
        return frozenset(f"{self._scheme}://{host}" for host in self.hosts)

    @property
    def _scheme(self) -> str:
        return "https" if self.is_encrypted else "http"


def resolve(host: str, *, tls: bool) -> str:
    """Return the address that a name stands for, or refuse one where anyone could listen in."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        address = ipaddress.ip_address(found[0][4][0])
    except (OSError, ValueError, UnicodeError):
        raise ConfigError("this address is not known", got=host) from None
    if address.is_unspecified:
        raise ConfigError(
            "the page is shown on one address, not on all of them",
            got=host,
            hint="Give the address by which browsers know this machine.",
        )
    if not address.is_loopback and not tls:
        raise ConfigError(
            "away from loopback the page needs TLS",
            got=host,
            hint="Give --certificate and --key-file. Or leave --host away, and on the machine with "
            f"the browser: ssh -L {DEFAULT_PORT}:127.0.0.1:{DEFAULT_PORT} THIS-MACHINE",
        )
    return str(address)


def read_tls(certificate: Path | None, key: Path | None) -> Tls | None:
    """Return what TLS needs, if it is asked for; files that do not serve are refused."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--certificate and --key-file are given together or not at all")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # With a password, however wrong, nobody is asked for one on the terminal.
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"this certificate and this key do not serve: {error}", got=f"{certificate}, {key}"
        ) from None
    return Tls(certificate, key)


def listen(ip: str, port: int | None) -> socket.socket:
    """Return a socket that listens; without a port, the first that is free from the usual on."""
    if port is not None and not 0 <= port <= 65535:
        raise ConfigError("'port' is out of range", got=port, allowed="0 to 65535")
    wanted = [port] if port is not None else range(DEFAULT_PORT, DEFAULT_PORT + _PORTS_TRIED)
    for number in wanted:
        listener = _try_to_listen(ip, number)
        if listener is not None:
            return listener
    tried = f"port {port} is" if port is not None else f"ports {wanted[0]} to {wanted[-1]} are"
    raise EnvironmentProblem(f"{tried} in use", hint="Give another --port.")


def _try_to_listen(ip: str, port: int) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    # A server that is started again gets its port back at once.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((ip, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise EnvironmentProblem(
            f"nothing can listen there: {error.strerror}", got=f"{_in_link(ip)}:{port}"
        ) from None
    return listener


def _in_link(host: str) -> str:
    return f"[{host}]" if ":" in host else host
