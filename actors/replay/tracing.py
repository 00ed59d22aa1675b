"""Tracing: what actors do by way of their system is recorded or replayed."""

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
from zbmd.actors.replay._turns import Call, Strand, Turns
from zbmd.actors.replay.traced import TracedActor
from zbmd.actors.system import ActorSystem
from zbmd.transport.capture.codec import captured_name
from zbmd.transport.errors import ZbmdError


def current_traced() -> TracedActor | None:
    """Return the traced actor that runs here and now, if there is one."""
    cell = current_cell.get()
    return None if cell is None else cell.traced


class TracedMonitor(Monitor):
    """A monitor whose calls are recorded."""

    async def down(self, *, timeout: float | None = None) -> Down:
        """As `Monitor.down`."""
        traced, strand = _turn("Monitor.down()")
        if traced is None or strand is None:
            return await super().down(timeout=timeout)
        number = traced.next_call()
        traced.act(ev.AwaitsDown, call=number, to=ev.ref_text(self.ref), timeout_s=_seconds(timeout))
        wait = super().down
        down: Down = await traced.call(strand, number, lambda: wait(timeout=timeout), _down)
        return down

    def cancel(self) -> None:
        """As `Monitor.cancel`."""
        traced, strand = _turn("Monitor.cancel()")
        if traced is None or strand is None:
            super().cancel()
        else:
            traced.act(ev.Unmonitored, to=ev.ref_text(self.ref))
            traced.do(strand, super().cancel, _nothing)


class Tracing:
    """The calls of a system's actors as recorded actions: the `Tracer` of recording and of replay.

    A caller that is no actor, or an actor that is not traced, goes straight through.
    """

    def __init__(self, system: ActorSystem) -> None:
        self._system = system

    # What actors await.

    # Not async themselves: a caller that is no actor does not pay for another coroutine.

    def tell(self, ref: Ref, message: Contract) -> Coroutine[Any, Any, None]:
        """As `Ref.tell`."""
        cell = current_cell.get()
        if cell is None or cell.traced is None:
            return Tell(self._system, ref, message)
        if isinstance(cell.traced, Turns):
            return Call(cell.traced, Tell(self._system, ref, message), ref, message, False)
        return self._tell(ref, message)

    async def _tell(self, ref: Ref, message: Contract) -> None:
        traced, strand = _turn("tell()")
        if traced is None or strand is None:
            await Tell(self._system, ref, message)
            return
        number = traced.next_call()
        traced.act(ev.TellSent, call=number, to=ev.ref_text(ref), message=traced.text(message))
        await traced.call(strand, number, lambda: Tell(self._system, ref, message), _sent)

    def ask(
        self, ref: Ref, message: Contract, wanted: type[Any] | None, timeout: float | None
    ) -> Coroutine[Any, Any, Any]:
        """As `Ref.ask`."""
        cell = current_cell.get()
        if cell is None or cell.traced is None:
            return Asking(self._system, ref, message, wanted, timeout)
        if isinstance(cell.traced, Turns):
            asking = Asking(self._system, ref, message, wanted, timeout)
            return Call(cell.traced, asking, ref, message, True, wanted, timeout)
        return self._ask(ref, message, wanted, timeout)

    async def _ask(self, ref: Ref, message: Contract, wanted: type[Any] | None, timeout: float | None) -> Any:
        traced, strand = _turn("ask()")
        if traced is None or strand is None:
            return await Asking(self._system, ref, message, wanted, timeout)
        number = traced.next_call()
        traced.act(
            ev.Asked,
            call=number,
            to=ev.ref_text(ref),
            message=traced.text(message),
            timeout_s=_seconds(timeout),
            reply=None if wanted is None else captured_name(wanted),
        )
        return await traced.call(
            strand,
            number,
            lambda: Asking(self._system, ref, message, wanted, timeout),
            traced.answered,
        )

    async def tell_all(
        self,
        refs: Sequence[Ref],
        message: Contract,
        perform: Callable[[], Coroutine[Any, Any, dict[Ref, ZbmdError]]],
    ) -> dict[Ref, ZbmdError]:
        """As `CoreSystem.tell_all`."""
        traced, strand = _turn("tell_all()")
        if traced is None or strand is None:
            return await perform()
        refs = list(refs)
        number = traced.next_call()
        to = [ev.ref_text(ref) for ref in refs]
        traced.act(ev.TellAllSent, call=number, to=to, message=traced.text(message))

        async def failures() -> dict[int, ZbmdError]:
            failed = await perform()
            return {place: failed[ref] for place, ref in enumerate(refs) if ref in failed}

        failed = await traced.call(strand, number, failures, _cast_done)
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
        traced, strand = _turn("spawn()")
        if traced is None or strand is None:
            return await perform()
        number = traced.next_call()
        traced.act(
            ev.Spawned,
            call=number,
            process=process,
            actor_class=remote_class_id(cls),
            name=name,
            arguments=_arguments_text(arguments),
        )
        ref: Ref = await traced.call(strand, number, perform, _spawned_as)
        return ref

    async def terminate(
        self, ref: Ref, timeout: float, text: str, perform: Callable[[], Coroutine[Any, Any, Down]]
    ) -> Down:
        """As `CoreSystem.terminate`."""
        traced, strand = _turn("terminate()")
        if traced is None or strand is None:
            return await perform()
        number = traced.next_call()
        traced.act(ev.Terminated, call=number, to=ev.ref_text(ref), timeout_s=float(timeout), text=text)
        down: Down = await traced.call(strand, number, perform, _down)
        return down

    # What actors do at once.

    def exit(self, ref: Ref, reason: Reason, perform: Callable[[], None]) -> None:
        """As `CoreSystem.exit`."""
        traced, strand = _turn("exit()")
        if traced is None or strand is None:
            perform()
            return
        traced.act(ev.ExitSent, to=ev.ref_text(ref), reason=reason_data(reason))
        traced.do(strand, perform, _nothing)

    def monitor(self, ref: Ref, as_signal: bool, perform: Callable[[], Monitor]) -> Monitor:
        """As `CoreSystem.monitor`."""
        traced, strand = _turn("monitor()")
        if traced is None or strand is None:
            return perform()
        traced.act(ev.Monitored, to=ev.ref_text(ref), as_signal=as_signal)
        return traced.do(strand, perform, lambda: self.new_monitor(ref, self._system.loop))

    def new_monitor(self, ref: Ref, loop: asyncio.AbstractEventLoop) -> Monitor:
        """Return a monitor whose own calls are recorded."""
        return TracedMonitor(ref, loop)

    def link(self, other: Ref, perform: Callable[[], None]) -> None:
        """As `CoreSystem.link`."""
        traced, strand = _turn("link()")
        if traced is None or strand is None:
            perform()
            return
        traced.act(ev.ActorLinked, to=ev.ref_text(other))
        traced.do(strand, perform, _nothing)

    def unlink(self, other: Ref, perform: Callable[[], None]) -> None:
        """As `CoreSystem.unlink`."""
        traced, strand = _turn("unlink()")
        if traced is None or strand is None:
            perform()
            return
        traced.act(ev.Unlinked, to=ev.ref_text(other))
        traced.do(strand, perform, _nothing)

    def unrecorded(self, what: str) -> None:
        """The outcome of this call is not recorded: from here on the actor cannot be replayed."""
        traced, _ = _turn(what)
        if traced is not None:
            traced.lose_track(f"{what} was called, whose outcome is not recorded")

    # Overridden where actors are recorded.

    def creating(self, cls: type[ActorBase], args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        """An actor's constructor is about to run."""
        return None

    def created(self, cell: ActorCell, before: Any) -> None:
        """It has run."""

    def stopped(self) -> None:
        """The system has stopped."""


def _turn(what: str) -> tuple[TracedActor, Strand] | tuple[None, None]:
    """Return the traced actor and the strand that does `what`, if it is theirs to record."""
    traced = current_traced()
    strand = None if traced is None else traced.turn(what)
    return (None, None) if traced is None or strand is None else (traced, strand)


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
