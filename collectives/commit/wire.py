"""The messages of the step-commit machine as contracts between the ranks' actors."""

from __future__ import annotations

from typing import TypeAlias

from zbmd.actors.contracts import Contract
from zbmd.collectives.commit import events as cm


class Report(Contract, id="zbmd.commit.report", version=2, compatible_from=1):
    """What a member holds at the start of an epoch."""

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


def to_wire(action: SendAction) -> Message:
    """Return the message that performs a send action."""
    match action:
        case cm.SendReport(epoch=epoch, held=held):
            return Report(
                epoch=epoch,
                version=held.version,
                digest=held.digest,
                slot=held.slot,
                handle=held.handle,
                known=held.known,
                fresh=held.fresh,
                whole=held.whole,
            )
        case cm.SendVote(epoch=epoch, version=version, digest=digest, part=part, ready=ready):
            return Vote(epoch=epoch, version=version, digest=digest, part=part, ready=ready)
        case cm.SendGaveUp(epoch=epoch):
            return GaveUp(epoch=epoch)
        case cm.SendFinish(epoch=epoch):
            return Finish(epoch=epoch)


def from_wire(message: Message, sender: int) -> cm.CommitEvent:
    """Return the machine's event for a message from rank `sender`, which the link authenticates."""
    match message:
        case Report():
            held = cm.Held(
                version=message.version,
                digest=message.digest,
                slot=message.slot,
                handle=message.handle,
                known=message.known,
                fresh=message.fresh,
                whole=message.whole,
            )
            return cm.ReportReceived(sender=sender, epoch=message.epoch, held=held)
        case Vote():
            return cm.VoteReceived(
                sender=sender,
                epoch=message.epoch,
                version=message.version,
                digest=message.digest,
                part=message.part,
                ready=message.ready,
            )
        case GaveUp():
            return cm.GaveUpReceived(sender=sender, epoch=message.epoch)
        case Finish():
            return cm.FinishReceived(sender=sender, epoch=message.epoch)
