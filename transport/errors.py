"""Typed errors. Each says what happened and what to do; each keeps what a handler needs as attributes."""

from __future__ import annotations


class ZbmdError(Exception):
    """The root of every error raised by zbmd."""


class UserError(ZbmdError):
    """A mistake in an argument, file or setting: one paragraph that says what to do, no traceback shown."""


class ProtocolError(ZbmdError):
    """A protocol was broken. `story` holds the last events before it, oldest first."""

    def __init__(self, message: str, *, story: tuple[str, ...] = ()) -> None:
        super().__init__(message if not story else f"{message}; before it: {' -> '.join(story)}")
        self.story = story


class LocalProtocolError(ProtocolError):
    """Our side misused a machine: a bug in this process."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the protocol: its connection is ended, nothing else."""


class PeerLost(ZbmdError):
    """A peer process ended or was cut off."""

    def __init__(self, peer: int | str, reason: str) -> None:
        super().__init__(f"peer {peer} lost: {reason}")
        self.peer = peer
        self.reason = reason


class LinkClosed(ZbmdError):
    """The link is closed; nothing more can be sent on it."""


class LinkFull(ZbmdError):
    """The link's bounded send queue is full; await `Link.writable()` and send again."""


class DeadlineExceeded(ZbmdError):
    """An operation did not finish in the time its caller gave. `absent`: waited for in vain."""

    def __init__(self, message: str, *, absent: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.absent = absent


class OutOfDescriptors(ZbmdError):
    """This process or machine has no file descriptors left; what it holds lives on."""


class OutOfMemory(ZbmdError):
    """A segment or arena does not fit into this machine's or cgroup's memory."""

    def __init__(self, message: str, *, asked_bytes: int = 0, available_bytes: int = 0) -> None:
        super().__init__(message)
        self.asked_bytes = asked_bytes
        self.available_bytes = available_bytes


class ArenaFull(OutOfMemory):
    """The arena has no hole large enough for an array."""
