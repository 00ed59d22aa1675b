"""Supervisors of actors: the asyncio driver of the supervision machine, itself an actor."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, assert_never

import msgspec
import structlog

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.actor_base import ActorBase, find_remote_class
from zbmd.actors.core.cell import CellState
from zbmd.actors.core.context import Deferred, DeferredReply
from zbmd.actors.core.ref import Down, Reason, ReasonKind, Ref
from zbmd.actors.core.wire import SPAWN_ARGUMENTS_MAX, Plain
from zbmd.actors.errors import (
    ActorError,
    ActorStartFailed,
    ChildExists,
    DeadActor,
    NoSuchChild,
    TooManyPending,
    UnknownActorClass,
)
from zbmd.actors.supervision import events
from zbmd.actors.supervision.machine import SUPERVISION, SupervisionMachine
from zbmd.transport.capture.tap import Tap
from zbmd.transport.errors import LocalProtocolError, ZbmdError

SHUTDOWN_S = 5.0
REMOTE_START_S = 10.0
MARGIN_S = 1.0
"""The time of a supervisor beyond its children's shutdown times."""

_log = structlog.get_logger("zbmd.supervisor")


class ChildrenFailed(ZbmdError):
    """The supervisor gave up on its children, which are all down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildSpec:
    """One child: `actor(*args)` under `name`, here or in another process (then as `ActorSystem.spawn_on`).

    shutdown_s: seconds from being asked to stop to being killed; None: `SHUTDOWN_S`, and for a nested
    supervisor as long as its own children may take; 0 kills at once, `math.inf` never. significant: its end
    by itself, for good, counts for the supervisor's `auto_shutdown`; not of a permanent child.
    """

    name: str
    actor: type[ActorBase]
    args: tuple[Any, ...] = ()
    restart: events.Restart = events.Restart.PERMANENT
    shutdown_s: float | None = None
    process: str | None = None
    significant: bool = False

    @property
    def longest_s(self) -> float:
        """Return how long it may take to stop, seconds."""
        if self.shutdown_s is not None:
            return self.shutdown_s
        return _stopping_s(self.args[0]) if issubclass(self.actor, Supervisor) else SHUTDOWN_S

    @property
    def policy(self) -> events.ChildPolicy:
        """Return the part of it that the supervision machine uses."""
        shutdown_ns = None if math.isinf(self.longest_s) else int(self.longest_s * 1e9)
        return events.ChildPolicy(
            child=self.name, restart=self.restart, shutdown_ns=shutdown_ns, significant=self.significant
        )


def _stopping_s(children: Sequence[ChildSpec]) -> float:
    return sum(c.longest_s for c in children) + MARGIN_S


class WhichChildren(Contract, id="zbmd.which_children"):
    """Ask a supervisor for its children."""


class AddChild(Contract, id="zbmd.add_child"):
    """Ask a supervisor to start one more child, behind the others; answered by `ChildUp`.

    Without a class it is one more of the supervisor's template, with these arguments after the template's
    own. class_id: `"module:Class"` of a class that is declared with `remote=True` and imported there.
    Fails with `ChildExists`, `UnknownActorClass`, `ActorStartFailed`.
    """

    name: str
    arguments: Annotated[list[Plain], msgspec.Meta(max_length=SPAWN_ARGUMENTS_MAX)] = msgspec.field(
        default_factory=list[Plain]
    )
    class_id: str = ""
    restart: events.Restart = events.Restart.PERMANENT
    shutdown_s: float = SHUTDOWN_S
    process: str | None = None


class ChildUp(Contract, id="zbmd.child_up"):
    """The child has started."""

    ref: Ref


class TerminateChild(Contract, id="zbmd.terminate_child"):
    """Have a supervisor stop a child and leave it down, or forget a temporary one. Answered when it is."""

    name: str


class RestartChild(Contract, id="zbmd.restart_child"):
    """Ask a supervisor to start a child that is down; answered by `ChildUp`."""

    name: str


class DeleteChild(Contract, id="zbmd.delete_child"):
    """Have a supervisor forget a child that is down. Fails with `NoSuchChild`, or `ChildExists` if up."""

    name: str


class Children(Contract, id="zbmd.children"):
    """The children in start order: name, state, number of starts."""

    children: list[tuple[str, str, int]]


@dataclass(slots=True)
class _Running:
    """A child that was started and has not ended."""

    start: asyncio.Task[None] | None = None
    ref: Ref | None = None
    down: Down | None = None


class Supervisor(Actor):
    """Starts its children in order, restarts them as `strategy` says, stops them in reverse order.

    A restarted child keeps its name and has a new incarnation. When more than `intensity` restarts happen
    within `period_s`, the supervisor stops all children and fails, and its own supervisor decides. Nest one
    with `ChildSpec(name=…, actor=Supervisor, args=(children, strategy, intensity, period_s))`.
    Children can be added, stopped, restarted and deleted while it runs, by `AddChild` and its like; template:
    what `AddChild` starts one more of (OTP's simple_one_for_one). auto_shutdown: whether it ends, normally,
    when significant children have ended by themselves; none that `AddChild` adds is.
    """

    captured = False  # its machine is
    trap_exit = True

    def __init__(
        self,
        children: Sequence[ChildSpec],
        strategy: events.Strategy = events.Strategy.ONE_FOR_ONE,
        intensity: int = 3,
        period_s: float = 5.0,
        back_off: events.BackOff | None = None,
        template: ChildSpec | None = None,
        auto_shutdown: events.AutoShutdown = events.AutoShutdown.NEVER,
    ) -> None:
        self._template = template
        self._specs = {spec.name: spec for spec in children}
        if template is not None and template.significant:
            raise LocalProtocolError(f"the template {template.name} is significant: children added never are")
        self._config: dict[str, Any] = {
            "children": [child.policy for child in children],
            "strategy": strategy,
            "intensity": intensity,
            "period_ns": int(period_s * 1e9),
            "back_off": back_off,
            "auto_shutdown": auto_shutdown,
        }
        self._machine = SupervisionMachine(**self._config)
        self._tap = Tap(None, SUPERVISION, "", self._machine, self._config)
        self._running: dict[str, _Running] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._events: deque[tuple[events.Event, Deferred | None]] = deque()  # a few per child
        self._offered: ChildSpec | None = None
        self._wait_up: dict[str, list[Deferred]] = {}
        self._wait_down: dict[str, list[Deferred]] = {}
        self._handling = False
        self._not_up_yet = set(self._specs)
        self._up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._down: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.stopping_s = _stopping_s(children)

    async def started(self) -> None:
        """Start all children; raises `ChildrenFailed` if one cannot be started."""
        name = f"supervisor {self.ref.actor}#{self.ref.incarnation}"
        self._tap = Tap(self.system.recorder, SUPERVISION, name, self._machine, self._config)
        self._running_cell().watch(self._abandon_starts)
        self._handle(events.StartRequested())
        if self._not_up_yet:
            await self._up

    async def stopping(self, reason: Reason) -> None:
        """Stop all children."""
        self._handle(events.StopRequested(reason=str(reason)))
        await self._down

    @on(WhichChildren)
    async def which_children(self, _: WhichChildren) -> Children:
        """Return the children and their states."""
        states = self._machine.states
        return Children([(c, s.value, self._machine.incarnation(c)) for c, s in states.items()])

    @on(AddChild)
    async def add_child(self, message: AddChild) -> ChildUp | DeferredReply:
        """Start a child and add it behind the others."""
        deferred = self.defer()
        try:
            spec = self._offered = self._added(message)
        except ActorError as error:
            deferred.fail(error)
            return deferred
        self.stopping_s = max(self.stopping_s, spec.longest_s + MARGIN_S)
        self._handle(events.AddRequested(policy=spec.policy), deferred)
        return deferred

    @on(TerminateChild)
    async def terminate_child(self, message: TerminateChild) -> DeferredReply | None:
        """Stop a child and leave it down."""
        deferred = self.defer()
        self._handle(events.TerminateRequested(child=message.name), deferred)
        return deferred

    @on(RestartChild)
    async def restart_child(self, message: RestartChild) -> ChildUp | DeferredReply:
        """Start a child that is down."""
        deferred = self.defer()
        self._handle(events.RestartRequested(child=message.name), deferred)
        return deferred

    @on(DeleteChild)
    async def delete_child(self, message: DeleteChild) -> DeferredReply | None:
        """Forget a child that is down."""
        deferred = self.defer()
        self._handle(events.DeleteRequested(child=message.name), deferred)
        return deferred

    def _added(self, message: AddChild) -> ChildSpec:
        if not message.class_id:
            if self._template is None:
                raise UnknownActorClass(f"{self.ref.address} has no template: give the child's class_id")
            arguments = (*self._template.args, *message.arguments)
            return replace(self._template, name=message.name, args=arguments)
        cls = find_remote_class(message.class_id)
        if cls is None:
            raise UnknownActorClass(
                f"{self.system.name} has no actor class {message.class_id} with remote=True"
            )
        return ChildSpec(
            name=message.name,
            actor=cls,
            args=tuple(message.arguments),
            restart=message.restart,
            shutdown_s=message.shutdown_s,
            process=message.process,
        )

    def _handle(self, event: events.Event, deferred: Deferred | None = None) -> None:
        """Handle events one after the other: performing an action may cause the next.

        later: the answer to whoever asked for what the event says.
        """
        self._events.append((event, deferred))
        if self._handling:
            return
        self._handling = True
        try:
            # Killed, a supervisor acts no more; its children go with it, for they are linked to it.
            while self._events and self._running_cell().state is not CellState.DEAD:
                self._handle_one(*self._events.popleft())
        finally:
            self._handling = False

    def _handle_one(self, event: events.Event, deferred: Deferred | None) -> None:
        if isinstance(event, events.ChildExited | events.ChildStartFailed):
            del self._running[event.child]
        actions = self._tap.handle(event, now_ns=time.monotonic_ns())
        self._tap.check_invariants()
        if deferred is not None:
            self._answer_later(event, deferred, actions)
        for action in actions:
            self._perform(action)
        if len(self._machine.states) < len(self._specs):
            self._specs = {name: s for name, s in self._specs.items() if name in self._machine.states}
        if isinstance(event, events.ChildStarted):
            self._tell_up(event.child)

    def _answer_later(
        self, event: events.Event, deferred: Deferred, actions: Sequence[events.Action]
    ) -> None:
        """Reply to the requester, at once or when it is settled."""
        refused = next((a for a in actions if isinstance(a, events.Refuse)), None)
        offered, self._offered = self._offered, None
        if refused is not None:
            deferred.fail(_refusal(refused, self.ref.address))
            return
        match event:
            case events.AddRequested():
                assert offered is not None
                self._specs[offered.name] = offered
                self._wait_up.setdefault(event.policy.child, []).append(deferred)
            case events.RestartRequested():
                self._wait_up.setdefault(event.child, []).append(deferred)
            case events.TerminateRequested() if event.child in self._running:
                self._wait_down.setdefault(event.child, []).append(deferred)
            case _:
                deferred.reply(None)

    def _tell_up(self, child: str) -> None:
        running = self._running.get(child)
        for deferred in self._wait_up.pop(child, ()):
            if running is not None and running.ref is not None:
                deferred.reply(ChildUp(running.ref))

    def _tell_down(self, child: str, reason: str) -> None:
        for deferred in self._wait_up.pop(child, ()):
            deferred.fail(ActorStartFailed(reason))
        for deferred in self._wait_down.pop(child, ()):
            deferred.reply(None)

    def _perform(self, action: events.Action) -> None:
        match action:
            case events.StartChild():
                if action.incarnation > 1:
                    _log.warning(
                        "restarting", child=action.child, incarnation=action.incarnation, reason=action.reason
                    )
                running = self._running[action.child] = _Running()
                start = self._start(self._specs[action.child], running)
                running.start = self.system.loop.create_task(start, name=f"start {action.child}")
                running.start.add_done_callback(partial(self._start_over, action.child))
                self.system.linger(running.start)
            case events.StopChild():
                self._end(action.child, Reason(ReasonKind.SHUTDOWN, action.reason))
            case events.KillChild():
                self._end(action.child, Reason(ReasonKind.KILLED, action.reason))
            case events.SetChildTimer():
                delay_s = (action.at_ns - time.monotonic_ns()) / 1e9
                fired = events.ChildTimerFired(child=action.child, incarnation=action.incarnation)
                self._timers[action.child] = self.system.loop.call_later(delay_s, self._handle, fired)
            case events.CancelChildTimer():
                self._timers.pop(action.child).cancel()
            case events.LeaveDown():
                _log.info("left down", child=action.child, reason=action.reason)
                self._first_start_over(action.child)  # a sibling's end may have stopped it before it was up
                self._tell_down(action.child, action.reason)
            case events.Refuse():
                _log.info("refused", child=action.child, why=action.why.value)
            case events.Escalate():
                self._give_up(action.reason)
            case events.Stopped():
                self._tap.close(action.reason)
                self._down.set_result(action.reason)
                if not self._up.done():
                    self._up.set_result(None)
                self._running_cell().request_stop(Reason(ReasonKind.SHUTDOWN, action.reason))
            case _:
                assert_never(action)

    async def _start(self, spec: ChildSpec, running: _Running) -> None:
        try:
            ref = await self._spawn(spec, running)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (a failed start, whatever it raised)
            self._handle(events.ChildStartFailed(child=spec.name, reason=f"{type(error).__name__}: {error}"))
            return
        running.ref = ref
        running.start = None
        self._handle(events.ChildStarted(child=spec.name))
        self._first_start_over(spec.name)
        if running.down is not None:
            self._on_down(spec.name, running, running.down)

    def _first_start_over(self, child: str) -> None:
        """The child has started, or never will."""
        self._not_up_yet.discard(child)
        if not self._not_up_yet and not self._up.done():
            self._up.set_result(None)

    def _start_over(self, child: str, start: asyncio.Task[None]) -> None:
        """Report the end of a cancelled start: its task may not have reached its first line."""
        if start.cancelled():
            self._handle(events.ChildStartFailed(child=child, reason="its start was cancelled"))

    def _abandon_starts(self, _: Down) -> None:
        """At the end of this actor, cancel all starts in all processes."""
        for running in self._running.values():
            if running.start is not None:
                running.start.cancel()

    async def _spawn(self, spec: ChildSpec, running: _Running) -> Ref:
        def on_down(down: Down) -> None:
            self._on_down(spec.name, running, down)

        system = self.system
        if spec.process is None or spec.process == system.name:
            cell = system.create_child(spec.actor, spec.args, name=spec.name, parent=self.ref)
            cell.watch(on_down)
            return await system.until_started(cell)
        ref = await system.spawn_on(
            spec.process, spec.actor, *spec.args, name=spec.name, timeout=REMOTE_START_S, parent=self.ref
        )
        system.watch(ref, on_down)
        return ref

    def _on_down(self, child: str, running: _Running, down: Down) -> None:
        running.down = down
        if running.ref is not None:  # else `_start` has yet to say how the start went
            reason = down.reason
            self._handle(events.ChildExited(child=child, normal=reason.is_normal, reason=str(reason)))

    def _end(self, child: str, reason: Reason) -> None:
        running = self._running[child]
        if running.ref is not None:
            self.system.exit(running.ref, reason)
        elif running.start is not None:
            running.start.cancel()

    def _give_up(self, reason: str) -> None:
        self._tap.close(reason)
        self._down.set_result(reason)
        if not self._up.done():
            self._up.set_exception(ChildrenFailed(reason))
        else:
            self._running_cell().request_stop(Reason(ReasonKind.FAILED, reason))


def _refusal(refused: events.Refuse, address: str) -> ActorError:
    child = refused.child
    match refused.why:
        case events.ChildRefusal.UNKNOWN:
            return NoSuchChild(f"{address} has no child {child}")
        case events.ChildRefusal.PRESENT:
            return ChildExists(f"{address} has a child {child}, which is down: restart or delete it")
        case events.ChildRefusal.UP:
            return ChildExists(f"the child {child} of {address} is up, or on its way")
        case events.ChildRefusal.STOPPING:
            return DeadActor(f"{address} stops")
        case events.ChildRefusal.TOO_MANY:
            return TooManyPending(f"{address} has as many children as it may have")
        case _:
            assert_never(refused.why)
