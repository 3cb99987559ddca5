"""The certificate that a lead shows to nodes: made by itself, and the only one they accept.

Nodes do not ask who signed it, nor by which address they reach the lead. They hold a copy of it,
and whoever proves to have its key is the lead.
"""

import ipaddress
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from convoy.errors import ConfigError
from convoy.files import write_atomically
from convoy.outer.crew import LEAD_NAME, Tls

CERTIFICATE_FILE = "certificate.pem"
KEY_FILE = "key.pem"
_VALID = timedelta(days=30)
_CLOCKS_DIFFER = timedelta(days=1)  # at most, between the machines of a run
_TOO_SOON = timedelta(days=1)  # a certificate that ends within this is no use for a new run
_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, LEAD_NAME)])


def read_or_make_tls(folder: Path, host: str, now: datetime | None = None) -> Tls:
    """Return the certificate and the key in a folder; those that do not serve are made anew.

    Args:
        folder: where both files lie.
        host: the lead's address, or name, which the certificate has to tell.
        now: the time.
    """
    now = now or datetime.now(UTC)
    found = _read_own(folder)
    if found is not None and _serves(x509.load_pem_x509_certificate(found.certificate), host, now):
        return found
    made = _make(folder / CERTIFICATE_FILE, host, now)
    try:
        # In this order: a key alone is not known to be ours, and would never be overwritten.
        write_atomically(folder / CERTIFICATE_FILE, made.certificate.decode(), mode=0o644)
        write_atomically(folder / KEY_FILE, made.key.decode(), mode=0o600)
    except OSError as error:
        raise ConfigError(f"the certificate cannot be written: {error}", got=str(folder)) from None
    return made


def read_certificate(path: Path, now: datetime | None = None) -> bytes:
    """Return a copy of a lead's certificate, as a node needs it: PEM, and nothing else."""
    certificate = _parse(_read(path))
    if certificate is None:
        raise ConfigError(
            "the file holds no certificate",
            got=str(path),
            allowed=f"a copy of the lead's {CERTIFICATE_FILE}",
        )
    if certificate.not_valid_after_utc < (now or datetime.now(UTC)):
        raise ConfigError(
            f"the certificate was valid until {certificate.not_valid_after_utc:%Y-%m-%d}",
            got=str(path),
            hint=f"Start the lead again, and copy its {CERTIFICATE_FILE} anew.",
        )
    return certificate.public_bytes(Encoding.PEM)


# ---------------------------------------------------------------- making


def _make(path: Path, host: str, now: datetime) -> Tls:
    key = ec.generate_private_key(ec.SECP256R1())
    names = {x509.DNSName(LEAD_NAME), *_names_of("localhost"), *_names_of("127.0.0.1")}
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_NAME)
        .issuer_name(_NAME)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_DIFFER)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName([*names, *_names_of(host) - names]), False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return Tls(
        certificate=certificate.public_bytes(Encoding.PEM),
        key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        path=path,
    )


def _names_of(host: str) -> set[x509.GeneralName]:
    """Return a host's name or address as a certificate tells it."""
    try:
        return {x509.IPAddress(ipaddress.ip_address(host))}
    except ValueError:
        return {x509.DNSName(host.encode("idna").decode())}


# ---------------------------------------------------------------- reading


def _read_own(folder: Path) -> Tls | None:
    """Return what a lead wrote here before; None where both may be written.

    Files of these names that another program made are not ours to overwrite.
    """
    path, key_path = folder / CERTIFICATE_FILE, folder / KEY_FILE
    if not path.exists() and not key_path.exists():
        return None
    if not path.exists():
        raise _foreign(key_path)
    certificate = _parse(_read(path))
    if certificate is None or not _is_own(certificate):
        raise _foreign(path)
    if not key_path.exists():
        return None
    if key_path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            "others may read the certificate's key",
            got=str(key_path),
            hint="Remove it, and a new one is made.",
        )
    key = _read(key_path)
    if not _belongs(key, certificate):
        return None
    return Tls(certificate=certificate.public_bytes(Encoding.PEM), key=key, path=path)


def _foreign(path: Path) -> ConfigError:
    return ConfigError(
        "this file is not one that a lead made, so it is not overwritten",
        got=str(path),
        hint="Move it away, or give a --token-file in another folder.",
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the certificate cannot be read: {error}", got=str(path)) from None


def _parse(pem: bytes) -> x509.Certificate | None:
    try:
        return x509.load_pem_x509_certificate(pem)
    except ValueError:
        return None


def _belongs(key: bytes, certificate: x509.Certificate) -> bool:
    """Tell whether this is a certificate's key: killed half-way, a lead leaves two that differ."""
    try:
        public = load_pem_private_key(key, password=None).public_key()
    except (ValueError, TypeError):
        return False
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return public.public_bytes(*form) == certificate.public_key().public_bytes(*form)


def _is_own(certificate: x509.Certificate) -> bool:
    of_us = certificate.subject == certificate.issuer == _NAME
    return of_us and x509.DNSName(LEAD_NAME) in _names_in(certificate)


def _serves(certificate: x509.Certificate, host: str, now: datetime) -> bool:
    in_time = certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc - _TOO_SOON
    return in_time and _names_of(host) <= _names_in(certificate)


def _names_in(certificate: x509.Certificate) -> set[x509.GeneralName]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension):
        return set()
    return set(names.value)
