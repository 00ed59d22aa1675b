"""Choose the operation that goes first, the same on all members, by priority.

Members make the same calls in the same order, but not at the same time: who went by what it has itself would
choose another operation than who lags. So before each operation every member tells all others how many calls
it has made, and the priorities of those that wait. Calls that *all* have made are the choice: of these, the
one of the highest priority is next, and of equals the one made first. What all know is the same for all, and
who has made one call more than the slowest changes nothing.

There is one such *round* an operation. It completes once every member has a call that waits, as the operation
itself would. (What priorities are for in training: Peng et al., "A generic communication scheduler for
distributed DNN training acceleration", SOSP 2019.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError

PRIORITY_MAX = 127
"""Priorities are -127..127; 0 is that of a call that says nothing."""
WINDOW = 56
"""Calls that wait, the first ones, among which is chosen: what travels in a round is 64 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A call. They are numbered from 0 in the order in which they are made."""

    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnBegan:
    """The data plane is free for one operation; there is one turn for each call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingCalls:
    """A member's report in a round: the calls it has made, and the priorities of the first that wait."""

    made: int
    priorities: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The round is complete: the report of each member, by rank."""

    reports: Mapping[int, WaitingCalls]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """The round has failed, and with it the group."""


PriorityEvent: TypeAlias = Made | TurnBegan | Counted | Broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """Send this to all members."""

    own: WaitingCalls


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Run this call."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """Fail this call with what the round failed with."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Differ:
    """Members gave this call different priorities: fail it, on all members alike. By rank."""

    number: int
    priorities: Mapping[int, int]


PriorityAction: TypeAlias = Count | Run | Fail | Differ


class PriorityMachine:
    """The calls of one member of a group, from being made to being run."""

    def __init__(self) -> None:
        self._made = 0
        self._waiting: dict[int, int] = {}
        self._counting = False

    def handle(self, event: PriorityEvent, *, now_ns: int) -> list[PriorityAction]:
        """Take one event, return the actions to perform.

        Raises `LocalProtocolError` on a priority out of bounds and on a turn without a call, and
        `RemoteProtocolError` if a report is impossible: then the round is broken.
        """
        match event:
            case Made(priority=priority):
                self.check(priority)
                self._waiting[self._made] = priority
                self._made += 1
                return []
            case TurnBegan():
                if not self._waiting or self._counting:
                    raise LocalProtocolError("a turn without a call that waits, or before the last has ended")
                self._counting = True
                return [
                    Count(
                        own=WaitingCalls(made=self._made, priorities=tuple(self._waiting.values())[:WINDOW])
                    )
                ]
            case Counted(reports=reports):
                return [self._choose(reports)]
            case Broken():
                return [Fail(number=self._take(min(self._waiting)))]
            case _:
                assert_never(event)

    def check(self, priority: int) -> None:
        """Raise `LocalProtocolError` if it is out of bounds."""
        if not -PRIORITY_MAX <= priority <= PRIORITY_MAX:
            raise LocalProtocolError(f"priority={priority} is not in -{PRIORITY_MAX}..{PRIORITY_MAX}")

    def check_invariants(self) -> None:
        """Raise `AssertionError` if calls do not wait in the order in which they were made."""
        assert list(self._waiting) == sorted(self._waiting)
        assert not self._counting or self._waiting

    def _choose(self, reports: Mapping[int, WaitingCalls]) -> PriorityAction:
        # All members have run the same calls, so the first that wait are the same calls everywhere.
        done = self._made - len(self._waiting)
        for rank, one in reports.items():
            if not 1 <= len(one.priorities) == min(WINDOW, one.made - done):
                raise RemoteProtocolError(
                    f"member {rank} reported {one.made} calls, of which {len(one.priorities)} wait"
                )
        common = min(one.made for one in reports.values())
        choice = [number for number in list(self._waiting)[:WINDOW] if number < common]
        for i, number in enumerate(choice):
            priorities = {rank: one.priorities[i] for rank, one in reports.items()}
            if len(set(priorities.values())) > 1:
                self._take(number)
                return Differ(number=number, priorities=priorities)
        return Run(number=self._take(max(choice, key=lambda number: (self._waiting[number], -number))))

    def _take(self, number: int) -> int:
        if not self._counting:
            raise LocalProtocolError("the end of a round that has not begun")
        self._counting = False
        del self._waiting[number]
        return number
