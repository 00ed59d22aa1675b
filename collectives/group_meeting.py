"""How the members of a new sub-group agree on its channel: each tells each what it can offer.

Only the members take part, so a sub-group can be made without the rest of its group. Messages go over the
links that are there; nothing is dialed, and no memory is mapped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Annotated, Final
from weakref import WeakKeyDictionary

import msgspec
import structlog

from zbmd.actors.actor import Actor, on
from zbmd.actors.context import sender_process
from zbmd.actors.contracts import Contract
from zbmd.actors.errors import ActorError
from zbmd.actors.member import Node
from zbmd.actors.rank_names import rank_of
from zbmd.actors.view import EPOCH_MAX, RANKS_MAX
from zbmd.collectives._stepper import COUNTER_MAX
from zbmd.collectives.errors import MembersLost
from zbmd.collectives.group_channels import STAMP_MAX, SUBGROUPS_MAX, Agreed, Channels, Offer, agree
from zbmd.transport._native import load_cell
from zbmd.transport.errors import LinkClosed, LocalProtocolError, PeerLost

log: Final = structlog.stdlib.get_logger("zbmd.collectives.groups")

ACTOR_NAME = "groups"
MEETINGS_MAX = 1024
"""Sub-groups that peers have asked for and this process has not, at most; further offers are dropped."""
MEMBER_SETS_MAX = 4096
"""Different sets of members of which an epoch's sub-groups were made."""

Rank = Annotated[int, msgspec.Meta(ge=0, lt=RANKS_MAX)]
Key = tuple[int, tuple[int, ...], int]
"""The epoch, the members in their order, and how many sub-groups of them there were before."""


class SubgroupOffered(Contract, id="zbmd.group.offered"):
    """An `Offer` for the sub-group of this key."""

    epoch: Annotated[int, msgspec.Meta(ge=1, le=EPOCH_MAX)]
    members: Annotated[tuple[Rank, ...], msgspec.Meta(min_length=1, max_length=RANKS_MAX)]
    number: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
    free: Annotated[int, msgspec.Meta(ge=0, lt=1 << SUBGROUPS_MAX)]
    used: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=STAMP_MAX)], ...],
        msgspec.Meta(min_length=SUBGROUPS_MAX, max_length=SUBGROUPS_MAX),
    ]


class _Meeting:
    """The offers for one sub-group that have come."""

    def __init__(self) -> None:
        self.offers: dict[int, Offer] = {}
        self.changed = asyncio.Event()


class Subgroups:
    """The sub-groups of this process; used on the node's loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.channels = Channels()
        # Two agreements at once would offer the same channels.
        self._turn = asyncio.Lock()
        self._meetings: dict[Key, _Meeting] = {}
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}

    async def agree(self, epoch: int, members: tuple[int, ...]) -> Agreed:
        """Take a channel for the sub-group of `members`, all of whom call this, in the same order of calls.

        Raises `MembersLost` if one of them ends, and `LocalProtocolError` if no channel is left. To be
        called under a timeout.
        """
        async with self._turn:
            self._forget_before(epoch)
            number = self._numbers.get((epoch, members), 0)
            if len(self._numbers) >= MEMBER_SETS_MAX:
                raise LocalProtocolError(f"sub-groups of {MEMBER_SETS_MAX} different sets of members exist")
            self._numbers[epoch, members] = number + 1
            key = (epoch, members, number)
            meeting = self._meetings.setdefault(key, _Meeting())
            meeting.offers[self._node.rank] = self.channels.offer()
            try:
                agreed = agree(await self._meet(key, meeting))
            finally:
                del self._meetings[key]
            self.channels.take(agreed)
            return agreed

    def leaving(self, members: tuple[int, ...], agreed: Agreed) -> Callable[[], None]:
        """What gives the channel of the sub-group of `members` back, to be called once it is closed here.

        It is used again when each of the others has closed it too, or has ended.
        """
        node, last = self._node, agreed.stamp << 32 | COUNTER_MAX
        others = {member: node.peers[member].incarnation for member in members if member != node.rank}

        def has_left(member: int, incarnation: int) -> bool:
            peer = node.peers.get(member)
            if peer is None or peer.incarnation != incarnation or node.segment.lost_mask() >> member & 1:
                return True
            return load_cell(node.segment.base, member, agreed.channel) >= last

        def all_have() -> bool:
            return all(has_left(member, incarnation) for member, incarnation in others.items())

        return partial(self.channels.give_back, agreed.channel, all_have)

    async def _meet(self, key: Key, meeting: _Meeting) -> list[Offer]:
        epoch, members, number = key
        own = meeting.offers[self._node.rank]
        forget = self._node.on_peer_lost(lambda _rank, _incarnation, _notice: meeting.changed.set())
        try:
            offered = SubgroupOffered(
                epoch=epoch, members=members, number=number, free=own.free, used=own.used
            )
            for member in members:
                if member != self._node.rank:
                    await self._tell(member, offered)
            while True:
                meeting.changed.clear()
                missing = [member for member in members if member not in meeting.offers]
                if not missing:
                    return [meeting.offers[member] for member in members]
                mask = self._node.segment.lost_mask()
                lost = tuple(member for member in missing if mask >> member & 1)
                if lost:
                    raise MembersLost(lost, f"as the sub-group of {list(members)} was made")
                await meeting.changed.wait()
        finally:
            forget()

    async def _tell(self, member: int, offered: SubgroupOffered) -> None:
        try:
            await self._node.system.ref(f"rank{member}/{ACTOR_NAME}").tell(offered)
        except (PeerLost, LinkClosed):
            raise MembersLost((member,), "it was to be told of a sub-group") from None
        except ActorError as error:
            raise LocalProtocolError(f"rank {member} cannot be told of a sub-group: {error}") from None

    def offered(self, source: int, message: SubgroupOffered) -> None:
        """An offer has come."""
        key: Key = (message.epoch, message.members, message.number)
        known = key in self._meetings
        if source not in message.members or (not known and len(self._meetings) >= MEETINGS_MAX):
            log.warning("an offer for a sub-group is dropped", source=source, members=message.members)
            return
        meeting = self._meetings.setdefault(key, _Meeting())
        meeting.offers[source] = Offer(free=message.free, used=message.used)
        meeting.changed.set()

    def _forget_before(self, epoch: int) -> None:
        for key in [key for key in self._meetings if key[0] < epoch]:
            del self._meetings[key]
        for pair in [pair for pair in self._numbers if pair[0] < epoch]:
            del self._numbers[pair]


class SubgroupActor(Actor):
    """`rankN/groups`: hears what members offer for sub-groups."""

    captured = False

    def __init__(self, subgroups: Subgroups) -> None:
        self._subgroups = subgroups

    @on(SubgroupOffered)
    async def offered(self, message: SubgroupOffered) -> None:
        """A member's offer."""
        source = rank_of(sender_process())
        if source is not None:
            self._subgroups.offered(source, message)


_subgroups: WeakKeyDictionary[Node, Subgroups] = WeakKeyDictionary()


async def open_subgroups(node: Node) -> Subgroups:
    """This process's sub-groups. Members may offer once all have called this."""
    known = _subgroups.get(node)
    if known is None:
        known = _subgroups[node] = Subgroups(node)
        await node.system.spawn(SubgroupActor, known, name=ACTOR_NAME)
    return known
