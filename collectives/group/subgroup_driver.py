"""Agree on the channel of a new sub-group: each member sends each the channels that it can offer.

Only the members take part, so a sub-group can be made without the rest of its group. Messages go over the
links that are there; nothing is dialed, and no memory is mapped. The driver of `subgroup_machine`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Final

import msgspec
import structlog

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.context import sender_process
from zbmd.actors.errors import ActorError
from zbmd.actors.rank.member import Worker
from zbmd.actors.rank.once import OncePerWorker
from zbmd.actors.view import EPOCH_MAX, RANKS_MAX, rank_of
from zbmd.collectives.errors import MembersLost
from zbmd.collectives.group import subgroup_machine as mm
from zbmd.collectives.group.subgroup_machine import NUMBER_MAX, MeetingMachine
from zbmd.collectives.native._stepper import COUNTER_MAX
from zbmd.collectives.programs.channels import STAMP_MAX, SUBGROUPS_MAX, Agreed, Channels, Offer, agree
from zbmd.transport.errors import LinkClosed, LocalProtocolError, PeerLost
from zbmd.transport.native._native import load_cell, now_ns

log: Final = structlog.stdlib.get_logger("zbmd.collectives.groups")

ACTOR_NAME = "groups"
FREE_BYTES: Final = SUBGROUPS_MAX // 8
MEMBER_SETS_MAX = 4096
"""Different sets of members that sub-groups are made of in an epoch, here or as peers say; what peers say of
more is dropped."""

Rank = Annotated[int, msgspec.Meta(ge=0, lt=RANKS_MAX)]
Key = tuple[int, tuple[int, ...]]
"""The epoch, and the members in their order."""
Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
"""Of a call for the sub-group of these members (`subgroup_machine`)."""
Members = Annotated[tuple[Rank, ...], msgspec.Meta(min_length=1, max_length=RANKS_MAX)]


class SubgroupOffered(Contract, id="zbmd.group.channels"):
    """An `Offer` for the sub-group of this key. free: little-endian."""

    epoch: Annotated[int, msgspec.Meta(ge=1, le=EPOCH_MAX)]
    members: Members
    number: Number
    free: Annotated[bytes, msgspec.Meta(min_length=FREE_BYTES, max_length=FREE_BYTES)]
    used: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=STAMP_MAX)], ...],
        msgspec.Meta(min_length=SUBGROUPS_MAX, max_length=SUBGROUPS_MAX),
    ]


class SubgroupWithdrawn(Contract, id="zbmd.group.withdrawn"):
    """A member that made an offer for the sub-group of this key has given up."""

    epoch: Annotated[int, msgspec.Meta(ge=1, le=EPOCH_MAX)]
    members: Members
    number: Number


class _Meeting:
    """The machine of one set of members, and what wakes a call that waits for it."""

    def __init__(self, rank: int, members: tuple[int, ...]) -> None:
        self.machine = MeetingMachine(rank, members)
        self.changed = asyncio.Event()
        self.to_do: deque[mm.MeetingAction] = deque()


@dataclass(slots=True)
class _Made:
    """The sub-group that a channel was last taken for. `gone`: members that will never open it."""

    key: Key
    number: int
    gone: set[int] = field(default_factory=set[int])
    kept: object = None
    """Memory that members may write to until all have left."""
    abort: Callable[[], None] = lambda: None


class Subgroups:
    """The sub-groups of this process; used on the worker's loop."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.channels = Channels()
        # Two agreements at once would offer the same channels.
        self.turn = asyncio.Lock()
        self._meetings: dict[Key, _Meeting] = {}
        self._made: dict[int, _Made] = {}
        self._withdrawals: set[asyncio.Task[None]] = set()

    async def agree(self, epoch: int, members: tuple[int, ...], *, one_host: bool) -> Agreed:
        """Take a channel for the sub-group of `members`, all of whom call this, in the same order of calls.

        one_host: whether they are all on one host.

        Raises `MembersLost` if one of them ends, and `LocalProtocolError` if no channel is left. To be
        called under a timeout: the others hear that the call has ended, and later calls meet again.
        """
        async with self.turn:
            for key in [key for key in self._meetings if key[0] < epoch]:
                del self._meetings[key]
            meeting = self._meeting(epoch, members)
            if meeting is None:
                raise LocalProtocolError(f"sub-groups of {MEMBER_SETS_MAX} different sets of members exist")
            try:
                met = await self._meet((epoch, members), meeting)
            except BaseException:
                self._withdraw((epoch, members), meeting)
                raise
            agreed = agree(met.offers, one_host=one_host)
            self.channels.take(agreed)
            self._made[agreed.channel] = _Made((epoch, members), met.number)
            return agreed

    def watch(self, agreed: Agreed, abort: Callable[[], None]) -> None:
        """Call `abort` if a member of the sub-group had given up as the others met: it will not come."""
        made = self._made[agreed.channel]
        made.abort = abort
        if made.gone:
            abort()

    def keep(self, channel: int, memory: object) -> None:
        """Keep memory that members of a channel's sub-group write to until the channel is taken again."""
        self._made[channel].kept = memory

    def leaving(self, members: tuple[int, ...], agreed: Agreed) -> Callable[[], None]:
        """Return a function that gives back the channel of the sub-group of `members`, after its close.

        It is used again when each of the others has closed it too, or has ended.
        """
        worker, last, made = self._worker, agreed.stamp << 32 | COUNTER_MAX, self._made[agreed.channel]
        others = {member: worker.peers[member].incarnation for member in members if member != worker.rank}

        def has_left(member: int, incarnation: int) -> bool:
            peer = worker.peers.get(member)
            if peer is None or peer.incarnation != incarnation or worker.segment.lost_mask() >> member & 1:
                return True
            if member in made.gone:
                return True
            return load_cell(worker.segment.base, member, agreed.channel) >= last

        def all_have() -> bool:
            return all(has_left(member, incarnation) for member, incarnation in others.items())

        return partial(self.channels.give_back, agreed.channel, all_have)

    def _meeting(self, epoch: int, members: tuple[int, ...]) -> _Meeting | None:
        """That of these members; None if it would be one too many."""
        found = self._meetings.get((epoch, members))
        if found is None and len(self._meetings) < MEMBER_SETS_MAX:
            found = self._meetings[epoch, members] = _Meeting(self._worker.rank, members)
        return found

    async def _meet(self, key: Key, meeting: _Meeting) -> mm.Met:
        members, machine = key[1], meeting.machine
        forget = self._worker.on_peer_lost(lambda _rank, _incarnation, _notice: meeting.changed.set())
        meeting.to_do.clear()
        self._put(key, meeting, mm.Called(offer=self.channels.offer()))
        try:
            while True:
                meeting.changed.clear()
                while meeting.to_do:
                    action = meeting.to_do.popleft()
                    if isinstance(action, mm.Met):
                        return action
                    if isinstance(action, mm.TellOffer):
                        await self._tell_all(key, _offered(key, action))
                mask = self._worker.segment.lost_mask()
                lost = tuple(member for member in machine.missing if mask >> member & 1)
                if lost:
                    raise MembersLost(lost, f"as the sub-group of {list(members)} was made")
                await meeting.changed.wait()
        finally:
            forget()

    def _put(self, key: Key, meeting: _Meeting, event: mm.MeetingEvent) -> None:
        """Feed the machine, and leave to the call under way what it says."""
        for action in meeting.machine.handle(event, now_ns=now_ns()):
            if isinstance(action, mm.Left):
                self._left(key, action)
            else:
                meeting.to_do.append(action)
        meeting.machine.check_invariants()
        meeting.changed.set()

    def _left(self, key: Key, left: mm.Left) -> None:
        for made in self._made.values():
            if (made.key, made.number) == (key, left.number):
                made.gone.add(left.source)
                made.abort()

    def _withdraw(self, key: Key, meeting: _Meeting) -> None:
        """Tell the others that this process does not wait any more; it may be being cancelled itself."""
        for action in (*meeting.to_do, *meeting.machine.handle(mm.GaveUp(), now_ns=now_ns())):
            # Offers that were all there as the call ended are met by the others.
            if isinstance(action, mm.TellWithdrawn | mm.Met):
                withdrawn = SubgroupWithdrawn(epoch=key[0], members=key[1], number=action.number)
                task = asyncio.ensure_future(self._tell_those_left(key, withdrawn))
                self._withdrawals.add(task)
                task.add_done_callback(self._withdrawals.discard)

    async def _tell_those_left(self, key: Key, message: SubgroupWithdrawn) -> None:
        for member in key[1]:
            if member != self._worker.rank:
                try:
                    await self._tell(member, message)
                except (MembersLost, LocalProtocolError) as error:
                    log.debug("a member does not hear that a sub-group is given up", why=str(error))

    async def _tell_all(self, key: Key, message: SubgroupOffered) -> None:
        for member in key[1]:
            if member != self._worker.rank:
                await self._tell(member, message)

    async def _tell(self, member: int, message: SubgroupOffered | SubgroupWithdrawn) -> None:
        try:
            await self._worker.system.ref(f"rank{member}/{ACTOR_NAME}").tell(message)
        except (PeerLost, LinkClosed):
            raise MembersLost((member,), "a sub-group was to be agreed on with it") from None
        except ActorError as error:
            raise LocalProtocolError(f"no sub-group can be agreed on with rank {member}: {error}") from None

    def heard(self, source: int, message: SubgroupOffered | SubgroupWithdrawn) -> None:
        """A member's offer has come, or its end."""
        key: Key = (message.epoch, message.members)
        meeting = self._meeting(*key) if {source, self._worker.rank} <= {*message.members} else None
        if meeting is None:
            log.warning("an offer for a sub-group is dropped", source=source, members=message.members)
            return
        event: mm.MeetingEvent = mm.Withdrawn(source=source, number=message.number)
        if isinstance(message, SubgroupOffered):
            offer = Offer(free=int.from_bytes(message.free, "little"), used=message.used)
            event = mm.Offered(source=source, number=message.number, offer=offer)
        self._put(key, meeting, event)


def _offered(key: Key, told: mm.TellOffer) -> SubgroupOffered:
    free = told.offer.free.to_bytes(FREE_BYTES, "little")
    return SubgroupOffered(epoch=key[0], members=key[1], number=told.number, free=free, used=told.offer.used)


class SubgroupActor(Actor):
    """`rankN/groups`: hears what members offer for sub-groups."""

    captured = False

    def __init__(self, subgroups: Subgroups) -> None:
        self._subgroups = subgroups

    @on(SubgroupOffered)
    async def offered(self, message: SubgroupOffered) -> None:
        """A member's offer."""
        self._heard(message)

    @on(SubgroupWithdrawn)
    async def withdrawn(self, message: SubgroupWithdrawn) -> None:
        """A member has given up."""
        self._heard(message)

    def _heard(self, message: SubgroupOffered | SubgroupWithdrawn) -> None:
        source = rank_of(sender_process())
        if source is not None:
            self._subgroups.heard(source, message)


async def _make_subgroups(worker: Worker) -> Subgroups:
    made = Subgroups(worker)
    await worker.system.spawn(SubgroupActor, made, name=ACTOR_NAME)
    return made


_subgroups: Final = OncePerWorker(_make_subgroups)


async def open_subgroups(worker: Worker) -> Subgroups:
    """This process's sub-groups. Members may offer once all have called this."""
    return await _subgroups.of(worker)
