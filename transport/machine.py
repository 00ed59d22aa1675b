"""The sans-I/O machine contract.

A machine is a pure class: events in, actions out. It holds no socket, clock, random source, logger or
payload bytes; time and configuration are arguments, payloads are handles into a driver's buffer table.
The same machine runs under the asyncio driver, the simulator and the replayer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType, Protocol, TypeVar

Rank = NewType("Rank", int)

EventT_contra = TypeVar("EventT_contra", contravariant=True)
ActionT = TypeVar("ActionT")


class Machine(Protocol[EventT_contra, ActionT]):
    """A protocol state machine over a closed union of events and actions."""

    def handle(self, event: EventT_contra, *, now_ns: int) -> list[ActionT]:
        """Take one event at `now_ns` (monotonic, ns) and return the actions to perform, in order.

        Raises `LocalProtocolError` when our side misused the machine and `RemoteProtocolError` when the
        peer did.
        """
        ...

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the state is one that no sequence of events may reach."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """Event of a machine with one timer: the time asked for by the last `SetTimer` has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Action of a machine with one timer: deliver `TimerFired` at `at_ns`; replaces the timer before it."""

    at_ns: int
