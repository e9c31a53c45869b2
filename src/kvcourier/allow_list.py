"""Whom an instance may have to do with.

Decides the form of an allow-list's entries and what they match. Refuses to resolve names: that
would take time in a courier, and its answer may be another one a moment later. So a name matches
only itself, as text, and a network only literal IP addresses.
"""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvcourier.errors import ConfigError

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network
Host = IpAddress | str
_FORMS = "HOST, HOST:PORT, [IPV6]:PORT or a network like 10.1.0.0/16"
_ENTRY = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[^\s:/\[\]]+))(?::(?P<port>\d{1,5}))?")


@dataclass(frozen=True, slots=True)
class AllowList:
    """Addresses of instances; nothing else is allowed.

    Attributes:
        hosts: (host, port); None for every port.
        networks: every host and port in them, where the host is a literal IP address.
    """

    hosts: frozenset[tuple[Host, int | None]]
    networks: tuple[IpNetwork, ...] = ()

    def allows(self, host: str, port: int) -> bool:
        """Whether an instance may be connected to whose handshake server listens there."""
        known = _host(host)
        if not self.hosts.isdisjoint({(known, None), (known, port)}):
            return True
        return not isinstance(known, str) and any(known in each for each in self.networks)


def parse_allow_list(entries: Iterable[str], setting: str) -> AllowList:
    """Read an allow-list.

    Args:
        entries: each a HOST, HOST:PORT, [IPV6]:PORT or NETWORK/BITS.
        setting: its name, for messages.

    Raises:
        ConfigError: an entry is none of these.
    """
    hosts: set[tuple[Host, int | None]] = set()
    networks: list[IpNetwork] = []
    for entry in entries:
        if "/" in entry:
            networks.append(_network(entry, setting))
        else:
            hosts.add(_place(entry, setting))
    return AllowList(frozenset(hosts), tuple(networks))


def _network(entry: str, setting: str) -> IpNetwork:
    try:
        return ipaddress.ip_network(entry)
    except ValueError as error:
        raise ConfigError(f"{setting}: expected {_FORMS}, found {entry!r}: {error}") from None


def _place(entry: str, setting: str) -> tuple[Host, int | None]:
    host = _host(entry)
    if not isinstance(host, str):
        return host, None
    match = _ENTRY.fullmatch(entry)
    wrong_address = match and match["v6"] and isinstance(_host(match["v6"]), str)
    if match is None or wrong_address or not 1 <= int(match["port"] or 1) <= 65535:
        raise ConfigError(f"{setting}: expected {_FORMS}, found {entry!r}")
    return _host(match["v6"] or match["host"]), int(match["port"]) if match["port"] else None


def _host(text: str) -> Host:
    """An IP address, however it is written, or else the text without regard to case."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text.lower()
    # The same machine, for a socket of either family.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
