"""The abilities of this machine's network."""

from __future__ import annotations

import functools
import socket


@functools.cache
def has_ipv6() -> bool:
    """Whether ::1 can be listened on."""
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True
