"""A change of code in one process: its actors, the new version on probation, and the way back.

An actor keeps its identity, name, incarnation, mailbox, timers and answers owed: its object becomes one of
the other class, between two messages. On probation a copy of its attributes is made before each message. If
the handler raises, the actor gets them back, as they were for the old version, and the old version handles
the same message: nothing is lost, and nothing overtakes it. What the handler has sent already stays sent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from zbmd.actors.contracts import Contract, contract_tag
from zbmd.actors.core.actor_base import ActorBase, Handler, find_remote_class, handler_table, remote_class_id
from zbmd.actors.core.context import DEFERRED, DeferredReply, current_delivery
from zbmd.actors.core.ref import Down, Reason, ReasonKind, Signal
from zbmd.actors.errors import ActorFailed, UnknownActorClass, UpgradeRefused

if TYPE_CHECKING:
    from zbmd.actors.core.cell import ActorCell
    from zbmd.actors.core.context import ReplyTo
    from zbmd.actors.core.system import CoreSystem

CHANGES_MAX = 1024


class RunningVersion(Enum):
    """The version that an actor runs."""

    NEW = "new"
    OLD = "old"  # again: the new one has crashed, or was taken back


class CodeBook:
    """The classes of a system that others have replaced, and the replacements that are on probation."""

    def __init__(self) -> None:
        self.newer: dict[type[ActorBase], type[ActorBase]] = {}
        self.on_trial: dict[type[ActorBase], LocalUpgrade] = {}
        self.absent: dict[str, str] = {}
        """By name, changes of other processes whose classes were not here when they were reported."""

    @classmethod
    def of(cls, system: CoreSystem) -> CodeBook:
        """Return the book of a system, made at first use."""
        book = system.class_book
        if book is None:
            book = system.class_book = cls()
        assert isinstance(book, cls), "nothing else replaces classes"
        return book

    def current(self, cls: type[ActorBase]) -> type[ActorBase]:
        """Return the class that is spawned for `cls`. Raises `UnknownActorClass` if it is not here."""
        while True:
            if cls not in self.newer and self.absent:
                self._look_for_newer(cls)
            if cls not in self.newer:
                return cls
            cls = self.newer[cls]

    def spawned(self, cell: ActorCell) -> None:
        """Note a new actor of a class that replaces another: it may be on probation."""
        trial = self.on_trial.get(type(cell.actor))
        if trial is not None:
            trial.spawned(cell)

    def _look_for_newer(self, cls: type[ActorBase]) -> None:
        wanted = self.absent.get(remote_class_id(cls))
        if wanted is None:
            return
        new = find_remote_class(wanted)
        if new is None:
            raise UnknownActorClass(
                f"the other processes have changed {remote_class_id(cls)} to {wanted}, which is not here: "
                "import its module before it is spawned, or give it to allow_remote_modules"
            )
        del self.absent[remote_class_id(cls)]
        self.newer[cls] = new


def check(old: type[ActorBase], new: type[ActorBase], *, tries: bool) -> None:
    """Raise `UpgradeRefused`, with advice, if actors of `old` cannot become actors of `new`.

    tries: whether the new version is on probation first.
    """
    names = f"{old.__qualname__} to {new.__qualname__}"
    if new.version == old.version:
        raise UpgradeRefused(f"{names}: both are version {old.version}; declare the new one with another")
    try:
        object.__new__(old).__class__ = new
    except TypeError as error:
        raise UpgradeRefused(f"{names}: {error}; give both the same __slots__, or none") from None
    before, after = handler_table(old), handler_table(new)
    for message, handler in before.items():
        tag = contract_tag(message) if issubclass(message, Contract) else message.__name__
        then = after.get(message)
        if then is None:
            raise UpgradeRefused(
                f"{names}: there is no handler for {tag}, which may wait in a mailbox; keep it, or handle a "
                "newer version of the contract that is declared with compatible_from"
            )
        if not then.replies <= handler.replies:
            more = ", ".join(sorted(reply.__name__ for reply in then.replies - handler.replies))
            raise UpgradeRefused(
                f"{names}: {tag} is answered with {more}, which those who ask do not expect; give the "
                "message a new version for a new answer"
            )
    forth, back = new.code_change.__func__, new.code_change_back.__func__  # type: ignore[attr-defined]
    base_forth, base_back = ActorBase.code_change.__func__, ActorBase.code_change_back.__func__  # type: ignore[attr-defined]
    if tries and forth is not base_forth and back is base_back:
        raise UpgradeRefused(
            f"{names}: it has a code_change and no code_change_back; write one, or give probation_s=0"
        )


def adopt(system: CoreSystem, old: str, new: str) -> None:
    """Turn all actors of `old` into actors of `new`, each before its next message, and all that are spawned.

    As other processes have decided, without a probation: an actor that cannot be changed ends, and its
    supervisor starts a new one. old, new: `"module:Class"`; what is not here (yet) is looked for when it is
    spawned. Does nothing if it is so already. Raises `UpgradeRefused` if they do not fit.
    """
    book = CodeBook.of(system)
    was, becomes = find_remote_class(old), find_remote_class(new)
    if was is None or becomes is None:
        if len(book.absent) >= CHANGES_MAX:
            raise UpgradeRefused(f"{CHANGES_MAX} changes of classes that are not here")
        book.absent[old] = new
        return
    known = book.newer.get(was)
    if known is None and (book.current(becomes) is was or len(book.newer) >= CHANGES_MAX):
        raise UpgradeRefused(f"{new} was replaced in {system.name} before: it cannot replace {old}")
    if was in book.on_trial or becomes in book.on_trial or known not in (None, becomes):
        raise UpgradeRefused(f"{old} is being replaced in {system.name}, or has been, and not by {new}")
    book.newer[was] = becomes
    for cell in system.cells():
        if type(cell.actor) is was:
            cell.at_boundary(partial(_follow, book, cell))


def _follow(book: CodeBook, cell: ActorCell) -> None:
    """Bring an actor to the last version in force; several may have come since its last message."""
    while (new := book.newer.get(old := type(cell.actor))) is not None and new not in book.on_trial:
        try:
            state = new.code_change(_state(cell.actor), old.version)
        except Exception as error:  # noqa: BLE001 (a user's code)
            what = f"code_change of {new.__qualname__} raised {type(error).__name__}: {error}"
            cell.request_stop(Reason(ReasonKind.FAILED, what))
            return
        _become(cell, new, state, handler_table(new))


class LocalUpgrade:
    """One change in one process. on_broke: called each time the new version crashes on probation.

    Raises as `check`, and `UpgradeRefused` if `old` is being replaced, or has been.
    """

    def __init__(
        self,
        system: CoreSystem,
        old: type[ActorBase],
        new: type[ActorBase],
        *,
        tries: bool,
        on_broke: Callable[[str], None],
    ) -> None:
        check(old, new, tries=tries)
        self._book = CodeBook.of(system)
        if old in self._book.newer or old in self._book.on_trial or new in self._book.on_trial:
            raise UpgradeRefused(f"{old.__qualname__} of {system.name} is being replaced, or has been")
        if self._book.current(new) is old or len(self._book.newer) >= CHANGES_MAX:
            raise UpgradeRefused(f"{new.__qualname__} was replaced in {system.name} before; make a new class")
        self._system = system
        self._old, self._new = old, new
        self._tries = tries
        self._on_broke = on_broke
        self._cells: dict[ActorCell, RunningVersion] = {}
        self._pending: dict[ActorCell, Callable[[], None]] = {}
        self._kept = False
        self._failed = ""
        self._done: Callable[[int, str], None] | None = None

    # What is done, once each, in this order.

    def change(self, done: Callable[[int, str], None]) -> None:
        """Change all actors at their next message boundary, and what is spawned at once.

        done: told how many have changed, and why one could not, if so.
        """
        self._book.newer[self._old] = self._new
        if self._tries:
            self._book.on_trial[self._new] = self
        self._each([c for c in self._system.cells() if type(c.actor) is self._old], self._change, done)

    def keep(self, done: Callable[[int, str], None]) -> None:
        """End the probation. Actors in which the new version crashed run it again."""
        self._kept = True
        self._book.on_trial.pop(self._new, None)
        self._book.newer[self._old] = self._new
        for cell, runs in self._cells.items():
            if runs is RunningVersion.NEW:
                _use_table(cell, handler_table(self._new))
        self._each(
            [c for c, runs in self._cells.items() if runs is not RunningVersion.NEW], self._change, done
        )

    def take_back(self, done: Callable[[int, str], None]) -> None:
        """Return all actors to the old version, at their next message boundary."""
        self._forget()
        self._each([c for c, runs in self._cells.items() if runs is RunningVersion.NEW], self._return, done)

    def spawned(self, cell: ActorCell) -> None:
        """An actor of the version on probation was spawned."""
        self._cells[cell] = RunningVersion.NEW
        _use_table(cell, self._guarded())
        cell.watch(partial(self._fresh_ended, cell))

    # One actor after the other.

    def _each(
        self,
        cells: list[ActorCell],
        work: Callable[[ActorCell], None],
        done: Callable[[int, str], None],
    ) -> None:
        """Do `work` on each, at its message boundary. Earlier work that has not been done is dropped."""
        self._pending = {cell: partial(work, cell) for cell in cells}
        self._failed, self._done = "", done
        for cell in cells:
            begun = self._pending.get(cell)
            if begun is None or not cell.accepts:
                self._pending.pop(cell, None)
                continue
            cell.watch(partial(self._ended, cell))
            cell.at_boundary(partial(self._at_boundary, cell, begun))
        self._tell_done()

    def _at_boundary(self, cell: ActorCell, work: Callable[[], None]) -> None:
        if self._pending.get(cell) is not work:
            return  # something else was decided meanwhile
        del self._pending[cell]
        work()
        self._tell_done()

    def _tell_done(self) -> None:
        if self._done is None or self._pending:
            return
        done, self._done = self._done, None
        done(sum(runs is RunningVersion.NEW for runs in self._cells.values()), self._failed)

    def _ended(self, cell: ActorCell, _: Down) -> None:
        self._cells.pop(cell, None)
        if self._pending.pop(cell, None) is not None:
            self._tell_done()

    def _fresh_ended(self, cell: ActorCell, down: Down) -> None:
        runs = self._cells.pop(cell, None)
        on_trial = (
            self._book.on_trial.get(self._new) is self
        )  # else this change is over, and another may hold
        if down.reason.kind is ReasonKind.FAILED and runs is RunningVersion.NEW and on_trial:
            self._broke(f"{cell.ref.address}: {down.reason}")

    def _change(self, cell: ActorCell) -> None:
        actor = cell.actor
        try:
            before = actor.code_state() if self._tries and not self._kept else None
        except Exception as error:  # noqa: BLE001 (whatever a user's attribute raises when it is copied)
            self._failed = (
                f"{cell.ref.address}: its attributes cannot be copied ({type(error).__name__}: {error}); "
                f"override code_state of {self._old.__qualname__}, or give probation_s=0"
            )
            return
        try:
            state = self._new.code_change(_state(actor), self._old.version)
        except Exception as error:  # noqa: BLE001 (a user's code)
            self._failed = f"{cell.ref.address}: code_change raised {type(error).__name__}: {error}"
            if before is not None:
                _become(cell, self._old, before, handler_table(self._old))
            elif self._kept:
                cell.request_stop(Reason(ReasonKind.FAILED, self._failed))
            return
        self._cells[cell] = RunningVersion.NEW
        table = self._guarded() if before is not None else handler_table(self._new)
        _become(cell, self._new, state, table)

    def _return(self, cell: ActorCell) -> None:
        self._go_back(cell, _state(cell.actor))

    def _go_back(self, cell: ActorCell, state: dict[str, Any]) -> None:
        self._cells[cell] = RunningVersion.OLD
        try:
            state = self._new.code_change_back(state, self._old.version)
        except Exception as error:  # noqa: BLE001 (a user's code: its supervisor starts the old version)
            what = f"code_change_back raised {type(error).__name__}: {error}"
            cell.request_stop(Reason(ReasonKind.FAILED, what))
            return
        _become(cell, self._old, state, handler_table(self._old))

    # On probation.

    def _guarded(self) -> dict[type, Handler]:
        """Return the new version's handlers, each guarded so that it can return to the old version."""
        before = handler_table(self._old)
        table: dict[type, Handler] = {}
        for message, handler in handler_table(self._new).items():
            old = before.get(message)
            replies = handler.replies if old is None else handler.replies | old.replies
            table[message] = Handler(self._guard(handler), replies, True)
        return table

    def _guard(self, handler: Handler) -> Callable[[Any, Any], Awaitable[Any]]:
        def run(actor: ActorBase, message: Any) -> Awaitable[Any]:
            return self._run(handler, actor, message)

        run.__qualname__ = getattr(handler.function, "__qualname__", run.__qualname__)  # for those who report
        return run

    async def _run(self, handler: Handler, actor: ActorBase, message: Any) -> Any:
        cell: ActorCell = actor._cell
        reply_to = None if cell.current is None else cell.current.reply_to
        before = actor.code_state()
        try:
            reply = await handler.function(actor, message)
            if type(reply) not in handler.replies and not (
                handler.puts_off and isinstance(reply, DeferredReply)
            ):
                raise TypeError(f"the handler of {type(message).__name__} returned {reply!r:.200}")
        except Exception as error:
            if self._kept or self._cells.get(cell) is not RunningVersion.NEW:
                raise
            self._broke(f"{cell.ref.address} {type(message).__name__}: {type(error).__name__}: {error}")
            is_open = _reclaim(cell, reply_to)  # before what it holds is dropped, an answer put off with it
            self._go_back(cell, before)
            return await self._again(cell, message, error) if is_open else DEFERRED
        return reply

    async def _again(self, cell: ActorCell, message: Any, error: Exception) -> Any:
        """Let the old version handle the message in which the new one crashed."""
        handler = handler_table(self._old).get(type(message))
        if isinstance(message, Signal):
            return None if handler is None else await handler.function(cell.actor, message)
        delivery = cell.current
        assert delivery is not None
        if handler is None:
            why = f"{self._new.__qualname__} crashed in it ({type(error).__name__}: {error})"
            failed = ActorFailed(f"{cell.ref.address} runs version {self._old.version} again: {why}")
            cell.reject(delivery, failed)
            delivery.reply_to = None
            return DEFERRED
        return await handler.function(cell.actor, message)

    def _broke(self, why: str) -> None:
        self._book.newer.pop(self._old, None)  # what is restarted now is of the old version
        self._on_broke(why)

    def _forget(self) -> None:
        self._book.newer.pop(self._old, None)
        self._book.on_trial.pop(self._new, None)


def _reclaim(cell: ActorCell, reply_to: ReplyTo | None) -> bool:
    """Return whether the message is still unanswered: it was not answered or stashed before the crash."""
    delivery = cell.current
    if delivery is None:
        return current_delivery.get() is None  # a signal is at no delivery
    if reply_to is None or delivery.reply_to is reply_to:
        return True
    if not cell.deferred.reclaim(reply_to):
        return False
    delivery.reply_to = reply_to
    return True


def _state(actor: ActorBase) -> dict[str, Any]:
    return {name: value for name, value in vars(actor).items() if name != "_cell"}


def _become(
    cell: ActorCell, cls: type[ActorBase], state: dict[str, Any], table: Mapping[type, Handler]
) -> None:
    """Make the actor one of `cls`, in place: references to the object stay valid."""
    if cell.traced is not None:
        cell.traced.lose_track(f"its code was changed to {cls.__qualname__}, version {cls.version}")
    actor = cell.actor
    actor.__class__ = cls
    attributes = vars(actor)
    attributes.clear()
    attributes.update(state)
    actor._cell = cell
    _use_table(cell, table)


def _use_table(cell: ActorCell, table: Mapping[type, Handler]) -> None:
    """Set the handlers and drop waiting signals that have none any more."""
    cell.handlers = table
    signals = cell.mailbox.signals
    if signals:
        kept = [s for s in signals if type(s) in table or not isinstance(s, Signal)]
        signals.clear()
        signals.extend(kept)
