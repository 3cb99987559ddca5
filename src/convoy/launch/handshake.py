"""Why a lead that is there cannot be spoken to: TLS on one side only, or another certificate.

gRPC tells of these as of any lost connection, in words that change with its releases. A node that
would try again for minutes had better be told at once what to do.
"""

import socket
import ssl

from convoy.launch.serving import split_address

_LIMIT_S = 1.0


def explain(address: str, certificate: bytes | None) -> str | None:
    """Return what is wrong with how a node speaks to an address; None where nothing is known.

    Args:
        address: "host:port".
        certificate: what the node expects there; None where it does not use TLS.
    """
    try:
        shown = _shown_certificate(address)
    except (OSError, ValueError):
        return None  # nobody is there, or nobody who answers
    if certificate is None:
        wanted = "uses TLS. Give --certificate with a copy of its certificate.pem"
        return wanted if shown is not None else None
    if shown is None:
        return "does not use TLS, and nothing was said to it. Start it with --tls"
    if shown != ssl.PEM_cert_to_DER_cert(certificate.decode()):
        return "shows another certificate than the one given. Copy its certificate.pem anew"
    return None


def _shown_certificate(address: str) -> bytes | None:
    """Return the certificate that is shown at an address; None where no TLS is spoken.

    Raises:
        OSError: nothing was said there.
    """
    host, port = split_address(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # only to compare it: nothing is sent over this
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((host.strip("[]"), port), timeout=_LIMIT_S) as plain:
        try:
            with context.wrap_socket(plain) as secure:
                return secure.getpeercert(binary_form=True)
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise
        except ssl.SSLError:
            return None
