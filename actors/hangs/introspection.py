"""Looking inside a process: its actors, what waits for each, what it has done, and who supervises whom."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec

from zbmd.actors.contracts import Contract, contract_tag
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.cell import ActorCell
from zbmd.actors.core.context import DeferredReply
from zbmd.actors.core.peer import Peer
from zbmd.actors.core.ref import Ref
from zbmd.actors.errors import NoReply
from zbmd.actors.hangs.loop_watch import LoopWatch
from zbmd.actors.supervision.supervisor import Children, Supervisor, WhichChildren
from zbmd.transport.errors import ZbmdError
from zbmd.transport.link.base import LinkSide

INSIDE_ACTOR = "inside"
ROWS_MAX = 1024
"""Actors of a process that are listed; the others are counted."""
SUPERVISORS_ASKED_MAX = 256
LINKS_SHOWN_MAX = 1024
RUNS_MAX = 8
ASK_S = 1.0

Name = Annotated[str, msgspec.Meta(max_length=256)]
Directory = Annotated[str, msgspec.Meta(max_length=4096)]


class InsideRequest(Contract, id="zbmd.inside.request"):
    """Ask for the actors of a process, of this one or of one that is linked with it.

    busiest: those with most waiting and most handled, else the first that were spawned.
    """

    process: Name
    busiest: bool


class ActorRow(Contract, id="zbmd.inside.actor"):
    """One actor. waiting: messages; nbytes: of these; turns: how often it had its turn; handles: the message
    that it is at, `"id/version"`; parent: its supervisor's address.
    """

    name: Name
    kind: Name
    version: int
    incarnation: int
    state: Name
    waiting: int
    nbytes: int
    stashed: int
    handled: int
    turns: int
    dropped: int
    handles: Name
    parent: Name


class SupervisorRow(Contract, id="zbmd.inside.supervisor"):
    """A supervisor's children in start order, also those that are down: name, state, number of starts."""

    name: Name
    children: list[tuple[str, str, int]]


class LinkRow(Contract, id="zbmd.inside.link"):
    """A link to another process. carrier: "shm", "tcp" or "rdma"; waiting, nbytes: frames and bytes that wait
    to be sent.
    """

    process: Name
    incarnation: int
    carrier: Name
    waiting: int
    nbytes: int


class InsideReply(Contract, id="zbmd.inside.reply", version=2, compatible_from=1):
    """A process. held: how often a handler kept its loop to itself; nbytes: what waits in all mailboxes."""

    process: Name
    incarnation: int
    actors: int
    held: int
    nbytes: int
    nbytes_max: int
    rows: Annotated[tuple[ActorRow, ...], msgspec.Meta(max_length=ROWS_MAX)]
    supervisors: Annotated[tuple[SupervisorRow, ...], msgspec.Meta(max_length=SUPERVISORS_ASKED_MAX)]
    links: Annotated[tuple[LinkRow, ...], msgspec.Meta(max_length=LINKS_SHOWN_MAX)] = ()
    runs: Annotated[tuple[Directory, ...], msgspec.Meta(max_length=RUNS_MAX)] = ()
    """The directories of the runs that the process takes part in; the latest ones."""


_runs: list[str] = []


def note_run(directory: str) -> None:
    """Have this process say that it takes part in the run in `directory`."""
    if directory not in _runs:
        _runs.append(directory)
        del _runs[:-RUNS_MAX]


class Inside(Actor):
    """`inside` of each process that can be looked into; that of a host hands questions on to its ranks."""

    captured = False

    @on(InsideRequest)
    async def look(self, message: InsideRequest) -> InsideReply | DeferredReply:
        """Answer, or ask who can."""
        if message.process != self.system.name:
            return await self._ask(message)
        cells = self.system.cells()
        shown = cells
        if message.busiest:
            shown = sorted(cells, key=lambda cell: (len(cell.mailbox), cell.handled), reverse=True)
        supervisors = [cell.ref for cell in cells if isinstance(cell.actor, Supervisor)]
        asked = [self._children(ref) for ref in supervisors[:SUPERVISORS_ASKED_MAX]]
        memory, watch = self.system.memory, self.system.service(LoopWatch)
        return InsideReply(
            process=self.system.name,
            incarnation=self.system.incarnation,
            actors=len(cells),
            held=0 if watch is None else watch.held,
            nbytes=memory.used,
            nbytes_max=memory.bound,
            rows=tuple(row(cell) for cell in shown[:ROWS_MAX]),
            supervisors=tuple(found for found in await asyncio.gather(*asked) if found is not None),
            links=tuple(link_row(peer) for peer in self.system.linked()[:LINKS_SHOWN_MAX]),
            runs=tuple(_runs),
        )

    async def _ask(self, message: InsideRequest) -> InsideReply | DeferredReply:
        """Ask the process itself; the asker hears if it has ended, or does not answer in time."""
        there = self.system.ref(f"{message.process}/{INSIDE_ACTOR}")
        try:
            return await there.ask(message, reply=InsideReply, timeout=2 * ASK_S)
        except ZbmdError as error:
            deferred = self.defer()
            deferred.fail(NoReply(f"{message.process} cannot be looked into: {error}"))
            return deferred

    async def _children(self, supervisor: Ref) -> SupervisorRow | None:
        try:
            reply = await supervisor.ask(WhichChildren(), reply=Children, timeout=ASK_S)
        except ZbmdError:
            return None  # it starts, stops or has ended: it is shown without children
        return SupervisorRow(supervisor.actor, reply.children)


def link_row(peer: Peer) -> LinkRow:
    """Return the row of the link to `peer`."""
    link = peer.link
    carrier, (waiting, nbytes) = (link.carrier, link.waiting) if isinstance(link, LinkSide) else ("", (0, 0))
    return LinkRow(peer.name, peer.incarnation, carrier, waiting, nbytes)


def row(cell: ActorCell) -> ActorRow:
    """Return the row of one actor."""
    current, mailbox = cell.current, cell.mailbox
    return ActorRow(
        name=cell.name,
        kind=type(cell.actor).__name__[:256],
        version=type(cell.actor).version,
        incarnation=cell.incarnation,
        state=cell.state.value,
        waiting=len(mailbox),
        nbytes=mailbox.nbytes,
        stashed=mailbox.stashed,
        handled=cell.handled,
        turns=cell.turns,
        dropped=mailbox.dropped,
        handles="" if current is None else contract_tag(current.message),
        parent="" if cell.parent is None else cell.parent.address,
    )
