"""Typed errors of the actor layer, and their names on the wire."""

from __future__ import annotations

from typing import ClassVar

from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError, ZbmdError


class ContractError(LocalProtocolError):
    """A contract cannot be sent: its schema, id or version is not acceptable. Raised where it is defined."""


class MissingDeadline(LocalProtocolError):
    """An ask gave no timeout and runs inside no handler whose deadline it could inherit."""


class SystemStopped(LocalProtocolError):
    """The actor system has been stopped."""


class NameTaken(LocalProtocolError):
    """Another live actor of this process holds the name."""


class UpgradeRefused(LocalProtocolError):
    """A change of code cannot be made as it is: nothing has been changed. The text says what to do."""


class UpgradeUndone(ZbmdError):
    """A change of code was taken back: every actor runs the old version again. The text says why."""


class ContractMismatch(RemoteProtocolError):
    """The peer holds another schema under the same contract id and version."""


class ActorError(ZbmdError):
    """A message could not be handled. `code` is the error's name on the wire."""

    code: ClassVar[str] = "error"


class DeadActor(ActorError):
    """The actor, or the incarnation of it that the reference names, does not live (any more)."""

    code = "dead_actor"


class MailboxFull(ActorError):
    """The mailbox was full and the message was refused or, by declaration, dropped: send slower."""

    code = "mailbox_full"


class MailboxMemoryFull(MailboxFull):
    """All mailboxes of the process together hold as many bytes as they may; the text names the biggest."""

    code = "mailbox_memory_full"


class StashFull(ActorError):
    """The actor has put aside as many messages as its mailbox may hold."""

    code = "stash_full"


class NoSuchChild(ActorError):
    """The supervisor has no child of that name."""

    code = "no_such_child"


class ChildExists(ActorError):
    """The supervisor has a child of that name already, or it is up."""

    code = "child_exists"


class NameInUse(ActorError):
    """Another actor of the view has the name."""

    code = "name_in_use"


class NoReply(ActorError):
    """The handler put the answer off, and then nobody gave one."""

    code = "no_reply"


class ActorFailed(ActorError):
    """The handler raised; the actor has ended with this error and its supervisor decides what follows."""

    code = "actor_failed"


class ActorStartFailed(ActorError):
    """The constructor or `started()` raised; there is no actor."""

    code = "start_failed"


class AskRing(ActorError):
    """The answer would never come: the actor that is asked waits for the asker, itself or through others."""

    code = "ask_ring"


class UnknownContract(ActorError):
    """The other side knows no contract of that id and version."""

    code = "unknown_contract"


class NotUnderstood(ActorError):
    """The actor has no handler for this contract."""

    code = "not_understood"


class InvalidMessage(ActorError):
    """The message does not fit its contract."""

    code = "invalid_message"


class UnknownActorClass(ActorError):
    """The other process has registered no actor class of that name for spawning from afar."""

    code = "unknown_actor_class"


class TooManyPending(ActorError):
    """A bound on outstanding asks, monitors or spawns was reached: wait for some to finish."""

    code = "too_many_pending"


_BY_CODE: dict[str, type[ActorError]] = {
    c.code: c
    for c in (
        DeadActor,
        MailboxFull,
        MailboxMemoryFull,
        StashFull,
        NameInUse,
        NoReply,
        NoSuchChild,
        ChildExists,
        ActorFailed,
        ActorStartFailed,
        AskRing,
        UnknownContract,
        NotUnderstood,
        InvalidMessage,
        UnknownActorClass,
        TooManyPending,
    )
}


def error_from_wire(code: str, text: str) -> ActorError:
    """The error a peer named; a code of a newer peer becomes a plain `ActorError` that quotes it."""
    found = _BY_CODE.get(code)
    return found(text) if found is not None else ActorError(f"{code}: {text}")
