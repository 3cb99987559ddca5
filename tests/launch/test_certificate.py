"""Certificates: made by the lead, kept as long as they serve, never in place of others' files."""

import ipaddress
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from convoy.errors import ConfigError
from convoy.launch.certificate import (
    CERTIFICATE_FILE,
    KEY_FILE,
    read_certificate,
    read_or_make_tls,
)
from convoy.outer.crew import Serving, Tls

NOW = datetime.now(UTC)


def load(tls: Tls) -> x509.Certificate:
    return x509.load_pem_x509_certificate(tls.certificate)


def names(tls: Tls) -> x509.SubjectAlternativeName:
    return load(tls).extensions.get_extension_for_class(x509.SubjectAlternativeName).value


@contextmanager
def umask(mask: int) -> Iterator[None]:
    former = os.umask(mask)
    try:
        yield
    finally:
        os.umask(former)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_the_key_is_for_its_owner_and_the_certificate_for_all(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        tls = read_or_make_tls(tmp_path, "127.0.0.1")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {CERTIFICATE_FILE: 0o644, KEY_FILE: 0o600}
    assert tls.path == tmp_path / CERTIFICATE_FILE
    assert tls.path.read_bytes() == tls.certificate
    assert (tmp_path / KEY_FILE).read_bytes() == tls.key


def test_a_certificate_is_of_p256_and_for_thirty_days(tmp_path: Path) -> None:
    certificate = load(read_or_make_tls(tmp_path, "127.0.0.1", NOW))
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert isinstance(key.curve, ec.SECP256R1)
    left = certificate.not_valid_after_utc - NOW
    assert timedelta(days=29, hours=23) < left <= timedelta(days=30)
    assert certificate.not_valid_before_utc < NOW - timedelta(hours=1)  # clocks differ
    certificate.verify_directly_issued_by(certificate)


def test_it_names_the_host_and_loopback_and_what_nodes_call_every_lead(tmp_path: Path) -> None:
    by_address = names(read_or_make_tls(tmp_path, "192.0.2.7"))
    assert set(by_address.get_values_for_type(x509.DNSName)) == {"convoy", "localhost"}
    assert set(by_address.get_values_for_type(x509.IPAddress)) == {
        ipaddress.ip_address("127.0.0.1"),
        ipaddress.ip_address("192.0.2.7"),
    }
    by_name = names(read_or_make_tls(tmp_path, "bücher.example"))
    found = set(by_name.get_values_for_type(x509.DNSName))
    assert found == {"convoy", "localhost", "xn--bcher-kva.example"}


@pytest.mark.parametrize("host", ["192.0.2.7", "lead.example", "127.0.0.1", "localhost"])
def test_it_is_kept_as_long_as_it_serves(tmp_path: Path, host: str) -> None:
    made = read_or_make_tls(tmp_path, host, NOW)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert read_or_make_tls(tmp_path, host, NOW + timedelta(days=28)) == made
    assert read_or_make_tls(tmp_path, "127.0.0.1", NOW) == made
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("days", [-2, 29.5, 31])
def test_one_that_has_expired_or_soon_will_is_made_anew(tmp_path: Path, days: float) -> None:
    made = read_or_make_tls(tmp_path, "127.0.0.1", NOW)
    then = NOW + timedelta(days=days)
    anew = read_or_make_tls(tmp_path, "127.0.0.1", then)
    assert anew.certificate != made.certificate
    assert anew.key != made.key
    assert read_or_make_tls(tmp_path, "127.0.0.1", then) == anew


def test_one_of_another_host_is_made_anew(tmp_path: Path) -> None:
    made = read_or_make_tls(tmp_path, "192.0.2.7")
    anew = read_or_make_tls(tmp_path, "192.0.2.8")
    assert anew.certificate != made.certificate
    assert read_or_make_tls(tmp_path, "192.0.2.8") == anew


def test_a_half_written_pair_is_made_anew(tmp_path: Path) -> None:
    first = read_or_make_tls(tmp_path, "127.0.0.1")
    (tmp_path / KEY_FILE).unlink()
    second = read_or_make_tls(tmp_path, "127.0.0.1")
    assert second.key != first.key
    for key in (first.key, b"nonsense"):  # another's key, and none
        (tmp_path / KEY_FILE).write_bytes(key)
        anew = read_or_make_tls(tmp_path, "127.0.0.1")
        assert anew.key not in (first.key, second.key)
        assert read_or_make_tls(tmp_path, "127.0.0.1") == anew


def test_files_of_others_are_not_overwritten(tmp_path: Path) -> None:
    key, certificate = tmp_path / KEY_FILE, tmp_path / CERTIFICATE_FILE
    key.write_text("of my web server")
    with pytest.raises(ConfigError, match=r"not one that a lead made.*key\.pem.*Move it away"):
        read_or_make_tls(tmp_path, "127.0.0.1")
    certificate.write_text("of my web server")
    with pytest.raises(ConfigError, match=r"not one that a lead made.*certificate\.pem"):
        read_or_make_tls(tmp_path, "127.0.0.1")
    assert key.read_text() == certificate.read_text() == "of my web server"


def test_another_programs_certificate_is_not_overwritten(tmp_path: Path) -> None:
    made = read_or_make_tls(tmp_path, "127.0.0.1")
    pem = foreign_certificate()
    (tmp_path / CERTIFICATE_FILE).write_bytes(pem)
    with pytest.raises(ConfigError, match="not one that a lead made"):
        read_or_make_tls(tmp_path, "127.0.0.1")
    assert (tmp_path / CERTIFICATE_FILE).read_bytes() == pem
    assert (tmp_path / KEY_FILE).read_bytes() == made.key


def foreign_certificate() -> bytes:
    """Return one with our name, but without what we write into it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "convoy")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).serial_number(1)
    builder = builder.not_valid_before(NOW).not_valid_after(NOW + timedelta(days=9))
    return (
        builder.public_key(key.public_key()).sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    )


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_a_key_that_others_could_read_is_refused(tmp_path: Path, mode: int) -> None:
    read_or_make_tls(tmp_path, "127.0.0.1")
    (tmp_path / KEY_FILE).chmod(mode)
    with pytest.raises(ConfigError, match=r"others may read the certificate's key.*key\.pem"):
        read_or_make_tls(tmp_path, "127.0.0.1")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"certificate cannot be written: .*; got .*none"):
        read_or_make_tls(tmp_path / "none", "127.0.0.1")
    (tmp_path / CERTIFICATE_FILE).mkdir()
    with pytest.raises(ConfigError, match="certificate cannot be read"):
        read_or_make_tls(tmp_path, "127.0.0.1")


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / CERTIFICATE_FILE).symlink_to(tmp_path / "elsewhere")
    read_or_make_tls(tmp_path / "a", "127.0.0.1")
    assert not (tmp_path / "elsewhere").exists()


def test_the_key_is_in_no_message() -> None:
    serving = Serving(token="", tls=Tls(b"certificate", b"the key"))
    assert "the key" not in repr(serving)


# ---------------------------------------------------------------- a node's copy


def test_a_copy_is_read_without_a_key_that_may_be_in_it(tmp_path: Path) -> None:
    tls = read_or_make_tls(tmp_path, "127.0.0.1")
    copy = tmp_path / "copy"
    copy.write_bytes(tls.key + tls.certificate)
    assert read_certificate(copy) == read_certificate(tmp_path / CERTIFICATE_FILE)
    assert read_certificate(copy) == tls.certificate


def test_what_is_no_certificate_is_refused(tmp_path: Path) -> None:
    read_or_make_tls(tmp_path, "127.0.0.1")
    for path in (tmp_path / KEY_FILE, tmp_path / "text"):
        (tmp_path / "text").write_text("-----BEGIN CERTIFICATE-----\nno\n")
        with pytest.raises(
            ConfigError, match=r"holds no certificate; got .*lead's certificate\.pem"
        ):
            read_certificate(path)
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match="certificate cannot be read"):
            read_certificate(path)


def test_a_copy_that_has_expired_is_refused(tmp_path: Path) -> None:
    read_or_make_tls(tmp_path, "127.0.0.1", NOW)
    path = tmp_path / CERTIFICATE_FILE
    read_certificate(path, NOW + timedelta(days=29))
    with pytest.raises(ConfigError, match=r"was valid until \d{4}-\d\d-\d\d; got .*copy .* anew"):
        read_certificate(path, NOW + timedelta(days=31))
