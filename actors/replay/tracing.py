"""Tracing: what actors do by way of their system becomes part of their lives, recorded or replayed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor_base import ActorBase, remote_class_id
from zbmd.actors.core.cell import ActorCell
from zbmd.actors.core.context import current_cell
from zbmd.actors.core.native._asking import Asking
from zbmd.actors.core.native._serving import Tell
from zbmd.actors.core.ref import Down, Monitor, Reason, Ref
from zbmd.actors.core.wire import reason_data
from zbmd.actors.replay import events as ev
from zbmd.actors.replay.life import ActorLife
from zbmd.actors.replay.native._turns import Call, Strand, Turns
from zbmd.actors.system import ActorSystem
from zbmd.transport.capture.codec import captured_name
from zbmd.transport.errors import ZbmdError


def current_life() -> ActorLife | None:
    """Return the life of the actor that runs here and now, if it has one."""
    cell = current_cell.get()
    return None if cell is None else cell.life


class TracedMonitor(Monitor):
    """A monitor whose calls are recorded."""

    async def down(self, *, timeout: float | None = None) -> Down:
        """As `Monitor.down`."""
        life, strand = _turn("Monitor.down()")
        if life is None or strand is None:
            return await super().down(timeout=timeout)
        number = life.next_call()
        life.act(ev.AwaitsDown, call=number, to=ev.ref_text(self.ref), timeout_s=_seconds(timeout))
        wait = super().down
        down: Down = await life.call(strand, number, lambda: wait(timeout=timeout), _down)
        return down

    def cancel(self) -> None:
        """As `Monitor.cancel`."""
        life, strand = _turn("Monitor.cancel()")
        if life is None or strand is None:
            super().cancel()
        else:
            life.act(ev.Unmonitored, to=ev.ref_text(self.ref))
            life.do(strand, super().cancel, _nothing)


class Tracing:
    """The calls of a system's actors as actions of their lives: the `Tracer` of recording and of replay.

    A caller that is no actor, or an actor without a life, goes straight through.
    """

    def __init__(self, system: ActorSystem) -> None:
        self._system = system

    # What actors await.

    # Not async themselves: a caller that is no actor does not pay for another coroutine.

    def tell(self, ref: Ref, message: Contract) -> Coroutine[Any, Any, None]:
        """As `Ref.tell`."""
        cell = current_cell.get()
        if cell is None or cell.life is None:
            return Tell(self._system, ref, message)
        if isinstance(cell.life, Turns):
            return Call(cell.life, Tell(self._system, ref, message), ref, message, False)
        return self._tell(ref, message)

    async def _tell(self, ref: Ref, message: Contract) -> None:
        life, strand = _turn("tell()")
        if life is None or strand is None:
            await Tell(self._system, ref, message)
            return
        number = life.next_call()
        life.act(ev.TellSent, call=number, to=ev.ref_text(ref), message=life.text(message))
        await life.call(strand, number, lambda: Tell(self._system, ref, message), _sent)

    def ask(
        self, ref: Ref, message: Contract, wanted: type[Any] | None, timeout: float | None
    ) -> Coroutine[Any, Any, Any]:
        """As `Ref.ask`."""
        cell = current_cell.get()
        if cell is None or cell.life is None:
            return Asking(self._system, ref, message, wanted, timeout)
        if isinstance(cell.life, Turns):
            asking = Asking(self._system, ref, message, wanted, timeout)
            return Call(cell.life, asking, ref, message, True, wanted, timeout)
        return self._ask(ref, message, wanted, timeout)

    async def _ask(self, ref: Ref, message: Contract, wanted: type[Any] | None, timeout: float | None) -> Any:
        life, strand = _turn("ask()")
        if life is None or strand is None:
            return await Asking(self._system, ref, message, wanted, timeout)
        number = life.next_call()
        life.act(
            ev.Asked,
            call=number,
            to=ev.ref_text(ref),
            message=life.text(message),
            timeout_s=_seconds(timeout),
            reply=None if wanted is None else captured_name(wanted),
        )
        return await life.call(
            strand,
            number,
            lambda: Asking(self._system, ref, message, wanted, timeout),
            life.answered,
        )

    async def tell_all(
        self,
        refs: Sequence[Ref],
        message: Contract,
        perform: Callable[[], Coroutine[Any, Any, dict[Ref, ZbmdError]]],
    ) -> dict[Ref, ZbmdError]:
        """As `CoreSystem.tell_all`."""
        life, strand = _turn("tell_all()")
        if life is None or strand is None:
            return await perform()
        refs = list(refs)
        number = life.next_call()
        to = [ev.ref_text(ref) for ref in refs]
        life.act(ev.TellAllSent, call=number, to=to, message=life.text(message))

        async def failures() -> dict[int, ZbmdError]:
            failed = await perform()
            return {place: failed[ref] for place, ref in enumerate(refs) if ref in failed}

        failed = await life.call(strand, number, failures, _cast_done)
        return {refs[place]: error for place, error in failed.items()}

    async def spawn(
        self,
        process: str,
        cls: type[ActorBase] | str,
        arguments: tuple[Sequence[Any], Mapping[str, Any]],
        name: str | None,
        perform: Callable[[], Coroutine[Any, Any, Ref]],
    ) -> Ref:
        """As `CoreSystem.spawn` and `spawn_on`."""
        life, strand = _turn("spawn()")
        if life is None or strand is None:
            return await perform()
        number = life.next_call()
        life.act(
            ev.Spawned,
            call=number,
            process=process,
            actor_class=remote_class_id(cls),
            name=name,
            arguments=_arguments_text(arguments),
        )
        ref: Ref = await life.call(strand, number, perform, _spawned_as)
        return ref

    async def terminate(
        self, ref: Ref, timeout: float, text: str, perform: Callable[[], Coroutine[Any, Any, Down]]
    ) -> Down:
        """As `CoreSystem.terminate`."""
        life, strand = _turn("terminate()")
        if life is None or strand is None:
            return await perform()
        number = life.next_call()
        life.act(ev.Terminated, call=number, to=ev.ref_text(ref), timeout_s=float(timeout), text=text)
        down: Down = await life.call(strand, number, perform, _down)
        return down

    # What actors do at once.

    def exit(self, ref: Ref, reason: Reason, perform: Callable[[], None]) -> None:
        """As `CoreSystem.exit`."""
        life, strand = _turn("exit()")
        if life is None or strand is None:
            perform()
            return
        life.act(ev.ExitSent, to=ev.ref_text(ref), reason=reason_data(reason))
        life.do(strand, perform, _nothing)

    def monitor(self, ref: Ref, as_signal: bool, perform: Callable[[], Monitor]) -> Monitor:
        """As `CoreSystem.monitor`."""
        life, strand = _turn("monitor()")
        if life is None or strand is None:
            return perform()
        life.act(ev.Monitored, to=ev.ref_text(ref), as_signal=as_signal)
        return life.do(strand, perform, lambda: self.new_monitor(ref, self._system.loop))

    def new_monitor(self, ref: Ref, loop: asyncio.AbstractEventLoop) -> Monitor:
        """Return a monitor whose own calls are recorded."""
        return TracedMonitor(ref, loop)

    def link(self, other: Ref, perform: Callable[[], None]) -> None:
        """As `CoreSystem.link`."""
        life, strand = _turn("link()")
        if life is None or strand is None:
            perform()
            return
        life.act(ev.Linked, to=ev.ref_text(other))
        life.do(strand, perform, _nothing)

    def unlink(self, other: Ref, perform: Callable[[], None]) -> None:
        """As `CoreSystem.unlink`."""
        life, strand = _turn("unlink()")
        if life is None or strand is None:
            perform()
            return
        life.act(ev.Unlinked, to=ev.ref_text(other))
        life.do(strand, perform, _nothing)

    def unrecorded(self, what: str) -> None:
        """The outcome of this call is not recorded: from here on the actor cannot be replayed."""
        life, _ = _turn(what)
        if life is not None:
            life.lose_track(f"{what} was called, whose outcome is not recorded")

    # Overridden where lives are recorded.

    def creating(self, cls: type[ActorBase], args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        """An actor's constructor is about to run."""
        return None

    def created(self, cell: ActorCell, before: Any) -> None:
        """It has run."""

    def stopped(self) -> None:
        """The system has stopped."""


def _turn(what: str) -> tuple[ActorLife, Strand] | tuple[None, None]:
    """Return the life and the strand that does `what`, if it is for them to tell of it."""
    life = current_life()
    strand = None if life is None else life.turn(what)
    return (None, None) if life is None or strand is None else (life, strand)


def _seconds(timeout: float | None) -> float | None:
    return None if timeout is None else float(timeout)  # it may be an integer


def _nothing() -> None:
    """What `link` and the like come to where nothing is done."""


def _arguments_text(arguments: tuple[Sequence[Any], Mapping[str, Any]]) -> str:
    try:
        return ev.encode_text(arguments)
    except (TypeError, ValueError, NotImplementedError, OverflowError, RecursionError):
        return ""


def _sent(number: int, _: object) -> ev.Record[ev.ActorEvent]:
    return ev.recorded(ev.Sent, call=number)


def _cast_done(number: int, failed: dict[int, ZbmdError]) -> ev.Record[ev.ActorEvent]:
    return ev.recorded(
        ev.TellAllDone, call=number, failed={place: ev.recordable(e) for place, e in failed.items()}
    )


def _spawned_as(number: int, ref: Ref) -> ev.Record[ev.ActorEvent]:
    return ev.recorded(ev.SpawnedAs, call=number, ref=ev.ref_data(ref))


def _down(number: int, down: Down) -> ev.Record[ev.ActorEvent]:
    return ev.recorded(
        ev.DownAwaited, call=number, ref=ev.ref_data(down.ref), reason=reason_data(down.reason)
    )
