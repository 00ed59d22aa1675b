"""A rank that loses all of its TCP connections, for tests of what then happens."""

from __future__ import annotations

import os
import socket


def cut_connections() -> None:
    """Shut down every connected TCP socket of this process; listeners stay."""
    for name in os.listdir("/proc/self/fd"):
        try:
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with sock:
            if sock.family == socket.AF_INET and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                sock.shutdown(socket.SHUT_RDWR)
