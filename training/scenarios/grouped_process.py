"""A simulated rank among others: who takes part in an epoch, and the operations of its groups.

An operation of the group ends only once every member has entered it; when a member dies inside it, or gives
up, it ends on some of the others.
"""

from __future__ import annotations

from collections.abc import Generator

from zbmd.actors.view import MemberId
from zbmd.training.scenarios.moved_process import MovedProcess

CUT_SHARE = 0.5
"""The share of operations that are cut for a member, of those that could also end for it."""
STUCK_SHARE = 0.5
"""The share of operations that do not end for a member, if another died after it had entered them."""


class Cut(Exception):
    """The epoch is over: a member is lost, or has given up."""


class GroupedProcess(MovedProcess):
    """The part of a simulated rank that knows its groups."""

    @property
    def _members(self) -> tuple[MemberId, ...]:
        active = self.world.options.active(self.view.ranks)
        return tuple(member for member in self.view.ids if member.rank in active)

    @property
    def _everyone(self) -> tuple[MemberId, ...]:
        """The members, and then those that wait beside, if these take part as the members meet."""
        members = self._members
        beside = (one for one in self.view.ids if one not in members)
        return (*members, *beside) if self.world.options.resizes else members

    @property
    def _place(self) -> int:
        return self._members.index(self.member)

    @property
    def _keys(self) -> tuple[int, ...]:
        """The keys of the members' shards; see `Task.state_keys`."""
        options = self.world.options
        return options.keys(len(self._members)) if options.resizes or not options.sharded else ()

    @property
    def _key(self) -> int:
        """The key of this rank's shard."""
        return self.world.keys(self._members)[self.member]

    @property
    def _is_lowest(self) -> bool:
        return self._place == 0

    def _is_cut(self, *, meeting: bool = False) -> bool:
        """Whether this rank may see an operation of the epoch end."""
        given_up = self.world.unattended if meeting else self.world.abandoned
        return self.view.epoch in given_up or not self.lost.isdisjoint(
            self._everyone if meeting else self._members
        )

    def _together(
        self, name: str, value: object = None, *, meeting: bool = False
    ) -> Generator[bool, None, list[object]]:
        """Enter an operation of all members, and wait for its end. Raises `Cut`.

        meeting: an operation of those that wait, too.
        """
        operation = self.world.operations.setdefault((self.view.epoch, name), {})
        operation[self.member] = value
        yield False
        members, stuck = self._everyone if meeting else self._members, False
        while stuck or len(operation) < len(members):
            if self._is_cut(meeting=meeting):
                raise Cut
            yield False
            stuck = stuck or (
                len(operation) == len(members)
                and not all(map(self.world.lives, members))
                and self.rng.random() < STUCK_SHARE
            )
        if self._is_cut(meeting=meeting) and self.rng.random() < CUT_SHARE:
            raise Cut
        return [operation[member] for member in members]
