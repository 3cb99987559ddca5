"""Where a page may be shown, and on which port."""

import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

from convoy.errors import ConfigError, EnvironmentProblem
from convoy.monitor.dashboard import address as module
from convoy.monitor.dashboard.address import Address, listen, read_tls, resolve


def make_certificate(folder: Path, password: bytes | None = None) -> tuple[Path, Path]:
    """Make a certificate for this machine, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    locked = BestAvailableEncryption(password) if password else NoEncryption()
    (folder / "c.pem").write_bytes(made.public_bytes(Encoding.PEM))
    (folder / "k.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
    return folder / "c.pem", folder / "k.pem"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_needs_no_tls(host: str) -> None:
    assert resolve(host, tls=False) == host


@pytest.mark.parametrize("host", ["10.1.2.3", "192.0.2.1", "2001:db8::1", "8.8.8.8"])
def test_away_from_loopback_tls_is_needed(host: str) -> None:
    with pytest.raises(ConfigError, match=r"needs TLS; got .* --certificate .* ssh -L 8765:"):
        resolve(host, tls=False)
    assert resolve(host, tls=True) == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_all_addresses_at_once_are_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="one address, not on all"):
        resolve(host, tls=True)


@pytest.mark.parametrize("host", ["no such host", "a" * 300, "..", "x.invalid"])
def test_an_unknown_name_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="not known"):
        resolve(host, tls=True)


def test_a_taken_port_is_an_error_where_it_was_asked_for() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EnvironmentProblem, match=rf"port {port} is in use.*--port"):
            listen("127.0.0.1", port)


def test_without_a_port_the_next_free_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1", 0) as taken:
        first = taken.getsockname()[1]
        monkeypatch.setattr(module, "DEFAULT_PORT", first)
        with listen("127.0.0.1", None) as found:
            assert first < found.getsockname()[1] <= first + 20
        monkeypatch.setattr(module, "_PORTS_TRIED", 1)
        with pytest.raises(EnvironmentProblem, match="are in use"):
            listen("127.0.0.1", None)


def test_a_port_is_free_again_at_once() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()  # the server's end closes first, and lingers
    listen("127.0.0.1", port).close()


@pytest.mark.parametrize("port", [-1, 65536, 10**9])
def test_what_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match="out of range"):
        listen("127.0.0.1", port)


def test_an_address_of_another_machine_is_an_error() -> None:
    with pytest.raises(EnvironmentProblem, match="nothing can listen there"):
        listen("192.0.2.1", 0)


def test_an_address_of_version_six_stands_in_brackets() -> None:
    address = Address("::1", "::1", 8765)
    assert address.base == "http://[::1]:8765"
    assert "[::1]:8765" in address.hosts
    assert "https://[::1]:8765" in Address("::1", "::1", 8765, is_encrypted=True).origins


def test_tls_needs_both_files(tmp_path: Path) -> None:
    assert read_tls(None, None) is None
    for one, other in ((tmp_path, None), (None, tmp_path)):
        with pytest.raises(ConfigError, match="together or not at all"):
            read_tls(one, other)


def test_tls_needs_files_that_serve(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    assert read_tls(certificate, key) is not None
    for one, other in ((key, certificate), (tmp_path / "no", key), (certificate, tmp_path)):
        with pytest.raises(ConfigError, match="do not serve"):
            read_tls(one, other)


def test_a_locked_key_is_refused_rather_than_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="do not serve"):
        read_tls(*make_certificate(tmp_path, password=b"secret"))


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))
