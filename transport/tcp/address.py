"""Addresses of TCP links as users write them: `host:port`, `10.0.0.1:port`, `[fe80::1%eth0]:port`."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from zbmd.transport.errors import UserError
from zbmd.transport.host.link_choice import INTERFACES_VARIABLE, InterfaceFilter, parse_interface_filter
from zbmd.transport.secure.protection import Protection
from zbmd.transport.secure.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, Tls, tls_files

# How this process uses TCP: protection, certificates, interfaces; from ZBMD_* or given.

PROTECTION_VARIABLE: Final = "ZBMD_PROTECTION"


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpSettings:
    """Raises `UserError` if TLS is asked for without certificates."""

    protection: Protection = Protection.MAC
    tls: Tls | None = None
    interfaces: InterfaceFilter = field(default_factory=InterfaceFilter)
    """Those that are listened on, where no host is named, and dialed from."""

    def __post_init__(self) -> None:
        if self.protection is Protection.TLS and self.tls is None:
            raise UserError(
                f"{PROTECTION_VARIABLE}=tls needs {CERT_VARIABLE}, {KEY_VARIABLE} and {CA_VARIABLE}."
            )


def tcp_settings(environ: Mapping[str, str] = os.environ) -> TcpSettings:
    """Read the settings from the environment. With certificates, TLS is the default. Raises `UserError`."""
    files = tls_files(environ)
    text = environ.get(PROTECTION_VARIABLE) or ("mac" if files is None else "tls")
    try:
        protection = Protection(text.lower())
    except ValueError:
        known = ", ".join(each.value for each in Protection)
        raise UserError(f"{PROTECTION_VARIABLE}={text!r} is none of {known}.") from None
    interfaces = environ.get(INTERFACES_VARIABLE)
    return TcpSettings(
        protection=protection,
        tls=Tls(files) if files is not None and protection is Protection.TLS else None,
        interfaces=parse_interface_filter(interfaces) if interfaces else InterfaceFilter(),
    )


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
    """Return the source under which connections from this host count: an IPv4 address, or an IPv6 /64.

    The holder of one IPv6 address commonly holds the other 2**64 of its network.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.IPv6Network((address, 64), strict=False))
        address = address.ipv4_mapped
    return str(address)
