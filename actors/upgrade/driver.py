"""Changing the code of actors while they run, over the processes of a job: the drivers of the two machines.

The coordinator is an actor of whoever asks for the change; it spawns an agent in every process. Orders,
votes and the news of an end wait in the same mailbox, so that each comes after what was said before it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final, assert_never

import msgspec

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.actor_base import ActorBase, find_remote_class, remote_class_id
from zbmd.actors.core.context import sender_process
from zbmd.actors.core.ref import Down, Reason, Ref
from zbmd.actors.core.system import CoreSystem
from zbmd.actors.core.wire import TEXT_CHARS_MAX
from zbmd.actors.errors import UnknownActorClass, UpgradeRefused, UpgradeUndone
from zbmd.actors.upgrade import events as ev
from zbmd.actors.upgrade.coordinator import (
    COORDINATOR,
    PROCESSES_MAX,
    UPGRADE,
    UPGRADE_AGENT,
    UpgradeAgent,
    UpgradeMachine,
)
from zbmd.actors.upgrade.keeper import CodeKeeper
from zbmd.actors.upgrade.ledger import CodeChange
from zbmd.actors.upgrade.local import LocalUpgrade, check
from zbmd.transport.capture.tap import Tap
from zbmd.transport.errors import LocalProtocolError, ZbmdError
from zbmd.transport.machine import SetTimer, TimerFired

ORPHAN_S = 60.0
"""An agent that nobody has told anything by then ends."""
WHY_CHARS_MAX = 2048

Why = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
Process = Annotated[str, msgspec.Meta(max_length=64)]


class Prepare(Contract, id="zbmd.upgrade.prepare", version=2, compatible_from=1):
    """The first order: the change, the processes that take part, and the leader. lasting: see `upgrade`."""

    coordinator: Ref
    old: Why
    new: Why
    processes: Annotated[tuple[Process, ...], msgspec.Meta(max_length=PROCESSES_MAX)]
    tries: bool
    lasting: bool = False


class OrderMessage(Contract, id="zbmd.upgrade.order"):
    """Any other order; `by_coordinator` is False if another agent leads."""

    order: ev.Order
    by_coordinator: bool


class VoteReport(Contract, id="zbmd.upgrade.vote"):
    """To the coordinator: whether the change can be made in this process."""

    why: Why


class ChangeReport(Contract, id="zbmd.upgrade.changed"):
    """To the coordinator: all actors have changed, or the reason why not."""

    actors: int
    why: Why


class CrashReport(Contract, id="zbmd.upgrade.broke"):
    """To the coordinator: the new version has crashed."""

    why: Why


class SettledReport(Contract, id="zbmd.upgrade.settled"):
    """To the leader: this process is done."""


class DecisionRequest(Contract, id="zbmd.upgrade.fate_ask"):
    """An agent that leads now asks another for the decision."""


class DecisionReply(Contract, id="zbmd.upgrade.fate"):
    """The decision that a process knows."""

    fate: ev.Fate


class ProcessEnded(Contract, id="zbmd.upgrade.gone"):
    """To itself, behind all waiting messages: a process has ended; empty for the coordinator."""

    process: str
    why: str


class TimerElapsed(Contract, id="zbmd.upgrade.time_up"):
    """To itself: a timer has fired."""

    number: int


class Done(Contract, id="zbmd.upgrade.done"):
    """To itself: work ordered by the machine is done, or has failed."""

    what: str
    actors: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgraded:
    """A change of code that was made. actors: how many had their code changed, and run; silent: processes
    that have not said, in time or before they were lost, that the probation is over for them. Those that live
    will learn of it among themselves; in another part of a cluster they may have the old version run again.
    """

    actors: int
    processes: tuple[str, ...]
    silent: tuple[str, ...]


PROBATION_S: Final = 5.0
"""The time that a new version of an actor's code is on probation in each stage."""
ANSWER_S: Final = 30.0
"""The time that a process may take to change its actors: for the message that each is at."""


async def upgrade(
    system: CoreSystem,
    old: type[ActorBase],
    new: type[ActorBase],
    processes: Sequence[str],
    *,
    canaries: int = 1,
    probation_s: float = PROBATION_S,
    answer_s: float = ANSWER_S,
    lasting: bool = False,
) -> Upgraded:
    """Turn all actors of `old` in these processes into actors of `new`, each between two of its messages.

    canaries: in how many processes the new version stands its probation before the others get it, from the
    first on; probation_s: how long, in each stage. If it crashes there, or a process is lost that runs it,
    all run `old` again, and the message in which it crashed is handled by `old`: none is lost, none
    reordered. 0 changes without a way back. answer_s: for the message that each actor is at.
    lasting: processes of the view that take no part, or come later, run it as well once it is kept.
    Beyond this process both classes are declared with `remote=True` and imported there.
    Raises `UpgradeRefused` if nothing was changed, `UpgradeUndone` if it was taken back.
    """
    check(old, new, tries=probation_s > 0)
    names = tuple(dict.fromkeys(processes))
    if not names or not 0 < canaries <= PROCESSES_MAX:
        raise UpgradeRefused(f"{len(names)} processes, {canaries} canaries: give at least one of each")
    if any(name != system.name for name in names):
        for cls in (old, new):
            if find_remote_class(remote_class_id(cls)) is not cls:
                raise UpgradeRefused(f"{cls.__qualname__} is not declared with remote=True")
    stages = [stage for stage in (names[:canaries], names[canaries:]) if stage]
    times_ns = {"answer_ns": int(answer_s * 1e9), "probation_ns": int(probation_s * 1e9)}
    machine = UpgradeMachine(stages, **times_ns)
    over: asyncio.Future[ev.Finished] = system.loop.create_future()
    name = f"zbmd-upgrade-{os.urandom(4).hex()}"
    classes = (old, new)
    tap = Tap(system.recorder, UPGRADE, name, machine, {"stages": stages, **times_ns})
    coordinator = await system.spawn(
        Coordinator, tap, names, classes, (probation_s > 0, lasting), answer_s, over, name=name
    )
    try:
        finished = await over
    finally:
        if not over.done():
            over.cancel()
        await system.terminate(coordinator, text="the change is over, or was given up")
    if finished.fate is ev.Fate.KEPT:
        return Upgraded(actors=finished.actors, processes=names, silent=finished.silent)
    words = f"{old.__qualname__} to {new.__qualname__}: {finished.reason}"
    silent = f"; {', '.join(finished.silent)} did not say that it is done there" if finished.silent else ""
    raise UpgradeUndone(f"{words}; version {old.version} runs again{silent}")


def _sender(actor: Actor) -> str:
    return sender_process() or actor.system.name


class Coordinator(Actor):
    """Runs the coordinator's machine, in the process that requested the change."""

    captured = False

    def __init__(
        self,
        machine: Tap[ev.Event, ev.Action],
        processes: tuple[str, ...],
        classes: tuple[type[ActorBase], type[ActorBase]],
        options: tuple[bool, bool],
        answer_s: float,
        over: asyncio.Future[ev.Finished],
    ) -> None:
        self._machine = machine
        self._processes = processes
        self._classes = classes
        self._tries, self._lasting = options
        self._answer_s = answer_s
        self._over = over
        self._agents: dict[str, Ref] = {}
        self._timer = 0

    async def started(self) -> None:
        """Spawn an agent in each process, or learn why that fails."""
        errors = await asyncio.gather(*(self._spawn_agent(process) for process in self._processes))
        await self._handle(ev.Begin())
        for process, error in zip(self._processes, errors, strict=True):
            if error is not None:
                await self._handle(ev.Voted(process=process, why=str(error)))
                await self._handle(ev.ProcessLost(process=process, why="there is no agent"))

    async def stopping(self, reason: Reason) -> None:
        """End the recording."""
        self._machine.close(str(reason))

    async def _spawn_agent(self, process: str) -> ZbmdError | None:
        name = f"{self.ref.actor}-agent"
        try:
            agent = await self.system.spawn_on(process, Agent, name=name, timeout=self._answer_s)
        except ZbmdError as error:
            return error
        self._agents[process] = agent
        self.system.watch(agent, partial(self._agent_ended, process))
        return None

    def _agent_ended(self, process: str, down: Down) -> None:
        if self.is_alive:
            self._running_cell().timers.deliver(ProcessEnded(process, str(down.reason)[:WHY_CHARS_MAX]))

    @on(VoteReport)
    async def voted(self, message: VoteReport) -> None:
        """A process has checked the change."""
        await self._handle(ev.Voted(process=_sender(self), why=message.why))

    @on(ChangeReport)
    async def changed(self, message: ChangeReport) -> None:
        """A process has changed its actors."""
        await self._handle(ev.Changed(process=_sender(self), actors=message.actors, why=message.why))

    @on(CrashReport)
    async def broke(self, message: CrashReport) -> None:
        """The new version has crashed in a process."""
        await self._handle(ev.Broke(process=_sender(self), why=message.why))

    @on(SettledReport)
    async def settled(self, _: SettledReport) -> None:
        """A process has finished."""
        await self._handle(ev.Settled(process=_sender(self)))

    @on(ProcessEnded)
    async def gone(self, message: ProcessEnded) -> None:
        """A process has ended."""
        await self._handle(ev.ProcessLost(process=message.process, why=message.why))

    @on(TimerElapsed)
    async def time_up(self, message: TimerElapsed) -> None:
        """The timer has fired, unless it was set again."""
        if message.number == self._timer:
            await self._handle(TimerFired())

    async def _handle(self, event: ev.Event) -> None:
        actions = self._machine.handle(event, now_ns=time.monotonic_ns())
        self._machine.check_invariants()
        for action in actions:
            match action:
                case ev.SendOrder():
                    await self._tell(action)
                case SetTimer():
                    self._timer += 1
                    delay_s = max(0.0, (action.at_ns - time.monotonic_ns()) / 1e9)
                    self.after(delay_s, TimerElapsed(self._timer))
                case ev.CancelTimer():
                    self._timer += 1
                case ev.Finished():
                    if not self._over.done():
                        self._over.set_result(action)
                case _:
                    assert_never(action)

    async def _tell(self, tell: ev.SendOrder) -> None:
        agent = self._agents.get(tell.process)
        if agent is None:
            return  # there is none, which the machine hears
        message: Contract = OrderMessage(tell.order, by_coordinator=True)
        if tell.order is ev.Order.PREPARE:
            old, new = (remote_class_id(cls) for cls in self._classes)
            message = Prepare(self.ref, old, new, self._processes, self._tries, self._lasting)
            if agent.process == self.system.name:  # where a class need not be known by its name
                cell = self.system.find(agent.actor, agent.incarnation)
                if cell is not None and isinstance(cell.actor, Agent):
                    cell.actor.classes = self._classes
        try:
            await agent.tell(message)
        except ZbmdError as error:
            self._running_cell().timers.deliver(ProcessEnded(tell.process, str(error)[:WHY_CHARS_MAX]))


class Agent(Actor, remote=True):
    """Runs the agent's machine in one process. Ends with the change, or `ORPHAN_S` after its last message."""

    captured = False

    def __init__(self) -> None:
        self.classes: tuple[type[ActorBase], type[ActorBase]] | None = None
        self._machine: Tap[ev.LocalEvent, ev.LocalAction] | None = None
        self._change: LocalUpgrade | None = None
        self._prepare: Prepare | None = None
        self._watched = False

    async def started(self) -> None:
        """Wait for the first order."""
        self.after(ORPHAN_S, TimerElapsed(0))

    async def stopping(self, reason: Reason) -> None:
        """End the recording."""
        if self._machine is not None:
            self._machine.close(str(reason))

    @on(TimerElapsed)
    async def time_up(self, _: TimerElapsed) -> None:
        """End: the spawner never sent the first order."""
        if self._machine is None:
            self.stop("nobody has told it what to do")

    @on(Prepare)
    async def prepare(self, message: Prepare) -> None:
        """Handle the first order."""
        if self._machine is not None or message.coordinator.process != _sender(self):
            raise LocalProtocolError(f"{message!r:.200} by {_sender(self)} comes too late, or from another")
        self._prepare = message
        me, processes = self.system.name, message.processes
        config = {"me": me, "processes": list(processes)}
        machine = UpgradeAgent(me, processes)
        self._machine = Tap(self.system.recorder, UPGRADE_AGENT, self.ref.actor, machine, config)
        self.system.watch(message.coordinator, partial(self._ended, COORDINATOR))
        await self._handle(ev.Ordered(leader=COORDINATOR, order=ev.Order.PREPARE))

    @on(OrderMessage)
    async def ordered(self, message: OrderMessage) -> None:
        """Handle any other order."""
        leader = COORDINATOR if message.by_coordinator else _sender(self)
        await self._handle(ev.Ordered(leader=leader, order=message.order))

    @on(SettledReport)
    async def follower_settled(self, _: SettledReport) -> None:
        """Handle the report of a process that is done; this process leads."""
        await self._handle(ev.FollowerSettled(process=_sender(self)))

    @on(DecisionRequest)
    async def fate_asked(self, _: DecisionRequest) -> None:
        """Handle the message of a new leader."""
        await self._handle(ev.FateAsked(leader=_sender(self)))

    @on(DecisionReply)
    async def fate_reported(self, message: DecisionReply) -> None:
        """Handle what another process knows."""
        await self._handle(ev.FateReported(process=_sender(self), fate=message.fate))

    @on(ProcessEnded)
    async def gone(self, message: ProcessEnded) -> None:
        """Handle the end of a process that led or could lead."""
        if not self._watched and self._prepare is not None:
            self._watched = True
            for process in self._prepare.processes:
                if process != self.system.name:
                    self.system.watch(self._agent(process), partial(self._ended, process))
        await self._handle(ev.LeaderLost(process=message.process))

    @on(Done)
    async def done(self, message: Done) -> None:
        """Handle the end of work in this process."""
        match message.what:
            case "change":
                await self._handle(ev.LocalChanged(actors=message.actors, why=message.why))
            case "break":
                await self._handle(ev.LocalBroke(why=message.why))
            case _:
                await self._handle(ev.LocalSettled())

    def _ended(self, process: str, down: Down) -> None:
        self._note(ProcessEnded(process, str(down.reason)[:WHY_CHARS_MAX]))

    def _note(self, message: Contract) -> None:
        """Send to itself behind all waiting messages, even if the mailbox is full."""
        if self.is_alive:
            self._running_cell().timers.deliver(message)

    def _agent(self, process: str) -> Ref:
        return self.system.ref(f"{process}/{self.ref.actor}")

    async def _handle(self, event: ev.LocalEvent) -> None:
        if self._machine is None:
            return
        actions = self._machine.handle(event, now_ns=time.monotonic_ns())
        self._machine.check_invariants()
        for action in actions:
            await self._perform(action)

    async def _perform(self, action: ev.LocalAction) -> None:
        assert self._prepare is not None
        match action:
            case ev.Check():
                await self._handle(ev.LocalChecked(why=self._check(self._prepare)))
            case ev.ChangeActors():
                assert self._change is not None
                self._change.change(partial(self._done, "change"))
            case ev.KeepNew():
                assert self._change is not None
                self._change.keep(partial(self._done, "keep"))
                keeper = self.system.service(CodeKeeper)
                if self._prepare.lasting and keeper is not None:
                    keeper.kept(CodeChange(self._prepare.old, self._prepare.new))
            case ev.TakeBack():
                if self._change is None:
                    await self._handle(ev.LocalSettled())
                else:
                    self._change.take_back(partial(self._done, "take back"))
            case ev.Voted() | ev.Changed() | ev.Broke() | ev.Settled():
                await self._tell(self._prepare.coordinator, _contract_of(action))
            case ev.SaySettled():
                await self._tell(self._agent(action.leader), SettledReport())
            case ev.AskFate():
                await self._tell(self._agent(action.process), DecisionRequest())
            case ev.TellFate():
                await self._tell(self._agent(action.leader), DecisionReply(action.fate))
            case ev.TellOther():
                order = OrderMessage(action.order, by_coordinator=False)
                await self._tell(self._agent(action.process), order)
            case ev.End():
                self.stop("the change is over")
            case _:
                assert_never(action)

    def _check(self, prepare: Prepare) -> str:
        """Find the classes; return the reason if the change cannot be made."""
        try:
            if self.classes is None:
                self.classes = (_find(prepare.old, self.system), _find(prepare.new, self.system))
            old, new = self.classes
            self._change = LocalUpgrade(
                self.system, old, new, tries=prepare.tries, on_broke=partial(self._done, "break", 0)
            )
        except ZbmdError as error:
            return str(error)[:WHY_CHARS_MAX] or type(error).__name__
        return ""

    def _done(self, what: str, actors: int, why: str) -> None:
        self._note(Done(what, actors, why[:WHY_CHARS_MAX]))

    async def _tell(self, ref: Ref, message: Contract) -> None:
        try:
            await ref.tell(message)
        except ZbmdError:
            return  # it is gone, as the watch reports


def _contract_of(what: ev.ToCoordinator) -> Contract:
    match what:
        case ev.Voted():
            return VoteReport(what.why)
        case ev.Changed():
            return ChangeReport(what.actors, what.why)
        case ev.Broke():
            return CrashReport(what.why)
        case ev.Settled():
            return SettledReport()
        case _:
            assert_never(what)


def _find(class_id: str, system: CoreSystem) -> type[ActorBase]:
    cls = find_remote_class(class_id)
    if cls is None:
        raise UnknownActorClass(
            f"{system.name} has no actor class {class_id} with remote=True; import its module there first"
        )
    return cls
