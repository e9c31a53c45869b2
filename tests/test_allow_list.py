"""Allow-lists: what an entry may be, and which addresses it lets through."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcourier.allow_list import parse_allow_list
from kvcourier.errors import ConfigError


def allows(entries, host, port=5600):
    return parse_allow_list(entries, "--allow-peer").allows(host, port)


@pytest.mark.parametrize(
    ("entry", "host", "port"),
    [
        ("p1", "p1", 1),
        ("P1.Internal", "p1.internal", 5600),
        ("p1:5600", "P1", 5600),
        ("10.1.2.3", "10.1.2.3", 9),
        ("10.1.2.3:5600", "10.1.2.3", 5600),
        ("10.1.2.3", "::ffff:10.1.2.3", 9),
        ("fd00::1", "fd00:0:0::1", 9),
        ("[fd00::1]:5600", "FD00::1", 5600),
        ("[fd00::1]", "fd00::1", 9),
        ("10.1.0.0/16", "10.1.255.255", 9),
        ("10.1.0.0/16", "::ffff:10.1.0.1", 9),
        ("fd00::/8", "fd12::1", 9),
    ],
)
def test_what_an_entry_lets_through(entry, host, port):
    assert allows(["other", entry], host, port)


@pytest.mark.parametrize(
    ("entry", "host", "port"),
    [
        ("p1", "p10", 5600),
        ("p1", "p1.", 5600),
        ("p1:5600", "p1", 5601),
        ("localhost", "127.0.0.1", 5600),
        ("127.0.0.1", "localhost", 5600),
        ("[fd00::1]:5600", "fd00::1", 5601),
        ("10.1.0.0/16", "10.2.0.0", 5600),
        # What a resolver or a C library might take for an address in the network.
        ("10.0.0.0/8", "10.1", 5600),
        ("10.0.0.0/8", "167772161", 5600),
        ("10.0.0.0/8", "0x0a000001", 5600),
        ("10.0.0.0/8", "010.0.0.1", 5600),
        ("10.0.0.0/8", "10.0.0.1 ", 5600),
        ("10.0.0.0/8", "10.0.0.1:80", 5600),
        ("10.0.0.0/8", "10.0.0.1\x00.evil", 5600),
        ("10.0.0.0/8", "10.0.0.1.nip.example", 5600),
        ("10.0.0.0/8", "", 5600),
    ],
)
def test_what_it_does_not(entry, host, port):
    assert not allows([entry], host, port)


def test_an_empty_list_lets_nobody_through():
    assert not allows([], "p1")


@pytest.mark.parametrize(
    "entry",
    [
        *("", " p1", "p1:", "p1:0", "p1:65536", "p1:x", "a:b:c", "http://p1", "p1/24"),
        *("[p1]:5600", "[fd00::1", "[fd00::1]:", "10.1.2.3/16", "10.0.0.0/33", "10.0.0.0/8:5600"),
    ],
)
def test_what_is_no_entry_is_refused_by_name(entry):
    with pytest.raises(ConfigError, match=r"^--allow-peer: expected HOST, .* found"):
        parse_allow_list([entry], "--allow-peer")


@given(st.ip_addresses(), st.ip_addresses(), st.integers(0, 32))
def test_a_network_lets_through_exactly_the_addresses_in_it(inside, other, bits):
    network = ipaddress.ip_network((inside, bits), strict=False)
    assert allows([str(network)], str(inside)) or getattr(inside, "ipv4_mapped", None)
    plain = getattr(other, "ipv4_mapped", None) or other
    assert allows([str(network)], str(other)) == (plain in network)


@given(st.text(), st.integers(-1, 70000))
def test_any_text_from_the_network_is_only_compared(host, port):
    listed = parse_allow_list(["10.0.0.0/8", "p1:5600"], "--allow-peer")
    assert listed.allows(host, port) in (True, False)
