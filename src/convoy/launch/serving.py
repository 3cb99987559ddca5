"""Where a lead may listen: loopback, or one address of a network that its user trusts."""

import ipaddress
import socket

from convoy.errors import ConfigError
from convoy.outer.crew import Serving


def make_serving(
    host: str,
    port: int,
    *,
    trusted_network: bool,
    tls: bool = False,
    private_tensors: bool = False,
) -> Serving:
    """Return how a lead is reached, or refuse what would be unsafe.

    The token and the certificate are not there yet: files are made once all is right.

    Args:
        host: the address to listen on, or its name.
        port: the port to listen on.
        trusted_network: everybody who could reach the address is trusted.
        tls: the lead's own calls will be encrypted.
        private_tensors: all tensors travel in the lead's own calls.
    """
    address = _resolve(host)
    if address.is_unspecified:
        raise ConfigError(
            "a lead listens on one address, not on all of them",
            got=host,
            hint="Give the address by which the other machines know this one.",
        )
    if not (address.is_loopback or trusted_network or (tls and private_tensors)):
        raise _unsafe(host, tls=tls, private_tensors=private_tensors)
    if not 0 <= port <= 65535:
        raise ConfigError("'port' is out of range", got=port, allowed="0 to 65535")
    return Serving(token="", host=str(address), port=port, open_to_others=True)


def _unsafe(host: str, *, tls: bool, private_tensors: bool) -> ConfigError:
    what = "gradients travel unencrypted"
    hint = "Give --trusted-network if everybody on that network may be trusted."
    if private_tensors:
        hint = f"Give --tls. {hint}"
    elif tls:
        what += " from node to node, even where the lead uses TLS"
    return ConfigError(
        f"{what}, so a lead leaves loopback on a private network only", got=host, hint=hint
    )


def split_address(text: str) -> tuple[str, int]:
    """Read "host:port"."""
    host, colon, port = text.rpartition(":")
    number = int(port) if port.isascii() and port.isdigit() and len(port) <= 5 else 0
    if not colon or not host or not 0 < number < 65536:
        raise ConfigError("the lead's address is not HOST:PORT", got=text)
    return host, number


def _resolve(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host))
    except (OSError, ValueError):
        raise ConfigError("this address is not known", got=host) from None
