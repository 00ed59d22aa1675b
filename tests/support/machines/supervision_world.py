"""A supervision machine whose children obey at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from zbmd.actors.supervision.events import (
    Action,
    AutoShutdown,
    CancelChildTimer,
    ChildExited,
    ChildPolicy,
    ChildStarted,
    ChildStartFailed,
    ChildTimerFired,
    Escalate,
    Event,
    KillChild,
    LeaveDown,
    Refuse,
    Restart,
    SetChildTimer,
    StartChild,
    StartRequested,
    StopChild,
    Stopped,
    Strategy,
)
from zbmd.actors.supervision.machine import SupervisionMachine

SECOND_NS = 1_000_000_000
P, T, E = Restart.PERMANENT, Restart.TRANSIENT, Restart.TEMPORARY
ONE, ALL, REST = Strategy.ONE_FOR_ONE, Strategy.ONE_FOR_ALL, Strategy.REST_FOR_ONE


@dataclass
class World:
    """Children that start and stop at once when told to, unless they are said to be slow or to fail."""

    machine: SupervisionMachine
    now_ns: int = 0
    slow: set[str] = field(default_factory=set[str])
    fails: dict[str, int] = field(default_factory=dict[str, int])
    journal: list[str] = field(default_factory=list[str])
    timers: dict[str, ChildTimerFired] = field(default_factory=dict[str, ChildTimerFired])

    def event(self, event: Event) -> None:
        todo = [event]
        while todo:
            actions = self.machine.handle(todo.pop(0), now_ns=self.now_ns)
            self.machine.check_invariants()
            for action in actions:
                answer = self.perform(action)
                if answer is not None:
                    todo.append(answer)

    def perform(self, action: Action) -> Event | None:
        match action:
            case StartChild():
                self.journal.append(f"+{action.child}{action.incarnation}")
                if action.child in self.slow:
                    return None
                if self.fails.get(action.child, 0) > 0:
                    self.fails[action.child] -= 1
                    return ChildStartFailed(child=action.child, reason="no")
                return ChildStarted(child=action.child)
            case StopChild():
                self.journal.append(f"-{action.child}")
                if action.child in self.slow:
                    return None
                return ChildExited(child=action.child, normal=True, reason="asked")
            case KillChild():
                self.journal.append(f"!{action.child}")
                return ChildExited(child=action.child, normal=False, reason="killed")
            case LeaveDown():
                gone = action.child not in self.machine.states
                self.journal.append(f"_{action.child} ~{action.child}" if gone else f"_{action.child}")
            case Refuse():
                self.journal.append(f"?{action.why.value}")
            case Escalate():
                self.journal.append("escalate")
            case Stopped():
                self.journal.append("stopped")
            case SetChildTimer():
                self.timers[action.child] = ChildTimerFired(
                    child=action.child, incarnation=action.incarnation
                )
            case CancelChildTimer():
                del self.timers[action.child]
        return None

    def fire_timers(self) -> None:
        """Whatever was to happen at a time happens."""
        timers, self.timers = self.timers, {}
        for fired in timers.values():
            self.event(fired)

    def dies(self, child: str, *, normal: bool = False) -> str:
        """The consequences of a child's end."""
        self.journal.clear()
        self.event(ChildExited(child=child, normal=normal, reason="test"))
        return " ".join(self.journal)


def world(
    restarts: str,
    strategy: Strategy = ONE,
    *,
    intensity: int = 3,
    slow: str = "",
    start: bool = True,
    shutdown: str = "",
    auto_shutdown: AutoShutdown = AutoShutdown.NEVER,
) -> World:
    """Children a, b, c … with the restart types given, started; a capital letter is a significant child.

    shutdown: for each child "k" (brutal kill), "5" (s) or "i" (infinity).
    """
    kinds = {"p": P, "t": T, "e": E}
    limits = {"k": 0, "5": 5 * SECOND_NS, "i": None}
    children = [
        ChildPolicy(child=c, restart=kinds[r.lower()], shutdown_ns=limits[s], significant=r.isupper())
        for c, r, s in zip("abcdefgh", restarts, shutdown or "5" * len(restarts), strict=False)
    ]
    made = World(
        SupervisionMachine(
            children,
            strategy=strategy,
            intensity=intensity,
            period_ns=5 * SECOND_NS,
            auto_shutdown=auto_shutdown,
        )
    )
    if start:
        made.event(StartRequested())
        made.slow = set(slow)
    return made
