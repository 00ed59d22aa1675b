"""A change of code (sans-I/O): its coordinator, and the part of each process, also when its leaders are gone.

The coordinator prepares everywhere, changes a few, watches, changes all, and keeps. It is two-phase commit
(Gray, "Notes on data base operating systems", 1978) with stages between the phases: the new version is on
probation in the processes of one stage before those of the next get it, and it is kept by all or taken back
by all.

A process, the agent, obeys orders. If the coordinator dies, the first process that lives leads in its place:
it asks the others for their orders. If any has the order to keep the new version, all keep it, else all take
it back (cooperative termination: Skeen, "Nonblocking commit protocols", 1981). A process answers only once it
has itself seen the end of all who led before, so that no order of theirs is still under way to it. This takes
for granted that links keep the order, and that an end is no mere suspicion, as is so in one view.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, assert_never

from zbmd.actors.upgrade import events
from zbmd.actors.upgrade.events import (
    Action,
    Begin,
    Broke,
    CancelTimer,
    Changed,
    Event,
    Fate,
    Finished,
    Order,
    ProcessLost,
    SendOrder,
    Settled,
    Voted,
)
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.machine import SetTimer, TimerFired

PROCESSES_MAX = 1024


class UpgradePhase(Enum):
    """The phase of a change."""

    captured_as = enum.nonmember("Phase")
    NEW = "new"
    PREPARING = "preparing"
    CHANGING = "changing"
    ON_PROBATION = "on probation"
    SETTLING = "settling"
    OVER = "over"


class UpgradeMachine:
    """One change over the processes of `stages`.

    answer_ns: how long a process may take for an order; probation_ns: how long the new version must
    run in each stage without a crash. Raises `LocalProtocolError` for stages that are empty or overlap.
    """

    def __init__(self, stages: Sequence[Sequence[str]], *, answer_ns: int, probation_ns: int) -> None:
        self._stages = tuple(tuple(stage) for stage in stages)
        processes = [process for stage in self._stages for process in stage]
        if not all(self._stages) or not processes or len(set(processes)) != len(processes):
            raise LocalProtocolError(f"stages {self._stages}: give each process once, and no empty stage")
        if len(processes) > PROCESSES_MAX:
            raise LocalProtocolError(f"{len(processes)} processes; {PROCESSES_MAX} is the bound")
        if answer_ns <= 0 or probation_ns < 0:
            raise LocalProtocolError("give a time for answers, and a probation of 0 or more")
        self._answer_ns = answer_ns
        self._probation_ns = probation_ns
        self._living = dict.fromkeys(processes)
        self._awaited: set[str] = set()
        self._told: set[str] = set()  # processes that have the order to change
        self._actors: dict[str, int] = {}
        self._unheard: set[str] = set()  # who was lost before it said that it has settled
        self._stage = 0
        self._reason = ""
        self.phase = UpgradePhase.NEW
        self.fate = Fate.OPEN

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Handle one event and return the actions. Raises `LocalProtocolError`."""
        actions: list[Action] = []
        if self.phase is UpgradePhase.OVER:
            return actions
        match event:
            case Begin():
                if self.phase is not UpgradePhase.NEW:
                    raise LocalProtocolError("the change has begun already")
                self._order(tuple(self._living), Order.PREPARE, now_ns, actions)
                self.phase = UpgradePhase.PREPARING
            case Voted():
                if self.phase is UpgradePhase.PREPARING:
                    self._answered(event.process, event.why, now_ns, actions)
            case Changed():
                if event.process in self._told and self.phase is UpgradePhase.CHANGING:
                    self._actors[event.process] = event.actors
                    self._answered(event.process, event.why, now_ns, actions)
            case Broke():
                if self.fate is Fate.OPEN:
                    self._decide(Fate.TAKEN_BACK, f"{event.process}: {event.why}", now_ns, actions)
            case Settled():
                if self.phase is UpgradePhase.SETTLING:
                    self._answered(event.process, "", now_ns, actions)
            case ProcessLost():
                self._lost(event, now_ns, actions)
            case TimerFired():
                self._time_is_up(now_ns, actions)
            case _:
                assert_never(event)
        return actions

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a rule that holds between any two events does not."""
        assert self._awaited <= self._living.keys()
        assert (self.fate is Fate.OPEN) == (self.phase not in (UpgradePhase.SETTLING, UpgradePhase.OVER))
        if self.fate is Fate.KEPT:
            assert self._stage == len(self._stages) - 1
            assert self._told >= self._living.keys(), "kept by one that never changed"
        if self.phase in (UpgradePhase.NEW, UpgradePhase.PREPARING):
            assert not self._told
        if self.phase in (UpgradePhase.ON_PROBATION, UpgradePhase.OVER):
            assert not self._awaited

    def _order(self, processes: Sequence[str], order: Order, now_ns: int, actions: list[Action]) -> None:
        """Send the order to all, and wait for their replies."""
        self._awaited = set(processes)
        actions.extend(SendOrder(process=process, order=order) for process in processes)
        actions.append(SetTimer(at_ns=now_ns + self._answer_ns))

    def _answered(self, process: str, why: str, now_ns: int, actions: list[Action]) -> None:
        if why:
            self._decide(Fate.TAKEN_BACK, f"{process}: {why}", now_ns, actions)
            return
        self._awaited.discard(process)
        if not self._awaited:
            self._go_on(now_ns, actions)

    def _go_on(self, now_ns: int, actions: list[Action]) -> None:
        """All processes have replied, or the probation is over."""
        match self.phase:
            case UpgradePhase.PREPARING:
                self._change(now_ns, actions)
            case UpgradePhase.CHANGING:
                self.phase = UpgradePhase.ON_PROBATION
                actions.append(SetTimer(at_ns=now_ns + self._probation_ns))
            case UpgradePhase.ON_PROBATION:
                if self._stage + 1 < len(self._stages):
                    self._stage += 1
                    self._change(now_ns, actions)
                else:
                    self._decide(Fate.KEPT, "", now_ns, actions)
            case UpgradePhase.SETTLING:
                self._finish(actions)
            case UpgradePhase.NEW | UpgradePhase.OVER:
                raise AssertionError(self.phase)
            case _:
                assert_never(self.phase)

    def _change(self, now_ns: int, actions: list[Action]) -> None:
        stage = tuple(process for process in self._stages[self._stage] if process in self._living)
        self.phase = UpgradePhase.CHANGING
        self._told.update(stage)
        self._order(stage, Order.CHANGE, now_ns, actions)
        if not stage:  # all of it are gone
            self._go_on(now_ns, actions)

    def _decide(self, fate: Fate, reason: str, now_ns: int, actions: list[Action]) -> None:
        self.fate, self._reason, self.phase = fate, reason, UpgradePhase.SETTLING
        order = Order.KEEP if fate is Fate.KEPT else Order.TAKE_BACK
        self._order(tuple(self._living), order, now_ns, actions)
        if not self._living:
            self._finish(actions)

    def _lost(self, event: ProcessLost, now_ns: int, actions: list[Action]) -> None:
        if event.process not in self._living:
            return
        del self._living[event.process]
        self._actors.pop(event.process, None)
        if self.fate is Fate.OPEN and (event.process in self._told or not self._living):
            # A version that ends its process is worse than one that raises.
            self._awaited.discard(event.process)
            reason = f"{event.process} was lost on probation: {event.why}"
            self._decide(Fate.TAKEN_BACK, reason, now_ns, actions)
        elif event.process in self._awaited:
            if self.phase is UpgradePhase.SETTLING:
                self._unheard.add(event.process)
            self._answered(event.process, "", now_ns, actions)

    def _time_is_up(self, now_ns: int, actions: list[Action]) -> None:
        match self.phase:
            case UpgradePhase.PREPARING | UpgradePhase.CHANGING:
                what = f"{', '.join(sorted(self._awaited))} did not answer in time ({self.phase.value})"
                self._decide(Fate.TAKEN_BACK, what, now_ns, actions)
            case UpgradePhase.ON_PROBATION:
                self._go_on(now_ns, actions)
            case UpgradePhase.SETTLING:
                self._finish(actions)
            case UpgradePhase.NEW | UpgradePhase.OVER:
                pass
            case _:
                assert_never(self.phase)

    def _finish(self, actions: list[Action]) -> None:
        waited, self._awaited = self._awaited, set()
        self.phase = UpgradePhase.OVER
        actions.append(CancelTimer())
        if not waited:  # else they go on to settle, and then each is on its own
            actions.extend(SendOrder(process=process, order=Order.DISMISS) for process in self._living)
        actors = sum(self._actors.values()) if self.fate is Fate.KEPT else 0
        # A lost process may live on without us, and settle with those that are left there.
        silent = tuple(sorted(waited | self._unheard))
        actions.append(Finished(fate=self.fate, reason=self._reason, actors=actors, silent=silent))


def _build_upgrade(config: Mapping[str, Any]) -> UpgradeMachine:
    return UpgradeMachine(
        config["stages"], answer_ns=config["answer_ns"], probation_ns=config["probation_ns"]
    )


UPGRADE: MachineKind[Event, Action] = register(
    "upgrade", 1, _build_upgrade, events=Event, actions=Action, states=(UpgradeMachine,)
)
"""The coordinator of a change of code; its configuration: the arguments of `UpgradeMachine`."""


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
