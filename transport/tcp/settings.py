"""How this process uses TCP: protection, certificates, interfaces; from ZBMD_* or given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from zbmd.transport.errors import UserError
from zbmd.transport.host.link_choice import INTERFACES_VARIABLE, InterfaceFilter, parse_interface_filter
from zbmd.transport.secure.session_keys import Protection
from zbmd.transport.secure.tls import CA_VARIABLE, CERT_VARIABLE, KEY_VARIABLE, Tls, tls_files

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
    """What the environment says. With certificates, TLS is the default. Raises `UserError`."""
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
