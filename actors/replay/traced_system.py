"""An actor system in which what actors do goes by way of their lives (`ActorLife`), recorded or replayed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor_base import ActorBase, remote_class_id
from zbmd.actors.core.cell import ActorCell
from zbmd.actors.core.context import current_cell
from zbmd.actors.core.mailbox import MailboxSpec
from zbmd.actors.core.native._turns import Call, Strand, Turns
from zbmd.actors.core.ref import Ref
from zbmd.actors.core.signals import Down, Monitor, Reason
from zbmd.actors.core.system import STOP_S, ActorInfo
from zbmd.actors.core.wire import Plain, reason_data
from zbmd.actors.directory.names import CALL_S, Group
from zbmd.actors.replay import events as ev
from zbmd.actors.replay.life import ActorLife
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import ZbmdError
from zbmd.transport.link.interface import Link


def current_life() -> ActorLife | None:
    """The life of the actor that runs here and now, if it has one."""
    cell = current_cell.get()
    return None if cell is None else cell.life


class TracedMonitor(Monitor):
    """A monitor that an actor waits for."""

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


class TracedSystem(ActorSystem):
    """See the module's text. For whoever is no actor, or one without a life, it is an `ActorSystem`."""

    _monitor_class = TracedMonitor

    # What actors await.

    # Not async themselves: whoever is no actor is not to pay for one coroutine more.

    def _tell(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, ref: Ref, message: Contract
    ) -> Coroutine[Any, Any, None]:
        cell = current_cell.get()
        if cell is None or cell.life is None:
            return ActorSystem._tell(self, ref, message)
        if isinstance(cell.life, Turns):
            return Call(cell.life, ActorSystem._tell(self, ref, message), ref, message, False)
        return self._tell_traced(ref, message)

    async def _tell_traced(self, ref: Ref, message: Contract) -> None:
        life, strand = _turn("tell()")
        if life is None or strand is None:
            await super()._tell(ref, message)
            return
        number = life.next_call()
        life.act(ev.Told, call=number, to=ev.ref_text(ref), message=life.text(message))
        tell = super()._tell
        await life.call(strand, number, lambda: tell(ref, message), _sent)

    def _ask(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, ref: Ref, message: Contract, wanted: type[Any] | None, timeout: float | None
    ) -> Coroutine[Any, Any, Any]:
        cell = current_cell.get()
        if cell is None or cell.life is None:
            return ActorSystem._ask(self, ref, message, wanted, timeout)
        if isinstance(cell.life, Turns):
            asking = ActorSystem._ask(self, ref, message, wanted, timeout)
            return Call(cell.life, asking, ref, message, True, wanted, timeout)
        return self._ask_traced(ref, message, wanted, timeout)

    async def _ask_traced(
        self, ref: Ref, message: Contract, wanted: type[Any] | None, timeout: float | None
    ) -> Any:
        life, strand = _turn("ask()")
        if life is None or strand is None:
            return await super()._ask(ref, message, wanted, timeout)
        number = life.next_call()
        life.act(
            ev.Asked,
            call=number,
            to=ev.ref_text(ref),
            message=life.text(message),
            timeout_s=_seconds(timeout),
            reply=None if wanted is None else wanted.__name__,
        )
        ask = super()._ask
        return await life.call(strand, number, lambda: ask(ref, message, wanted, timeout), life.answered)

    async def cast(self, refs: Sequence[Ref], message: Contract) -> dict[Ref, ZbmdError]:
        """As `ActorSystem.cast`."""
        life, strand = _turn("cast()")
        if life is None or strand is None:
            return await super().cast(refs, message)
        refs = list(refs)
        number = life.next_call()
        to = [ev.ref_text(ref) for ref in refs]
        life.act(ev.CastTo, call=number, to=to, message=life.text(message))
        cast = super().cast

        async def perform() -> dict[int, ZbmdError]:
            failed = await cast(refs, message)
            return {place: failed[ref] for place, ref in enumerate(refs) if ref in failed}

        failed = await life.call(strand, number, perform, _cast_done)
        return {refs[place]: error for place, error in failed.items()}

    async def spawn(
        self,
        cls: type[ActorBase],
        *args: Any,
        name: str | None = None,
        mailbox: MailboxSpec | None = None,
        link_to: Ref | None = None,
        **kwargs: Any,
    ) -> Ref:
        """As `ActorSystem.spawn`."""
        spawn = super().spawn

        async def perform() -> Ref:
            return await spawn(cls, *args, name=name, mailbox=mailbox, link_to=link_to, **kwargs)

        return await self._spawned(self.name, cls, (args, kwargs), name, perform)

    async def spawn_on(
        self,
        process: str,
        cls: type[ActorBase] | str,
        *args: Plain,
        name: str | None = None,
        timeout: float | None = None,
        parent: Ref | None = None,
    ) -> Ref:
        """As `ActorSystem.spawn_on`."""
        spawn_on = super().spawn_on

        async def perform() -> Ref:
            return await spawn_on(process, cls, *args, name=name, timeout=timeout, parent=parent)

        return await self._spawned(process, cls, (args, {}), name, perform)

    async def _spawned(
        self,
        process: str,
        cls: type[ActorBase] | str,
        arguments: tuple[Sequence[Any], dict[str, Any]],
        name: str | None,
        perform: Callable[[], Coroutine[Any, Any, Ref]],
    ) -> Ref:
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

    async def terminate(self, ref: Ref, *, timeout: float = STOP_S, text: str = "asked to stop") -> Down:
        """As `ActorSystem.terminate`."""
        life, strand = _turn("terminate()")
        if life is None or strand is None:
            return await super().terminate(ref, timeout=timeout, text=text)
        number = life.next_call()
        life.act(ev.Terminated, call=number, to=ev.ref_text(ref), timeout_s=float(timeout), text=text)
        terminate = super().terminate
        down: Down = await life.call(
            strand, number, lambda: terminate(ref, timeout=timeout, text=text), _down
        )
        return down

    # What actors do at once.

    def exit(self, ref: Ref, reason: Reason) -> None:
        """As `ActorSystem.exit`."""
        life, strand = _turn("exit()")
        if life is None or strand is None:
            super().exit(ref, reason)
            return
        leave = super().exit
        life.act(ev.ExitSent, to=ev.ref_text(ref), reason=reason_data(reason))
        life.do(strand, lambda: leave(ref, reason), _nothing)

    def monitor(self, ref: Ref, *, to: Ref | None = None) -> Monitor:
        """As `ActorSystem.monitor`."""
        life, strand = _turn("monitor()")
        if life is None or strand is None:
            return super().monitor(ref, to=to)
        monitor = super().monitor
        life.act(ev.Monitored, to=ev.ref_text(ref), as_signal=to is not None)
        return life.do(strand, lambda: monitor(ref, to=to), lambda: self._monitor_class(ref, self.loop))

    def link(self, actor: Ref, other: Ref) -> None:
        """As `ActorSystem.link`."""
        life, strand = _turn("link()")
        if life is None or strand is None:
            super().link(actor, other)
            return
        link = super().link
        life.act(ev.Linked, to=ev.ref_text(other))
        life.do(strand, lambda: link(actor, other), _nothing)

    def unlink(self, actor: Ref, other: Ref) -> None:
        """As `ActorSystem.unlink`."""
        life, strand = _turn("unlink()")
        if life is None or strand is None:
            super().unlink(actor, other)
            return
        unlink = super().unlink
        life.act(ev.Unlinked, to=ev.ref_text(other))
        life.do(strand, lambda: unlink(actor, other), _nothing)

    # What no event tells the outcome of.

    def watch(self, ref: Ref, callback: Callable[[Down], None]) -> Callable[[], None]:
        """As `ActorSystem.watch`."""
        _untold("system.watch()")
        return super().watch(ref, callback)

    def create_child(
        self, cls: type[ActorBase], args: Sequence[Any], *, name: str | None, parent: Ref | None
    ) -> ActorCell:
        """As `ActorSystem.create_child`."""
        _untold("system.create_child()")
        return super().create_child(cls, args, name=name, parent=parent)

    def describe(self) -> list[ActorInfo]:
        """As `ActorSystem.describe`."""
        _untold("system.describe()")
        return super().describe()

    @property
    def peers(self) -> dict[str, int]:
        """As `ActorSystem.peers`."""
        _untold("system.peers")
        return super().peers

    def attach(self, link: Link, *, on_closed: Callable[[ZbmdError | None], None] | None = None) -> None:
        """As `ActorSystem.attach`."""
        _untold("system.attach()")
        super().attach(link, on_closed=on_closed)

    def detach(self, process: str, reason: str = "detached") -> None:
        """As `ActorSystem.detach`."""
        _untold("system.detach()")
        super().detach(process, reason)

    async def group(self, name: str, *, timeout: float = CALL_S) -> Group:
        """As `ActorSystem.group`."""
        _untold("system.group()")
        return await super().group(name, timeout=timeout)


def _turn(what: str) -> tuple[ActorLife, Strand] | tuple[None, None]:
    """The life and the strand that does `what`, if it is for them to tell of it."""
    life = current_life()
    strand = None if life is None else life.turn(what)
    return (None, None) if life is None or strand is None else (life, strand)


def _seconds(timeout: float | None) -> float | None:
    return None if timeout is None else float(timeout)  # it may be an integer


def _nothing() -> None:
    """What `link` and the like come to where nothing is done."""


def _untold(what: str) -> None:
    life, _ = _turn(what)
    if life is not None:
        life.lose_track(f"{what} was called, whose outcome is not recorded")


def _arguments_text(arguments: tuple[Sequence[Any], dict[str, Any]]) -> str:
    try:
        return ev.encode_text(arguments)
    except (TypeError, ValueError, NotImplementedError, OverflowError, RecursionError):
        return ""


def _sent(number: int, _: object) -> ev.Said[ev.ActorEvent]:
    return ev.said(ev.Sent, call=number)


def _cast_done(number: int, failed: dict[int, ZbmdError]) -> ev.Said[ev.ActorEvent]:
    return ev.said(ev.CastDone, call=number, failed={place: ev.recordable(e) for place, e in failed.items()})


def _spawned_as(number: int, ref: Ref) -> ev.Said[ev.ActorEvent]:
    return ev.said(ev.SpawnedAs, call=number, ref=ev.ref_data(ref))


def _down(number: int, down: Down) -> ev.Said[ev.ActorEvent]:
    return ev.said(ev.DownAwaited, call=number, ref=ev.ref_data(down.ref), reason=reason_data(down.reason))
