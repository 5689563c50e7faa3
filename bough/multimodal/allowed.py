"""Who may be asked for media: names the operator listed, at addresses that are public or that the operator listed.

A name is checked before it is looked up, an address before it is connected to, and the address that was checked is the one
that is connected to.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from bough.core.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*")

_NEVER: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "169.254.0.0/16",  # link-local, and the metadata services of most clouds
        "100.100.100.200/32",  # metadata
        "168.63.129.16/32",  # metadata
        "224.0.0.0/4",
        "240.0.0.0/4",
        "::/128",
        "fe80::/10",
        "fd00:ec2::254/128",  # metadata
        "fd20:ce::254/128",  # metadata
        "ff00::/8",
    )
)
"""Addresses that no list opens."""

_UNICAST = ipaddress.IPv6Network("2000::/3")
"""All that is handed out to the public Internet so far."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class AllowList:
    """What `--allowed-media-domains` says."""

    everyone: bool
    names: frozenset[str]
    suffixes: tuple[str, ...]
    """Each begins with a dot."""
    networks: tuple[Network, ...]

    @classmethod
    def of(cls, entries: Iterable[str]) -> AllowList:
        """From `example.com`, `*.example.com`, an address, a network (10.1.0.0/16) or `*`. Raises `ConfigError`."""
        everyone, names, suffixes, networks = False, set(), [], []
        for entry in entries:
            text = entry.strip().lower().rstrip(".")
            bare = text.removeprefix("*").removeprefix(".")
            network = _network(text)
            if text == "*":
                everyone = True
            elif network is not None:
                if any(never.version == network.version and never.overlaps(network) for never in _NEVER):
                    raise _bad_entry(entry, "no list opens link-local, multicast and metadata addresses")
                networks.append(network)
            elif not _NAME.fullmatch(bare):
                raise _bad_entry(entry, "it is no domain, no address and no network")
            elif text == bare:
                names.add(text)
            else:
                suffixes.append("." + bare)
        return cls(everyone, frozenset(names), tuple(suffixes), tuple(networks))

    @property
    def empty(self) -> bool:
        return not (self.everyone or self.names or self.suffixes or self.networks)

    def has_name(self, host: str) -> bool:
        """Whether `host`, as a URL says it, may be asked at all. Looks nothing up."""
        literal = _address(host)
        if literal is not None:
            return self.everyone or any(literal in network for network in self.networks)
        return self.everyone or host in self.names or host.endswith(self.suffixes)

    def has_address(self, text: str) -> bool:
        """Whether this address may be connected to: a public one, or one in a listed network."""
        address = _address(text)
        if address is None:
            return False
        found = [address, *_inside(address)]
        if any(each in never for each in found for never in _NEVER):
            return False
        if any(address in network for network in self.networks):
            return True
        return all(map(_is_public, found))


def _is_public(address: Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and address not in _UNICAST:
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _inside(address: Address) -> list[Address]:
    """IPv4 addresses that an IPv6 one stands for."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found: list[Address | None] = [address.ipv4_mapped, address.sixtofour]
    if address.teredo is not None:
        found += address.teredo
    if address in _NAT64 or int(address) >> 32 == 0:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [each for each in found if each is not None]


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _bad_entry(entry: str, why: str) -> ConfigError:
    return ConfigError(
        what=f"{entry!r} can't be among the allowed media domains",
        why=why,
        fix="list domains (example.com, *.example.com), addresses, networks (10.1.0.0/16), or * for every public host",
        param="allowed_media_domains",
    )
