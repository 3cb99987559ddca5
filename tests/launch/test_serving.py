"""Where a lead may listen, and how its address is read."""

import socket

import pytest

from convoy.errors import ConfigError
from convoy.launch.serving import make_serving, split_address


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost"])
@pytest.mark.parametrize("trusted", [True, False])
def test_loopback_needs_no_trust(host: str, trusted: bool) -> None:
    serving = make_serving(host, 29600, trusted_network=trusted)
    assert serving.host == socket.gethostbyname(host)
    assert (serving.port, serving.token) == (29600, "")  # the token comes once all is right
    assert serving.open_to_others
    assert serving.expect == 0


@pytest.mark.parametrize("host", ["192.0.2.1", "10.0.0.1", "8.8.8.8"])
def test_any_other_address_needs_a_trusted_network(host: str) -> None:
    with pytest.raises(ConfigError, match=r"unencrypted.*got .*--trusted-network"):
        make_serving(host, 0, trusted_network=False)
    assert make_serving(host, 0, trusted_network=True).host == host


def test_tls_alone_is_not_enough_where_tensors_travel_beside_it() -> None:
    with pytest.raises(ConfigError, match=r"even where the lead uses TLS.*--trusted-network"):
        make_serving("10.0.0.1", 0, trusted_network=False, tls=True)
    assert make_serving("10.0.0.1", 0, trusted_network=True, tls=True).host == "10.0.0.1"


def test_tls_is_enough_where_all_tensors_travel_in_it() -> None:
    serving = make_serving("10.0.0.1", 0, trusted_network=False, tls=True, private_tensors=True)
    assert serving.host == "10.0.0.1"
    assert serving.tls is None  # the certificate comes once all is right
    with pytest.raises(ConfigError, match=r"unencrypted.*Give --tls\. Give --trusted-network"):
        make_serving("10.0.0.1", 0, trusted_network=False, private_tensors=True)


@pytest.mark.parametrize("host", ["0.0.0.0", "", "0"])
@pytest.mark.parametrize("trusted", [True, False])
def test_no_lead_listens_everywhere(host: str, trusted: bool) -> None:
    with pytest.raises(ConfigError, match="one address, not on all of them"):
        make_serving(host, 0, trusted_network=trusted)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "300.1.1.1", "a b", "-"])
def test_a_host_that_is_not_known_is_named(host: str) -> None:
    with pytest.raises(ConfigError, match="this address is not known; got"):
        make_serving(host, 0, trusted_network=True)


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=r"'port' is out of range; got .*0 to 65535"):
        make_serving("127.0.0.1", port, trusted_network=False)


@pytest.mark.parametrize("port", [0, 1, 65535])
def test_the_ends_of_the_range_are_taken(port: int) -> None:
    assert make_serving("127.0.0.1", port, trusted_network=False).port == port


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:29600", ("127.0.0.1", 29600)),
        ("host.example:1", ("host.example", 1)),
        ("host:65535", ("host", 65535)),
        ("[::1]:80", ("[::1]", 80)),
    ],
)
def test_addresses_are_split_at_the_last_colon(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text) == expected


@pytest.mark.parametrize(
    "text", ["", ":", "host", "host:", ":1", "host:0", "host:65536", "host:x", "host:-1", "host:1 "]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not HOST:PORT; got"):
        split_address(text)
