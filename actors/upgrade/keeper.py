"""A process that comes after a change of code runs the new one: the driver of `ledger`.

It listens at `CODE_ACTOR` in every process of a view. What the processes of the view tell comes first on each
link, and a rank enters its first view only when all of its members have told it: so nothing that its script
spawns handles a message in an old version.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import structlog

from zbmd.actors.contracts import Contract
from zbmd.actors.core import wire
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.context import sender_process
from zbmd.actors.core.ref import Down
from zbmd.actors.core.services import Service
from zbmd.actors.errors import UpgradeRefused
from zbmd.actors.upgrade import ledger as u
from zbmd.actors.upgrade.ledger import UPGRADE_LEDGER
from zbmd.actors.upgrade.local import adopt
from zbmd.transport.capture.tap import Tap

if TYPE_CHECKING:
    from zbmd.actors.core.system import CoreSystem

log: Final = structlog.stdlib.get_logger("zbmd.actors.upgrade")

CODE_ACTOR: Final = "code"
CHANGES_AT_ONCE: Final = 64


class CodeReport(Contract, id="zbmd.upgrade.code"):
    """Changes of code that are in force; `more`: another message with the rest follows."""

    changes: Annotated[tuple[u.CodeChange, ...], msgspec.Meta(max_length=CHANGES_AT_ONCE)]
    more: bool


class CodeActor(Actor):
    """Receives the changes that other processes know."""

    captured = False

    def __init__(self, keeper: CodeKeeper) -> None:
        self._keeper = keeper

    @on(CodeReport)
    async def changes_reported(self, message: CodeReport) -> None:
        """Handle the changes that another process knows."""
        self._keeper.heard(sender_process(), message)


class CodeKeeper(Service):
    """The changes that one system knows. speaks_to: which linked processes have a keeper, too.

    on_heard: told when a process has said what it knows.
    """

    def __init__(
        self,
        system: CoreSystem,
        speaks_to: Callable[[str], bool],
        on_heard: Callable[[], None] = lambda: None,
    ) -> None:
        self._system = system
        self._speaks_to = speaks_to
        self._on_heard = on_heard
        self._ledger = u.CodeLedger()
        name = f"code of {system.name}#{system.incarnation}"
        self._tap = Tap(system.recorder, UPGRADE_LEDGER, name, self._ledger, {})
        self._closed = False
        self._parts: dict[str, tuple[u.CodeChange, ...]] = {}
        system.add_service(self)

    async def open(self) -> None:
        """Spawn the actor that receives the changes of other processes."""
        self._system.watch(await self._system.spawn(CodeActor, self, name=CODE_ACTOR), self._end)

    def has_heard(self, process: str, incarnation: int) -> bool:
        """Return whether this incarnation has reported its changes."""
        return self._ledger.has_heard(process, incarnation)

    def link_opening(self, process: str, incarnation: int) -> None:
        """A link to a process of the view stands; nothing was sent on it yet."""
        if self._speaks_to(process):
            self._feed(u.LinkUp(process=process, incarnation=incarnation))

    def link_down(self, process: str, incarnation: int) -> None:
        """A link to a process of the view has ended."""
        self._parts.pop(process, None)
        self._feed(u.LinkDown(process=process, incarnation=incarnation))

    def kept(self, change: u.CodeChange) -> None:
        """Note a change that this process took part in and that all keep."""
        self._feed(u.KeptHere(change=change))

    def heard(self, process: str, message: CodeReport) -> None:
        """A process reports the changes that it knows."""
        changes = self._parts.pop(process, ()) + message.changes
        if message.more and len(changes) <= u.CHANGES_MAX:
            self._parts[process] = changes
            return
        incarnation = self._system.peers.get(process, 0)
        self._feed(u.ChangesReported(process=process, incarnation=incarnation, changes=changes))
        self._on_heard()

    def _end(self, down: Down) -> None:
        self._closed = True
        self._tap.close(str(down.reason))

    def _feed(self, event: u.Event) -> None:
        if self._closed:
            return  # the system stops: nobody runs anything any more
        actions = self._tap.handle(event, now_ns=time.monotonic_ns())
        self._tap.check_invariants()
        for action in actions:
            match action:
                case u.TellChanges(process=process, changes=changes):
                    self._tell(process, changes)
                case u.Adopt(change=change):
                    self._adopt(change)
                case u.Clash(process=process, change=change, known=known):
                    log.error(
                        "two changes of one class: the first that was known here holds",
                        old=change.old,
                        here=known,
                        there=change.new,
                        process=process,
                    )

    def _tell(self, process: str, changes: tuple[u.CodeChange, ...]) -> None:
        peer = self._system.peer(process)
        if peer is None:
            return
        for first in range(0, max(1, len(changes)), CHANGES_AT_ONCE):
            more = first + CHANGES_AT_ONCE < len(changes)
            report = CodeReport(changes[first : first + CHANGES_AT_ONCE], more)
            peer.post_payload(wire.encode_tell(CODE_ACTOR, 0, "", report))

    def _adopt(self, change: u.CodeChange) -> None:
        try:
            adopt(self._system, change.old, change.new)
        except UpgradeRefused as error:
            log.error("a change of code of other processes cannot be made here", reason=str(error))
