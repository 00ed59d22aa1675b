"""The part of one process in a change of code (sans-I/O), also when its leaders are gone.

A process obeys orders. If the coordinator dies, the first process that lives leads in its place: it
asks the others for their orders. If any has the order to keep the new version, all keep it, else all take it
back (cooperative termination: Skeen, "Nonblocking commit protocols", 1981). A process answers only once it
has itself seen the end of all who led before, so that no order of theirs is still under way to it. This takes
for granted that links keep the order, and that an end is no mere suspicion, as is so in one view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, assert_never

from zbmd.actors.upgrade import events
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError

COORDINATOR = ""


class Step(Enum):
    """The progress of one process in a change."""

    FRESH = "fresh"
    CHECKING = "checking"
    READY = "ready"
    CHANGING = "changing"
    CHANGED = "changed"
    SETTLING = "settling"
    SETTLED = "settled"
    OVER = "over"


class UpgradeAgent:
    """One process's part. `processes`: all that take part, in the order in which they lead.

    `handle` raises `RemoteProtocolError` if two who lead say different things.
    """

    def __init__(self, me: str, processes: Sequence[str]) -> None:
        if me not in processes:
            raise LocalProtocolError(f"{me} is none of {tuple(processes)}")
        self._me = me
        self._chain = (COORDINATOR, *processes)
        self._lost: set[str] = set()
        self._postponed: set[str] = set()  # who lead, and are answered later
        self._leading = False
        self._asked: set[str] = set()
        self._awaited: set[str] = set()
        self._any_kept = False
        self._decided = False
        self.step = Step.FRESH
        self.fate = events.Fate.OPEN

    def handle(self, event: events.LocalEvent, *, now_ns: int) -> list[events.LocalAction]:
        """Handle one event and return the actions."""
        actions: list[events.LocalAction] = []
        if self.step is Step.OVER:
            return actions
        match event:
            case events.Ordered():
                if event.leader not in self._lost:
                    self._ordered(event.order, actions)
            case events.LocalChecked():
                if self.step is Step.CHECKING:
                    self.step = Step.READY
                    self._say(events.Voted(process=self._me, why=event.why), actions)
            case events.LocalChanged():
                if self.step is Step.CHANGING:
                    self.step = Step.CHANGED
                    self._say(events.Changed(process=self._me, actors=event.actors, why=event.why), actions)
            case events.LocalBroke():
                if self.fate is events.Fate.OPEN:
                    self._say(events.Broke(process=self._me, why=event.why), actions)
            case events.LocalSettled():
                self._settled(actions)
            case events.LeaderLost():
                self._gone(event.process, actions)
            case events.FateAsked():
                self._postponed.add(event.leader)
                self._answer(actions)
            case events.FateReported():
                if event.process in self._asked:
                    self._any_kept |= event.fate is events.Fate.KEPT
                    self._asked.discard(event.process)
                    self._lead_on(actions)
            case events.FollowerSettled():
                self._awaited.discard(event.process)
                self._lead_on(actions)
            case _:
                assert_never(event)
        return actions

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a rule that holds between any two events does not."""
        assert (self.fate is events.Fate.OPEN) == (self.step not in (Step.SETTLING, Step.SETTLED, Step.OVER))
        assert not self._leading or self._leader == self._me
        assert not (self._asked | self._awaited) & self._lost
        assert self._leading or not (self._asked or self._awaited)

    @property
    def _leader(self) -> str:
        return next(name for name in self._chain if name not in self._lost)

    def _say(self, what: events.ToCoordinator, actions: list[events.LocalAction]) -> None:
        """Report to the coordinator; another leader needs only the reports of the end."""
        if self._leader == COORDINATOR:
            actions.append(what)
        elif self._leader != self._me and isinstance(what, events.Settled):
            actions.append(events.SaySettled(leader=self._leader))

    def _ordered(self, order: events.Order, actions: list[events.LocalAction]) -> None:
        match order:
            case events.Order.PREPARE:
                self.step = Step.CHECKING
                actions.append(events.Check())
            case events.Order.CHANGE:
                self.step = Step.CHANGING
                actions.append(events.ChangeActors())
            case events.Order.KEEP:
                self._settle(events.Fate.KEPT, actions)
            case events.Order.TAKE_BACK:
                self._settle(events.Fate.TAKEN_BACK, actions)
            case events.Order.DISMISS:
                self.step = Step.OVER
                actions.append(events.End())
            case _:
                assert_never(order)

    def _settle(self, fate: events.Fate, actions: list[events.LocalAction]) -> None:
        if self.fate is not events.Fate.OPEN and fate is not self.fate:
            raise RemoteProtocolError(f"{self._leader} says {fate.value}; it was {self.fate.value} before")
        if self.step is Step.SETTLED:
            self._say(events.Settled(process=self._me), actions)  # a new leader asks for it again
        elif self.step is not Step.SETTLING:
            self.step, self.fate = Step.SETTLING, fate
            actions.append(events.KeepNew() if fate is events.Fate.KEPT else events.TakeBack())

    def _settled(self, actions: list[events.LocalAction]) -> None:
        if self.step is Step.SETTLING:
            self.step = Step.SETTLED
            self._say(events.Settled(process=self._me), actions)
            self._lead_on(actions)

    # When others are gone.

    def _gone(self, process: str, actions: list[events.LocalAction]) -> None:
        if process == self._me or process not in self._chain:
            return
        self._lost.add(process)
        self._postponed.discard(process)
        self._asked.discard(process)
        self._awaited.discard(process)
        self._answer(actions)
        if self._leader != self._me:
            return
        if not self._leading:
            self._leading = True
            self._asked = set(self._others())
            actions.extend(events.AskFate(process=p) for p in self._others())
        self._lead_on(actions)

    def _others(self) -> list[str]:
        return [p for p in self._chain if p != self._me and p not in self._lost]

    def _answer(self, actions: list[events.LocalAction]) -> None:
        """Reply to the leader, once all earlier leaders are known to have ended."""
        if self._leader in self._postponed:
            self._postponed.discard(self._leader)
            actions.append(events.TellFate(leader=self._leader, fate=self.fate))

    def _lead_on(self, actions: list[events.LocalAction]) -> None:
        """Decide once all have reported; release all once all are done."""
        if not self._leading or self._asked:
            return
        if not self._decided:
            self._decided = True
            kept = self._any_kept or self.fate is events.Fate.KEPT
            self._awaited = set(self._others())
            order = events.Order.KEEP if kept else events.Order.TAKE_BACK
            actions.extend(events.TellOther(process=p, order=order) for p in self._others())
            self._settle(events.Fate.KEPT if kept else events.Fate.TAKEN_BACK, actions)
        if not self._awaited and self.step is Step.SETTLED:
            actions.extend(events.TellOther(process=p, order=events.Order.DISMISS) for p in self._others())
            self.step = Step.OVER
            actions.append(events.End())


def _build_upgrade_agent(config: Mapping[str, Any]) -> UpgradeAgent:
    return UpgradeAgent(config["me"], config["processes"])


UPGRADE_AGENT: MachineKind[events.LocalEvent, events.LocalAction] = register(
    "upgrade-agent",
    1,
    _build_upgrade_agent,
    events=events.LocalEvent,
    actions=events.LocalAction,
    states=(UpgradeAgent,),
)
"""One process's part in it; its configuration: the arguments of `UpgradeAgent`."""
