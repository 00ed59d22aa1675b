"""The messages of the step-commit machine as contracts between the ranks' actors."""

from __future__ import annotations

import dataclasses
from typing import Final, TypeAlias

import msgspec

from zbmd.actors.contracts import Contract
from zbmd.collectives.commit import events as cm


class Report(Contract, id="zbmd.commit.report", version=2, compatible_from=1):
    """A member's version and slot at the start of an epoch."""

    epoch: int
    version: int
    digest: bytes
    slot: int
    handle: bytes
    known: int
    fresh: bool
    whole: bool = False


class Vote(Contract, id="zbmd.commit.vote", version=2, compatible_from=1):
    """A member's vote to commit a version. `ready`: the newer epoch that it could enter after it, or 0."""

    epoch: int
    version: int
    digest: bytes
    part: bytes
    ready: int = 0


class Finish(Contract, id="zbmd.commit.finish"):
    """A member has the last version."""

    epoch: int


class GaveUp(Contract, id="zbmd.commit.gave_up"):
    """A member does not vote in this epoch any more."""

    epoch: int


SendAction: TypeAlias = cm.SendReport | cm.SendVote | cm.SendFinish | cm.SendGaveUp
Message: TypeAlias = Report | Vote | Finish | GaveUp


_MESSAGES: Final[dict[type, type[Message]]] = {
    cm.SendVote: Vote,
    cm.SendFinish: Finish,
    cm.SendGaveUp: GaveUp,
}


def to_wire(action: SendAction) -> Message:
    """Return the message that performs a send action."""
    if isinstance(action, cm.SendReport):
        return Report(epoch=action.epoch, **dataclasses.asdict(action.held))
    return msgspec.convert(action, _MESSAGES[type(action)], from_attributes=True)


def from_wire(message: Message, sender: int) -> cm.CommitEvent:
    """Return the machine's event for a message from rank `sender`, which the link authenticates."""
    fields = msgspec.structs.asdict(message)
    match message:
        case Report():
            epoch = fields.pop("epoch")
            return cm.ReportReceived(sender=sender, epoch=epoch, held=cm.Held(**fields))
        case Vote():
            return cm.VoteReceived(sender=sender, **fields)
        case GaveUp():
            return cm.GaveUpReceived(sender=sender, **fields)
        case Finish():
            return cm.FinishReceived(sender=sender, **fields)
