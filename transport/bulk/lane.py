"""A lane: one more authenticated connection beside a control connection, handed over as a bare socket."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

from zbmd.transport.secure.session_keys import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A connection for bulk data, from its setup on. What is said on it is the data plane's own affair.

    Whoever takes it owns the socket and closes it. Nothing of the control connection ends with it, and it
    does not end with the control connection by itself.
    """

    session: Session
    """Its keys are for this connection alone; `session.lane` is its number."""
    sock: socket.socket
    """Connected and non-blocking, with the options of `tcp_socket.set_options`; an `ssl.SSLSocket` if the
    protection is TLS. No event loop watches it."""
    surplus: bytes
    """What the peer had said already behind its setup message; the socket goes on after it."""


OnLane = Callable[[Lane], None]
