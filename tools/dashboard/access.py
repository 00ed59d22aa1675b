"""Access to the dashboard: for this machine on loopback, elsewhere for requests with a token."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from typing import Final
from urllib.parse import urlsplit

TOKEN_BYTES: Final = 16


def token_of(cookie: bytes) -> str:
    """Return the token that a page on another host needs, from the cookie of the cluster."""
    return hmac.new(cookie, b"zbmd dashboard", hashlib.sha256).hexdigest()[: 2 * TOKEN_BYTES]


def is_local(host: str) -> bool:
    """Whether HOST or HOST:PORT means this machine alone: a foreign name may have been pointed here."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def shown_address(host: str, port: int, token: str) -> str:
    """Return the address to open."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
