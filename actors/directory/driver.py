"""The directory of a process: names and groups of the actors of a view. The driver of its machine.

Each process has one, an actor by the name of `DIRECTORY`, which others tell what their machines say. A view
comes from whoever knows of it (`Directory.enter`): a rank's membership of its job, a node's of its cluster.
A process that is in neither is a view of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never

import structlog

from zbmd.actors.core import wire
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.actor_base import MAILBOX_MESSAGES_MAX, MailboxSpec
from zbmd.actors.core.context import Deferred, DeferredReply, current_delivery, deadline_ns
from zbmd.actors.core.native._mailbox import Delivery
from zbmd.actors.core.ref import Down, Reason, ReasonKind, Ref, Undelivered
from zbmd.actors.core.services import Service
from zbmd.actors.directory import events as ev
from zbmd.actors.directory.events import (
    DIRECTORY,
    Found,
    GroupNews,
    InGroup,
    JoinGroup,
    Key,
    LeaveGroup,
    ListGroup,
    NameOutcome,
    Process,
    RegisterName,
    UnregisterName,
    UnwatchGroup,
    WatchGroup,
    What,
    WhereIs,
)
from zbmd.actors.directory.machine import DIRECTORY as KIND
from zbmd.actors.directory.machine import DirectoryMachine
from zbmd.actors.errors import ActorError, DeadActor, NameInUse, NoReply, TooManyPending
from zbmd.transport.capture.tap import Tap
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError

if TYPE_CHECKING:
    from zbmd.actors.core.cell import ActorCell
    from zbmd.actors.core.system import CoreSystem

CHANGES_WAITING_MAX: Final = 1024
"""Changes of a group that wait for a watcher; more are merged into one."""
NEWS_WAITING_MAX: Final = 1024
"""In the mailbox of an actor that watches a group; one that does not read them is killed."""
WATCHES_MAX: Final = 65_536
LISTS_WAITING_MAX: Final = 4096
CHECKED_EVENTS: Final = 4096
"""Of a directory's first events each is followed by a check of its invariants, which takes ever longer."""

log: Final = structlog.stdlib.get_logger("zbmd.directory")


@dataclass(frozen=True, slots=True)
class GroupChange:
    """Members that left a group, and members that joined it after that, as seen by this process."""

    joined: tuple[Ref, ...]
    left: tuple[Ref, ...]


@dataclass(slots=True)
class _Call:
    """A request for a name whose caller waits."""

    deferred: Deferred
    what: What
    name: str
    timer: asyncio.TimerHandle | None = None


@dataclass(slots=True, eq=False)
class _Stream:
    """A consumer of the changes of a group."""

    waiting: deque[GroupChange] = field(default_factory=deque[GroupChange])
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, change: GroupChange) -> None:
        if len(self.waiting) >= CHANGES_WAITING_MAX:
            merged = _merged([*self.waiting, change])
            self.waiting.clear()
            change = merged
        self.waiting.append(change)
        self.news.set()


def _merged(changes: Sequence[GroupChange]) -> GroupChange:
    """Merge several changes into one."""
    joined, left = dict[Ref, None](), dict[Ref, None]()
    for change in changes:
        for gone in change.left:
            if gone in joined:
                del joined[gone]
            else:
                left[gone] = None
        joined.update(dict.fromkeys(change.joined))
    return GroupChange(tuple(joined), tuple(left))


class DirectoryActor(Actor):
    """Receives the messages of other directories, and requests to this one."""

    captured = False  # its machine is
    mailbox = MailboxSpec(capacity=MAILBOX_MESSAGES_MAX)

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    @on(ev.Here)
    async def here(self, message: ev.Here) -> None:
        """See the message."""
        self._received(message)

    @on(ev.GroupDelta)
    async def group_delta(self, message: ev.GroupDelta) -> None:
        """See the message."""
        self._received(message)

    @on(ev.NameAsk)
    async def name_ask(self, message: ev.NameAsk) -> None:
        """See the message."""
        self._received(message)

    @on(ev.NameAnswer)
    async def name_answer(self, message: ev.NameAnswer) -> None:
        """See the message."""
        self._received(message)

    @on(ev.NameRevoked)
    async def name_revoked(self, message: ev.NameRevoked) -> None:
        """See the message."""
        self._received(message)

    def _received(self, message: ev.Message) -> None:
        delivery = current_delivery.get()
        peer = None if delivery is None else delivery.peer
        # What a link has brought that has ended since was lost, as far as the machine is concerned.
        if peer is not None and self.system.peer(peer.name) is peer:
            self._directory.received((peer.name, peer.incarnation), message)

    @on(Undelivered)
    async def undelivered(self, signal: Undelivered) -> None:
        """A message did not arrive: drop the link; the side that made it makes it again."""
        log.warning("a directory did not take a message", of=signal.ref.process, reason=str(signal.error))
        self.system.detach(signal.ref.process, "its directory did not take a message")

    @on(RegisterName)
    async def register(self, m: RegisterName) -> DeferredReply | None:
        """See the message."""
        return self._directory.call(self.defer(), What.REGISTER, m.name, self._living(m))

    @on(UnregisterName)
    async def unregister(self, m: UnregisterName) -> DeferredReply | None:
        """See the message."""
        key = (self.system.name, self.system.incarnation, m.actor, m.incarnation)
        return self._directory.call(self.defer(), What.UNREGISTER, m.name, key)

    @on(WhereIs)
    async def where_is(self, m: WhereIs) -> Found | DeferredReply:
        """See the message."""
        return self._directory.call(self.defer(), What.LOOK_UP, m.name, None)

    @on(JoinGroup)
    async def join(self, m: JoinGroup) -> DeferredReply | None:
        """See the message."""
        return self._do(partial(self._directory.join, m.group), m)

    @on(LeaveGroup)
    async def leave(self, m: LeaveGroup) -> DeferredReply | None:
        """See the message."""
        return self._do(partial(self._directory.leave, m.group), m)

    @on(WatchGroup)
    async def watch(self, m: WatchGroup) -> DeferredReply | None:
        """See the message."""
        return self._do(partial(self._directory.watch, m.group), m)

    @on(UnwatchGroup)
    async def unwatch(self, m: UnwatchGroup) -> DeferredReply | None:
        """See the message."""
        return self._do(partial(self._directory.unwatch, m.group), m)

    @on(ListGroup)
    async def list_group(self, m: ListGroup) -> InGroup | DeferredReply:
        """See the message."""
        return self._directory.list_group(self.defer(), m.group)

    def _living(self, m: RegisterName | JoinGroup | LeaveGroup | WatchGroup | UnwatchGroup) -> Key | None:
        cell = self.system.find(m.actor, m.incarnation)
        return None if cell is None or not cell.accepts else cell.ref.key()

    def _do(
        self, act: Callable[[Key], None], m: JoinGroup | LeaveGroup | WatchGroup | UnwatchGroup
    ) -> DeferredReply:
        """Reply at once, with the refusal if there is one."""
        deferred, key = self.defer(), self._living(m)
        if key is None:
            deferred.fail(
                DeadActor(f"{self.system.name}/{m.actor} (incarnation {m.incarnation}) does not live")
            )
            return deferred
        try:
            act(key)
        except LocalProtocolError as error:
            deferred.fail(TooManyPending(str(error)))
        else:
            deferred.reply(None)
        return deferred


class Directory(Service):
    """The driver of the directory machine. Made by `ActorSystem.open_directory`."""

    def __init__(self, system: CoreSystem, *, alone: bool) -> None:
        me = (system.name, system.incarnation)
        self._system = system
        self._machine = DirectoryMachine(me)
        name = f"directory of {system.name}#{system.incarnation}"
        self._tap = Tap(system.recorder, KIND, name, self._machine, {"me": list(me)})
        self._events: deque[ev.Event] = deque()
        self._handling = False
        self._handled = 0
        self._calls: dict[int, _Call] = {}
        self._last_call = 0
        self._guarded: set[Key] = set()
        self._watchers: dict[str, dict[Key, deque[Delivery]]] = {}
        self._streams: dict[str, set[_Stream]] = {}
        self._lists: deque[tuple[Deferred, str]] = deque()
        self._closed = ""
        cell = system.create_child(DirectoryActor, (self,), name=DIRECTORY, parent=None)
        cell.watch(self._ended)
        if alone:
            self._handle(ev.ViewBegun(epoch=0, members=(me,)))
        for process in system.peers.items():
            self._handle(ev.LinkUp(process=process))

    # Views and links.

    @property
    def epoch(self) -> int:
        """Return the epoch of its view; -1 before the first."""
        return self._machine.epoch

    @property
    def members(self) -> tuple[Process, ...]:
        """Return the processes of its view."""
        return self._machine.members

    def enter(self, epoch: int, members: Sequence[Process]) -> None:
        """Enter a view. An older one, or one without this process, is ignored."""
        me = (self._system.name, self._system.incarnation)
        if not self._closed and epoch > self._machine.epoch and me in members:
            self._handle(ev.ViewBegun(epoch=epoch, members=tuple(members)))

    def link_up(self, process: str, incarnation: int) -> None:
        """A link was attached."""
        if not self._closed:
            self._handle(ev.LinkUp(process=(process, incarnation)))

    def link_down(self, process: str, incarnation: int) -> None:
        """A link was lost."""
        if not self._closed:
            self._handle(ev.LinkDown(process=(process, incarnation)))

    # For `DirectoryActor`.

    def received(self, source: Process, message: ev.Message) -> None:
        """Handle a message of another directory. One that breaks the protocol ends its link."""
        self._handle(ev.MessageReceived(source=source, message=message))

    def call(self, deferred: Deferred, what: What, name: str, key: Key | None) -> DeferredReply:
        """Request a name; `deferred` gets the reply."""
        if what is What.REGISTER and (key is None or not self._guard(key)):
            deferred.fail(DeadActor(f"{name!r} cannot be given to an actor that does not live"))
            return deferred
        self._last_call += 1
        number, until_ns = self._last_call, deadline_ns()
        call = self._calls[number] = _Call(deferred, what, name)
        if until_ns:
            delay_s = max(0, until_ns - time.monotonic_ns()) / 1e9
            call.timer = self._system.loop.call_later(delay_s, self._give_up, number)
        try:
            self._handle(ev.Asked(call=number, what=what, name=name, key=key))
        except LocalProtocolError as error:
            if self._end_call(number) is not None:
                deferred.fail(TooManyPending(str(error)))
        return deferred

    def join(self, group: str, key: Key) -> None:
        """Let an actor of this process join. Raises `LocalProtocolError` past the bounds."""
        if self._guard(key):
            self._handle(ev.GroupJoined(group=group, key=key))

    def leave(self, group: str, key: Key) -> None:
        """Let an actor of this process leave."""
        self._handle(ev.GroupLeft(group=group, key=key))

    def watch(self, group: str, key: Key) -> None:
        """Send the changes of a group to an actor. Raises `LocalProtocolError` past the bound."""
        watchers = self._watchers.setdefault(group, {})
        if key in watchers or not self._guard(key):
            return
        if len(watchers) >= WATCHES_MAX:
            raise LocalProtocolError(f"{WATCHES_MAX} actors watch {group!r}")
        watchers[key] = deque()
        self._tell(group, key, GroupChange(self.group(group), ()))

    def unwatch(self, group: str, key: Key) -> None:
        """Stop sending changes to it."""
        watchers = self._watchers.get(group, {})
        watchers.pop(key, None)
        if not watchers:
            self._watchers.pop(group, None)

    def list_group(self, deferred: Deferred, group: str) -> DeferredReply:
        """Reply with the members of a group once all processes of the view have reported theirs."""
        if len(self._lists) >= LISTS_WAITING_MAX:
            deferred.fail(TooManyPending(f"{LISTS_WAITING_MAX} questions for groups wait"))
        else:
            self._lists.append((deferred, group))
            self._answer_lists()
        return deferred

    # For groups.

    def group(self, group: str) -> tuple[Ref, ...]:
        """Return the members of the group that are known here now."""
        return tuple(map(self._ref, self._machine.group(group)))

    async def changes(self, group: str) -> AsyncGenerator[GroupChange]:
        """Yield the changes of a group, first all present members. Ends with the system."""
        stream = _Stream()
        streams = self._streams.setdefault(group, set())
        if len(streams) >= WATCHES_MAX:
            raise TooManyPending(f"{WATCHES_MAX} watch {group!r}")
        streams.add(stream)
        stream.put(GroupChange(self.group(group), ()))
        try:
            while not self._closed:
                stream.news.clear()
                while stream.waiting:
                    yield stream.waiting.popleft()
                await stream.news.wait()
        finally:
            streams.discard(stream)
            if not streams:
                self._streams.pop(group, None)

    # The machine.

    def _handle(self, event: ev.Event) -> None:
        """Handle events one after the other, with those that follow from the actions."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events and not self._closed:
                self._handle_one(self._events.popleft())
            self._answer_lists()
        finally:
            self._events.clear()
            self._handling = False

    def _handle_one(self, event: ev.Event) -> None:
        try:
            actions = self._tap.handle(event, now_ns=time.monotonic_ns())
        except RemoteProtocolError as error:
            assert isinstance(event, ev.MessageReceived)
            log.error("a directory says what cannot be", of=event.source[0], reason=str(error))
            self._system.detach(event.source[0], str(error))
            return
        self._handled += 1
        if self._handled <= CHECKED_EVENTS:
            self._tap.check_invariants()
        for action in actions:
            self._perform(action)

    def _perform(self, action: ev.Action) -> None:
        match action:
            case ev.Send(to=to, message=message):
                peer = self._system.peer(to[0])
                if peer is not None and peer.incarnation == to[1]:
                    peer.post_payload(wire.encode_tell(DIRECTORY, 0, DIRECTORY, message))
            case ev.GroupChanged(group=group, joined=joined, left=left):
                change = GroupChange(tuple(map(self._ref, joined)), tuple(map(self._ref, left)))
                for stream in self._streams.get(group, ()):
                    stream.put(change)
                for key in list(self._watchers.get(group, ())):
                    self._tell(group, key, change)
            case ev.Answered(call=number, outcome=outcome, key=key):
                call = self._end_call(number)
                if call is not None:
                    self._answer(call, outcome, key)
            case ev.NameLost(name=name, key=key):
                reason = Reason(
                    ReasonKind.FAILED, f"another has its name {name!r}, in a view that both are in"
                )
                log.error("an actor has lost its name and ends", actor=key[2], name=name)
                self._system.exit(self._ref(key), reason)
            case _:
                assert_never(action)

    def _answer(self, call: _Call, outcome: NameOutcome, key: Key | None) -> None:
        looks_up = call.what is What.LOOK_UP
        match outcome:
            case NameOutcome.DONE:
                call.deferred.reply(None)
            case NameOutcome.FOUND:
                call.deferred.reply(Found(None if key is None else self._ref(key)))
            case NameOutcome.FREE if looks_up:
                call.deferred.reply(Found(None))
            case NameOutcome.FREE:
                call.deferred.fail(DeadActor(f"the actor that was to have the name {call.name!r} has ended"))
            case NameOutcome.TAKEN:
                holder = "another" if key is None else repr(self._ref(key))
                call.deferred.fail(NameInUse(f"{call.name!r} is the name of {holder}"))
            case NameOutcome.FULL:
                call.deferred.fail(TooManyPending(f"no room for the name {call.name!r}: too many are kept"))
            case _:
                assert_never(outcome)

    def _give_up(self, number: int) -> None:
        """The deadline of a request has passed."""
        call = self._end_call(number)
        if call is not None:
            self._handle(ev.GivenUp(call=number))
            call.deferred.fail(NoReply(f"nobody could say in time who has the name {call.name!r}"))

    def _end_call(self, number: int) -> _Call | None:
        call = self._calls.pop(number, None)
        if call is not None and call.timer is not None:
            call.timer.cancel()
        return call

    def _answer_lists(self) -> None:
        while self._lists and self._machine.is_settled:
            deferred, group = self._lists.popleft()
            deferred.reply(InGroup(list(self.group(group))))

    # Actors of this process.

    def _guard(self, key: Key) -> bool:
        """Watch for the actor's end; return False if it has ended."""
        if key in self._guarded:
            return True
        cell = self._system.find(key[2], key[3])
        if cell is None or not cell.accepts or cell.watch(partial(self._actor_ended, key)) < 0:
            return False
        self._guarded.add(key)
        return True

    def _actor_ended(self, key: Key, _: Down) -> None:
        self._guarded.discard(key)
        for group in [group for group, watchers in self._watchers.items() if key in watchers]:
            self.unwatch(group, key)
        if not self._closed:
            self._handle(ev.Ended(key=key))

    def _tell(self, group: str, key: Key, change: GroupChange) -> None:
        """Put the news into the actor's mailbox, even if it is full; an actor that reads none is killed."""
        cell = self._system.find(key[2], key[3])
        waiting = self._watchers[group][key]
        if cell is None:
            return
        while waiting and not waiting[0].waits:
            waiting.popleft()
        if len(waiting) >= NEWS_WAITING_MAX:
            cell.kill(Reason(ReasonKind.KILLED, f"{NEWS_WAITING_MAX} news of {group!r} wait for it"))
            return
        waiting.append(self._put(cell, GroupNews(group, list(change.joined), list(change.left))))

    def _put(self, cell: ActorCell, news: GroupNews) -> Delivery:
        delivery = Delivery(news, 0, self._system.new_trace(), DIRECTORY, None, None)
        try:
            cell.mailbox.put(delivery)
        except ActorError as error:
            cell.kill(Reason(ReasonKind.KILLED, f"news of {news.group!r} could not be delivered: {error}"))
        else:
            cell.wake()
        return delivery

    def _ref(self, key: Key) -> Ref:
        return Ref(self._system, *key)

    def _ended(self, down: Down) -> None:
        """Drop everything: the directory's actor has ended, with the system or by a fault."""
        self._closed = str(down.reason)
        self._tap.close(self._closed)
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if call.timer is not None:
                call.timer.cancel()
        self._lists.clear()
        for streams in self._streams.values():
            for stream in streams:
                stream.news.set()
