"""Bounds of mailboxes, and the way back of replies. The mailbox itself is `native/_mailbox`."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Protocol

from zbmd.actors.errors import ActorError
from zbmd.transport.errors import LocalProtocolError

MAILBOX_MESSAGES = 1024
MAILBOX_MESSAGES_MAX = 1_048_576
MAILBOX_BYTES = 256 << 20
"""Default bound of the bytes that wait in all mailboxes of one system together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MailboxSpec:
    """The bound of a mailbox: so many messages wait, and as many may be stashed.

    Full, the mailbox makes a local sender wait and refuses a remote one with `MailboxFull`. A message of a
    contract that is declared `telemetry=True` takes the place of the oldest one of such a contract instead
    and, if there is none, is dropped itself.
    """

    capacity: int = MAILBOX_MESSAGES

    def __post_init__(self) -> None:
        if not 1 <= self.capacity <= MAILBOX_MESSAGES_MAX:
            raise LocalProtocolError(f"mailbox capacity {self.capacity}: give 1..{MAILBOX_MESSAGES_MAX}")


class ReplyTo(Protocol):
    """The way back to an asker."""

    def reply(self, message: Any) -> Awaitable[None] | None:
        """Send the answer; what it returns, if anything, waits until there is room on the way back."""
        ...

    def post(self, message: Any) -> None:
        """Send the answer without waiting for room."""
        ...

    def fail(self, error: ActorError) -> None:
        """Send an error."""
        ...
