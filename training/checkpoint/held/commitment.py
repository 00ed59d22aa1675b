"""The machine that holds a checkpoint back until its step is in the commit log.

    HELD ──the rank that speaks for its host has said so──▶ COMMITTED
      │──that rank is gone, or nobody waits──▶ JUDGING by the log ──it has the step──▶ COMMITTED
      └──the ranks went back behind the step──▶ DROPPED ◀──it has not, or cannot be read──┘

Ranks hand a version over before they have voted for it, so that the copy has the time of the next step. A
checkpoint that is published before that vote would be ahead of the log if all ranks died. The rank that
writes the log speaks for its host, after it has written the step; of other hosts the lowest rank does, after
the vote. A checkpoint of several hosts needs the parts of all, so none becomes whole before the log has it.

Nothing here waits for a clock: ranks say more, ask for a newer checkpoint, end, or are lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias, assert_never

from zbmd.transport.errors import LocalProtocolError

# ---- events


@dataclass(frozen=True, slots=True)
class Committed:
    """The rank that speaks for this host says that the step is committed."""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The ranks went back behind the step: they compute it again, and may come to other bits."""


@dataclass(frozen=True, slots=True)
class Deserted:
    """Nobody will say more: that rank is gone, a newer checkpoint waits, or the process is to end."""


@dataclass(frozen=True, slots=True)
class Judged:
    """The log was read. is_logged: whether it has the step."""

    is_logged: bool


Event: TypeAlias = Committed | Withdrawn | Deserted | Judged


class Action(Enum):
    """The next thing to do; each at most once."""

    READ_LOG = "look whether the log has the step"
    GO_ON = "publish the checkpoint, or this host's part of it"
    DISCARD = "drop what was prepared"


class State(Enum):
    """The state of the machine."""

    HELD = "held"
    JUDGING = "judging"
    COMMITTED = "committed"
    DROPPED = "dropped"


class Commitment:
    """See the module."""

    def __init__(self) -> None:
        self.state = State.HELD

    def handle(self, event: Event) -> list[Action]:
        """Return what is to be done; nothing once it is decided."""
        match event:
            case Judged() if self.state is State.HELD:
                raise LocalProtocolError("the log was read, and nobody asked for that")
            case _ if self.state in (State.COMMITTED, State.DROPPED):
                return []  # a word that came while the log was read
            case Committed():
                return self._decide(State.COMMITTED)
            case Withdrawn():
                return self._decide(State.DROPPED)
            case Deserted():
                if self.state is State.JUDGING:
                    return []
                self.state = State.JUDGING
                return [Action.READ_LOG]
            case Judged(is_logged=is_logged):
                return self._decide(State.COMMITTED if is_logged else State.DROPPED)
            case _:
                assert_never(event)

    @property
    def is_decided(self) -> bool:
        """Whether it is known what becomes of the checkpoint."""
        return self.state in (State.COMMITTED, State.DROPPED)

    def _decide(self, state: State) -> list[Action]:
        self.state = state
        return [Action.GO_ON if state is State.COMMITTED else Action.DISCARD]
