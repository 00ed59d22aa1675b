"""Addresses of TCP links as users write them: `host:port`, `10.0.0.1:port`, `[fe80::1%eth0]:port`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Any, Final

from zbmd.transport.errors import UserError

PORT_MAX: Final = 65_535
HOST_CHARS_MAX: Final = 253

_TEXT: Final = re.compile(r"(?:\[(?P<v6>[^\[\]]*)\]|(?P<host>[^:\[\]]*)):(?P<port>\d{1,5})")


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpAddress:
    """A host, by name or number, and a port. To listen: an empty host is every address, port 0 any port."""

    host: str
    port: int

    def __str__(self) -> str:
        """As it is written; `parse_address` reads it back."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_numeric(self) -> bool:
        """Whether no resolver is needed."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True


def parse_address(text: str) -> TcpAddress:
    """Raises `UserError` on anything that is no address."""
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        hint = " An IPv6 address stands in brackets." if text.count(":") > 1 and "[" not in text else ""
        raise UserError(
            f"{text!r} is not an address. Write host:port, such as node1:29400 or [::1]:29400.{hint}"
        )
    v6, host, port = match["v6"], match["host"], int(match["port"])
    if port > PORT_MAX:
        raise UserError(f"{text!r} has a port over {PORT_MAX}.")
    if v6 is not None:
        try:
            ipaddress.IPv6Address(v6)
        except ValueError:
            raise UserError(f"{v6!r} in {text!r} is not an IPv6 address.") from None
        return TcpAddress(host=v6, port=port)
    if len(host) > HOST_CHARS_MAX:
        raise UserError(f"a host name of {len(host)} characters; {HOST_CHARS_MAX} is the bound.")
    return TcpAddress(host="" if host == "*" else host, port=port)


def numeric(sockaddr: tuple[Any, ...]) -> TcpAddress:
    """A socket's address, as the kernel has it."""
    return TcpAddress(host=str(sockaddr[0]), port=int(sockaddr[1]))


def source_of(host: str) -> str:
    """What connections from this numeric host count as together: an IPv4 address, or an IPv6 /64.

    Whoever holds one IPv6 address commonly holds the other 2**64 of its network.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.IPv6Network((address, 64), strict=False))
        address = address.ipv4_mapped
    return str(address)
