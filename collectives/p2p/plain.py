"""Send and receive with tags in a group of one epoch: the driver of `TagMachine`."""

from __future__ import annotations

import time

from zbmd.actors.rank.member import Worker
from zbmd.collectives.errors import MembersLost
from zbmd.collectives.p2p.differing import ended_by
from zbmd.collectives.p2p.tag_machine import Cause, MemberLeft, TagEvent, TagMachine
from zbmd.collectives.p2p.tagged import CLOSED, TaggedEnd, named
from zbmd.transport.errors import ZbmdError


class Tagged(TaggedEnd):
    """The tagged messages of a group of one epoch: they end with the first loss, but outlast a member's
    close.
    """

    def __init__(self, worker: Worker, members: tuple[int, ...], *, epoch: int, channel: int) -> None:
        super().__init__(worker, stamp=epoch, channel=channel)
        self._members = members
        self._machine = TagMachine(members)

    def _handle(self, event: TagEvent | MemberLeft) -> None:
        actions = self._machine.handle(event, now_ns=time.monotonic_ns())
        self._machine.check_invariants()
        for action in actions:
            self._perform(action)
        if isinstance(event, MemberLeft):
            self._fail_readings(event.source, self._failure((event.source,), Cause.LEFT))

    def _others(self) -> list[int]:
        return [member for member in self._members if member != self._worker.rank]

    def _lost(self, rank: int, incarnation: int) -> None:
        if rank in self._members and not self._machine.has_left(rank):
            self._end(MembersLost((rank,), f"incarnation {incarnation} ended; wait for the next view"))

    def _failure(self, ranks: tuple[int, ...], cause: Cause) -> ZbmdError:
        assert cause is Cause.LEFT, "the first loss ends all"
        reason = self.ends.reason_of(ranks[0]) if len(ranks) == 1 else None
        return ended_by(named(ranks), reason or CLOSED)
