"""The actor that receives the tagged messages of all groups of a process, and the ends of their links."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Final

import structlog

from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.context import sender_process
from zbmd.actors.rank.member import Worker
from zbmd.actors.rank.once import OncePerWorker
from zbmd.actors.view import rank_of
from zbmd.collectives.p2p.plain import Tagged
from zbmd.collectives.p2p.tagged import ACTOR_NAME, FromMember, TaggedEnd
from zbmd.collectives.p2p.wire import (
    TaggedAsked,
    TaggedClosed,
    TaggedFailed,
    TaggedGreeting,
    TaggedLinkEnded,
    TaggedMessage,
    TaggedPiece,
    TaggedTaken,
)
from zbmd.transport.errors import ZbmdError

log: Final = structlog.stdlib.get_logger("zbmd.collectives.tagged")


class TaggedActor(Actor):
    """`rankN/tagged`: receives from the other members of all groups of this process."""

    captured = False

    def __init__(self, groups: dict[tuple[int, int], TaggedEnd]) -> None:
        self._groups = groups

    @on(TaggedMessage)
    async def message(self, message: TaggedMessage) -> None:
        """Take an array."""
        self._take(message)

    @on(TaggedTaken)
    async def taken(self, message: TaggedTaken) -> None:
        """Note that an array has been taken."""
        self._take(message)

    @on(TaggedAsked)
    async def asked(self, message: TaggedAsked) -> None:
        """Send more of an array."""
        self._take(message)

    @on(TaggedPiece)
    async def piece(self, message: TaggedPiece) -> None:
        """Take more of an array."""
        self._take(message)

    @on(TaggedClosed)
    async def closed(self, message: TaggedClosed) -> None:
        """Note that a member has left a group."""
        self._take(message)

    @on(TaggedFailed)
    async def failed(self, message: TaggedFailed) -> None:
        """Note that a member's operations have ended."""
        self._take(message)

    @on(TaggedGreeting)
    async def greeting(self, message: TaggedGreeting) -> None:
        """Note that a member of an elastic group has entered a view."""
        self._take(message)

    @on(TaggedLinkEnded)
    async def link_ended(self, message: TaggedLinkEnded) -> None:
        """Note that the link to a member has ended, after everything that it had sent."""
        if sender_process():
            log.debug("what no other process can know is dropped", sender=sender_process())
            return
        for group in list(self._groups.values()):
            group.link_ended(message.rank, message.incarnation)

    def _take(self, message: FromMember) -> None:
        group, source = self._groups.get((message.epoch, message.channel)), rank_of(sender_process())
        if group is None or source is None:
            log.debug("a message of no group is dropped", epoch=message.epoch, sender=sender_process())
        else:
            group.take(source, message)


async def _make_groups(worker: Worker) -> dict[tuple[int, int], TaggedEnd]:
    groups: dict[tuple[int, int], TaggedEnd] = {}
    await worker.system.spawn(TaggedActor, groups, name=ACTOR_NAME)
    worker.on_link_ended(lambda *process: pass_on_end(worker, groups.values(), *process))
    return groups


_tagged_groups: Final = OncePerWorker(_make_groups)


async def tagged_groups(worker: Worker) -> dict[tuple[int, int], TaggedEnd]:
    """The ends of all groups of this process that have tagged messages, by stamp and channel."""
    groups = await _tagged_groups.of(worker)
    for old in [key for key, tagged in groups.items() if tagged.ended]:
        del groups[old]
    return groups


_notices: set[asyncio.Task[None]] = set()


def pass_on_end(worker: Worker, groups: Iterable[TaggedEnd], rank: int, incarnation: int) -> None:
    """Have the groups of this process note the end of a link after the messages that came over it.

    The last messages of a process that left in an orderly way would be lost if its end passed them.
    """
    for group in groups:
        group.link_ends(rank, incarnation)

    async def tell() -> None:
        with contextlib.suppress(ZbmdError):  # this process has left by now
            ended = TaggedLinkEnded(rank=rank, incarnation=incarnation)
            await worker.system.ref(f"{worker.system.name}/{ACTOR_NAME}").tell(ended)

    task = asyncio.ensure_future(tell())
    _notices.add(task)
    task.add_done_callback(_notices.discard)


async def open_tagged(worker: Worker, members: tuple[int, ...], *, epoch: int, channel: int) -> Tagged:
    """This rank's end of a group's tagged messages. Members may send once all have called this."""
    groups = await tagged_groups(worker)
    made = Tagged(worker, members, epoch=epoch, channel=channel)
    groups[epoch, channel] = made
    return made
