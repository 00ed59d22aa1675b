"""Send and receive with tags in an elastic group: the driver of `ElasticTagMachine`, through all views."""

from __future__ import annotations

import time
from typing import Any, assert_never

from zbmd.actors.errors import ActorError
from zbmd.actors.rank.member import Worker
from zbmd.actors.view import MemberId
from zbmd.collectives.device.arrays_in import Array
from zbmd.collectives.errors import MembersLost, OperationAborted
from zbmd.collectives.p2p import elastic_machine as em
from zbmd.collectives.p2p.actor import pass_on_end
from zbmd.collectives.p2p.elastic_machine import ELASTIC_TAGS, ElasticTagMachine, Way, tags_config
from zbmd.collectives.p2p.streams import Piece
from zbmd.collectives.p2p.tag_machine import Cause, Match, MemberLeft, TagEvent
from zbmd.collectives.p2p.tagged import TaggedEnd, named
from zbmd.collectives.p2p.wire import TaggedGreeting
from zbmd.transport.capture.tap import Tap
from zbmd.transport.errors import LinkClosed, LocalProtocolError, PeerLost, ZbmdError


class ElasticTagged(TaggedEnd):
    """This rank's end of a group's tagged messages, in all of its epochs.

    ranks: those that may be members: one of them may be absent, any other is an error.
    """

    def __init__(self, worker: Worker, *, ranks: tuple[int, ...], stamp: int, channel: int) -> None:
        super().__init__(worker, stamp=stamp, channel=channel)
        self._ranks = frozenset(ranks)
        machine = self._machine = ElasticTagMachine(worker.rank)
        name = f"elastic{channel}.tags"
        # Five events a message and its receipt, some 40 microseconds: for a log, and not for the ring.
        self._tap = Tap(worker.capture.whole, ELASTIC_TAGS, name, machine, tags_config(machine))
        self._members: dict[int, MemberId] = {}

    def settled(self, epoch: int, members: tuple[MemberId, ...]) -> None:
        """This process has come to the view of `epoch`, and knows that all of `members` have."""
        if self._ended is not None:
            return
        for process in list(self._ending):  # links of before: those that are new in this view are others
            self.link_ended(*process)
        self._members = {member.rank: member for member in members}
        self._handle(em.Settled(epoch=epoch, members=members))
        self.look()

    def look(self) -> None:
        """Look for members whose links have ended: the notice may have come before they were members."""
        for rank, member in self._members.items():
            if rank != self._worker.rank and not self._worker.is_linked(rank, member.incarnation):
                pass_on_end(self._worker, [self], rank, member.incarnation)

    def end(self, error: ZbmdError) -> None:
        """End what waits with this error: the group is of no use any more."""
        if self._ended is None:
            self._end(error)

    def _end(self, error: ZbmdError) -> None:
        if self._ended is None:
            self._tap.close(str(error))
        super()._end(error)

    async def send(self, x: Any, to: int, tag: int, *, label: str = "") -> None:
        """See `ElasticGroup.send`."""
        self._require_rank(to)
        await super().send(x, to, tag, label=label)

    def _require_rank(self, rank: int) -> None:
        if rank not in self._ranks:
            raise LocalProtocolError(f"rank {rank} can be no member of the group")

    def _handle(self, event: TagEvent | MemberLeft | em.ElasticTagEvent) -> None:
        actions = self._tap.handle(event, now_ns=time.monotonic_ns())
        self._tap.check_invariants()
        for action in actions:
            match action:
                case em.Greet(to=to, epoch=epoch, since=since):
                    place = {"epoch": self._stamp, "channel": self._channel}
                    self._say(to, TaggedGreeting(**place, view=epoch, since=since))
                case em.Dropped(source=source, number=number):
                    self._here.pop((source, number), None)
                case _:
                    self._perform(action)
        for (source, number), reading in self._readings.items():
            if not self._machine.is_open(source, number):
                reading.fail(MembersLost((source,), "the rest of its message went with it"))

    def _failure(self, ranks: tuple[int, ...], cause: Cause) -> ZbmdError:
        match cause:
            case Cause.LOST:
                return MembersLost(ranks, "the group's next operation brings it to the next view")
            case Cause.LEFT:
                return OperationAborted(f"{named(ranks)} closed the group")
            case Cause.ABSENT:
                return MembersLost(ranks, "nobody is there under this rank in the group's view")
            case _:
                assert_never(cause)

    def _others(self) -> tuple[int, ...]:
        return self._machine.reachable

    def _lost(self, rank: int, incarnation: int) -> None:
        member = MemberId(rank=rank, incarnation=incarnation)
        if self._members.get(rank) == member:
            self._handle(em.MemberLost(member=member))

    def _greeted(self, source: int, greeting: TaggedGreeting) -> None:
        if source in self._ranks:
            self._handle(em.Greeted(source=source, epoch=greeting.view, since=greeting.since))

    def _give_back(self, match: Match, error: BaseException) -> None:
        """Of what lay with one who is lost there is nothing to give back."""
        if isinstance(error, MembersLost):
            self._here.pop((match.source, match.number), None)
            self._handle(em.Spoilt(source=match.source, number=match.number))
        else:
            super()._give_back(match, error)

    async def _get(self, piece: Piece, source: int, flat: Array) -> None:
        peer, lent = self._worker.peers.get(source), piece.lent
        if lent is None:
            await super()._get(piece, source, flat)
            return
        if source != self._worker.rank and (peer is None or peer.incarnation != lent.incarnation):
            raise MembersLost((source,), "its message went with it")
        try:
            await super()._get(piece, source, flat)
        except (PeerLost, LinkClosed, OperationAborted, ActorError) as error:
            if self._machine.way(source) is Way.UP and not isinstance(error, PeerLost):
                raise
            raise MembersLost((source,), f"its message went with it: {error}") from None
