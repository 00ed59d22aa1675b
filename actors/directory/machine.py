"""The directory machine (sans-I/O): names that one actor of a view holds, and groups of actors.

Groups are as Erlang's `pg`: each process is the authority for its own actors, tells the others what changes,
and reports all of it again when a view begins; a process outside the view is in no group.

A name has a home, which every member of a view works out alike (rendezvous hashing: Thaler & Ravishankar,
"Using name-based mappings to increase hit rates", 1998). The home knows who holds it. When a view begins,
each member tells each home which of its names its actors hold, and a home answers nothing before all have: so
a name that was granted stays with its actor over any change of views, for as long as the actor's process is
in them. Questions that are open when a view begins are asked again, of the new home.

Links may end and be made again while a view lasts. The first message on each reports all again, and what was
asked over the one before is asked again. A name is found once there is a link to its holder.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, assert_never

import msgspec

from zbmd.actors.directory.events import (
    GROUPS_MAX,
    HERE_KEYS_MAX,
    JOINED_MAX,
    MEMBERS_MAX,
    NAMES_MAX,
    Action,
    Answered,
    Asked,
    Ended,
    Event,
    GivenUp,
    GroupChanged,
    GroupDelta,
    GroupJoined,
    GroupLeft,
    Here,
    Key,
    LinkDown,
    LinkUp,
    Message,
    MessageReceived,
    NameAnswer,
    NameAsk,
    NameLost,
    NameOutcome,
    NameRevoked,
    Process,
    Send,
    ViewBegun,
    What,
)
from zbmd.transport.capture.registry import MachineKind, register
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError

CALLS_MAX = 65_536
EARLY_MAX = 65_536
"""Messages kept of members who are in a later view already."""
EARLY_EPOCHS_MAX = 1024


class DirectoryMachine:
    """The names and groups known to one process. `me`: its name and incarnation."""

    def __init__(self, me: Process) -> None:
        self._me = me
        self.epoch = -1
        self.members: tuple[Process, ...] = ()
        self._linked: set[Process] = set()
        self._groups: dict[Process, dict[str, dict[Key, None]]] = {me: {}}
        self._sizes: dict[Process, int] = {me: 0}  # memberships in these groups
        self._names: dict[str, Key] = {}  # of actors of this process
        self._kept: dict[str, Key] = {}  # names whose home is here
        self._heard: set[Process] = set()  # whose `Here` of this view has come
        self._spoken: set[Process] = set()  # of these, on the link that stands
        self._parts: dict[Process, Here] = {}  # of those whose `Here` has come in part
        self._waiting: deque[tuple[Process, NameAsk]] = deque()  # until all have
        self._calls: dict[int, Asked] = {}
        self._given_up: set[int] = set()  # of these, to be undone if they succeed
        self._found: dict[int, Key] = {}  # of these, answered, but for a link to the holder
        self._early: deque[tuple[Process, Message]] = deque()

    def handle(self, event: Event, *, now_ns: int) -> list[Action]:
        """Handle one event and return the actions. Raises `LocalProtocolError`, `RemoteProtocolError`."""
        actions: list[Action] = []
        match event:
            case ViewBegun():
                self._enter(event, actions)
            case LinkUp():
                self._link_up(event.process, actions)
            case LinkDown():
                self._link_down(event.process)
            case GroupJoined():
                self._join(event, actions)
            case GroupLeft():
                self._leave(event.group, event.key, actions)
            case Ended():
                self._ended(event.key, actions)
            case Asked():
                self._asked(event, actions)
            case GivenUp():
                self._give_up(event.call)
            case MessageReceived():
                self._received(event.source, event.message, actions)
            case _:
                assert_never(event)
        return actions

    def check_invariants(self) -> None:
        """Raise `AssertionError` if a rule that holds between any two events does not."""
        for process, groups in self._groups.items():
            assert process == self._me or process in self.members, process
            assert all(groups.values()), "an empty group is none"
            assert all(key[:2] == process for keys in groups.values() for key in keys)
        assert all(key[:2] == self._me for key in self._names.values())
        assert self._heard <= set(self.members)
        assert self._spoken <= self._heard & self._linked and self._parts.keys() <= self._linked
        assert self._found.keys() <= self._calls.keys() and self._given_up <= self._calls.keys()
        assert all(key[:2] not in self._linked for key in self._found.values())
        for process, groups in self._groups.items():
            assert self._sizes[process] == sum(map(len, groups.values())) <= JOINED_MAX
        assert not (self.is_settled and self._waiting)
        for name, key in self._kept.items():
            assert self.home(name) == self._me and key[:2] in self.members, name

    # What is known.

    def group(self, group: str) -> tuple[Key, ...]:
        """Return the members of a group, by process, and by order of joining within a process."""
        ordered = sorted(self._groups)
        return tuple(key for process in ordered for key in self._groups[process].get(group, ()))

    @property
    def groups(self) -> frozenset[str]:
        """Return the names of all groups that have members."""
        return frozenset(group for groups in self._groups.values() for group in groups)

    def home(self, name: str) -> Process:
        """Return the home of a name in this view."""
        return max(self.members, key=lambda member: (_weight(name, member), member))

    @property
    def is_settled(self) -> bool:
        """Return whether all members of the view have reported their actors."""
        return bool(self.members) and len(self._heard) == len(self.members)

    # Views.

    def _enter(self, event: ViewBegun, actions: list[Action]) -> None:
        if event.epoch <= self.epoch or self._me not in event.members:
            raise LocalProtocolError(f"{event!r} does not follow epoch {self.epoch} of {self._me}")
        self.epoch, self.members = event.epoch, tuple(sorted(event.members))
        self._heard = {self._me}
        self._spoken.clear()
        self._parts.clear()
        self._waiting.clear()
        self._found.clear()
        present = set(self.members)
        for gone in [process for process in self._groups if process not in present]:
            del self._sizes[gone]
            for group, keys in self._groups.pop(gone).items():
                actions.append(GroupChanged(group=group, joined=(), left=tuple(keys)))
        self._kept = self._names_for(self._me)
        self._calls = {n: call for n, call in self._calls.items() if n not in self._given_up}
        self._given_up.clear()
        for call in [call for call in self._calls.values() if self.home(call.name) == self._me]:
            self._send_ask(call, actions)
        for member in self.members:
            if member in self._linked:
                self._greet(member, actions)
        early, self._early = self._early, deque()
        for source, message in early:
            if message.epoch >= self.epoch:
                self._received(source, message, actions)
        self._settle(actions)

    def _link_up(self, process: Process, actions: list[Action]) -> None:
        if process == self._me or process in self._linked:
            raise LocalProtocolError(f"{self._me} is linked with {process} already")
        self._linked.add(process)
        if process in self.members:
            self._greet(process, actions)

    def _link_down(self, process: Process) -> None:
        if process not in self._linked:
            raise LocalProtocolError(f"{self._me} had no link to {process}")
        self._linked.remove(process)
        self._spoken.discard(process)
        self._parts.pop(process, None)
        # What it has asked it asks again, and what it has said of later views it says again.
        self._waiting = deque(waits for waits in self._waiting if waits[0] != process)
        self._early = deque(early for early in self._early if early[0] != process)

    def _greet(self, member: Process, actions: list[Action]) -> None:
        """Report everything to a member, and repeat the questions that it has not answered."""
        names = self._names_for(member)
        for here in self._introductions(names):
            actions.append(Send(to=member, message=here))
        for call in [call for call in self._calls.values() if self.home(call.name) == member]:
            self._found.pop(call.call, None)
            if call.call in self._given_up:  # not named above: if it was granted, it is no more
                self._given_up.remove(call.call)
                del self._calls[call.call]
            else:
                self._send_ask(call, actions)
        for number in [number for number, key in self._found.items() if key[:2] == member]:
            del self._calls[number]
            actions.append(Answered(call=number, outcome=NameOutcome.FOUND, key=self._found.pop(number)))

    def _names_for(self, home: Process) -> dict[str, Key]:
        return {name: key for name, key in self._names.items() if self.home(name) == home}

    def _introductions(self, names: dict[str, Key]) -> list[Here]:
        parts: list[tuple[dict[str, list[Key]], dict[str, Key]]] = [({}, {})]
        room = HERE_KEYS_MAX
        groups = ((group, key) for group, keys in self._groups[self._me].items() for key in keys)
        for is_name, (word, key) in [
            *((False, pair) for pair in groups),
            *((True, p) for p in names.items()),
        ]:
            if not room:
                parts.append(({}, {}))
                room = HERE_KEYS_MAX
            room -= 1
            if is_name:
                parts[-1][1][word] = key
            else:
                parts[-1][0].setdefault(word, []).append(key)
        return [Here(self.epoch, *part, last=part is parts[-1]) for part in parts]

    def _settle(self, actions: list[Action]) -> None:
        """Answer the requests that waited for the reports of all members."""
        while self.is_settled and self._waiting:
            source, ask = self._waiting.popleft()
            self._answer(source, ask, actions)

    # Groups.

    def _join(self, event: GroupJoined, actions: list[Action]) -> None:
        if event.key[:2] != self._me:
            raise LocalProtocolError(f"{event!r}: only actors of {self._me} join here")
        mine = self._groups[self._me]
        keys = mine.get(event.group, {})
        if event.key in keys:
            return
        if len(keys) >= MEMBERS_MAX or (event.group not in mine and len(mine) >= GROUPS_MAX):
            raise LocalProtocolError(f"{event!r}: {GROUPS_MAX} groups of {MEMBERS_MAX} members are the most")
        if self._sizes[self._me] >= JOINED_MAX:
            raise LocalProtocolError(f"{event!r}: {JOINED_MAX} memberships are the most")
        mine.setdefault(event.group, {})[event.key] = None
        self._sizes[self._me] += 1
        self._tell_change(event.group, (event.key,), (), actions)

    def _leave(self, group: str, key: Key, actions: list[Action]) -> None:
        mine = self._groups[self._me]
        if key in mine.get(group, {}):
            del mine[group][key]
            self._sizes[self._me] -= 1
            if not mine[group]:
                del mine[group]
            self._tell_change(group, (), (key,), actions)

    def _tell_change(
        self, group: str, joined: tuple[Key, ...], left: tuple[Key, ...], actions: list[Action]
    ) -> None:
        actions.append(GroupChanged(group=group, joined=joined, left=left))
        delta = GroupDelta(self.epoch, group, list(joined), list(left))
        actions += [Send(to=member, message=delta) for member in self.members if member in self._linked]

    def _ended(self, key: Key, actions: list[Action]) -> None:
        for group in [group for group, keys in self._groups[self._me].items() if key in keys]:
            self._leave(group, key, actions)
        for name in [name for name, holder in self._names.items() if holder == key]:
            self._free(name, actions)
        for call in [call for call in self._calls.values() if call.key == key]:
            if call.call not in self._given_up:
                actions.append(Answered(call=call.call, outcome=NameOutcome.FREE))
            self._give_up(call.call)

    # Names.

    def _free(self, name: str, actions: list[Action]) -> None:
        key = self._names.pop(name)
        if self.members:
            # Nobody waits for the answer. If view or link end first, the next home does not hear of it.
            self._to_home(NameAsk(self.epoch, 0, What.UNREGISTER, name, key), actions)

    def _asked(self, event: Asked, actions: list[Action]) -> None:
        if event.call in self._calls or event.call <= 0 or len(self._calls) >= CALLS_MAX:
            raise LocalProtocolError(f"{event!r}: give a new number above 0; {CALLS_MAX} calls at once")
        if event.what is not What.LOOK_UP and (event.key is None or event.key[:2] != self._me):
            raise LocalProtocolError(f"{event!r}: a name is given to an actor of {self._me}, by it")
        if event.what is What.REGISTER and len(self._names) >= NAMES_MAX:
            actions.append(Answered(call=event.call, outcome=NameOutcome.FULL))
            return
        self._calls[event.call] = event
        if self.members:
            self._send_ask(event, actions)

    def _give_up(self, number: int) -> None:
        call = self._calls.get(number)
        if call is None:
            return
        if call.what is What.REGISTER and self.members:
            self._given_up.add(number)  # the name may still be granted
        else:
            del self._calls[number]
            self._found.pop(number, None)

    def _send_ask(self, call: Asked, actions: list[Action]) -> None:
        if call.what is What.UNREGISTER and self._names.get(call.name) == call.key:
            del self._names[call.name]
        self._to_home(NameAsk(self.epoch, call.call, call.what, call.name, call.key), actions)

    def _to_home(self, ask: NameAsk, actions: list[Action]) -> None:
        home = self.home(ask.name)
        if home == self._me:
            self._on_ask(self._me, ask, actions)
        elif home in self._linked:
            actions.append(Send(to=home, message=ask))

    def _on_ask(self, source: Process, ask: NameAsk, actions: list[Action]) -> None:
        if self.is_settled:
            self._answer(source, ask, actions)
        elif len(self._waiting) < CALLS_MAX:
            self._waiting.append((source, ask))
        else:
            self._reply(source, ask, NameOutcome.FULL, None, actions)

    def _answer(self, source: Process, ask: NameAsk, actions: list[Action]) -> None:
        holder = self._kept.get(ask.name)
        match ask.what:
            case What.LOOK_UP:
                outcome = NameOutcome.FREE if holder is None else NameOutcome.FOUND
            case What.UNREGISTER:
                outcome = NameOutcome.DONE
                if ask.key is not None and holder == ask.key:
                    del self._kept[ask.name]
            case What.REGISTER:
                if holder is not None and holder != ask.key:
                    outcome = NameOutcome.TAKEN
                elif ask.key is None or (holder is None and len(self._kept) >= NAMES_MAX):
                    outcome = NameOutcome.FULL
                else:
                    outcome, holder = NameOutcome.DONE, ask.key
                    self._kept[ask.name] = ask.key
            case _:
                assert_never(ask.what)
        self._reply(source, ask, outcome, holder, actions)

    def _reply(
        self, source: Process, ask: NameAsk, outcome: NameOutcome, key: Key | None, actions: list[Action]
    ) -> None:
        answer = NameAnswer(self.epoch, ask.call, outcome, key)
        if source == self._me:
            self._on_answer(answer, actions)
        elif ask.call:
            actions.append(Send(to=source, message=answer))

    def _on_answer(self, answer: NameAnswer, actions: list[Action]) -> None:
        key = answer.key
        is_far = key is not None and key[:2] != self._me and key[:2] not in self._linked
        if answer.call in self._calls and answer.outcome is NameOutcome.FOUND and is_far and key is not None:
            self._found[answer.call] = key
            return
        call = self._calls.pop(answer.call, None)
        if call is None:
            return  # given up, or answered in the view before
        if call.call in self._given_up:
            self._given_up.remove(call.call)
            if answer.outcome is NameOutcome.DONE and not self._wants(call):
                self._to_home(NameAsk(self.epoch, 0, What.UNREGISTER, call.name, call.key), actions)
            return
        if call.what is What.REGISTER and answer.outcome is NameOutcome.DONE and call.key is not None:
            self._names[call.name] = call.key
        actions.append(Answered(call=call.call, outcome=answer.outcome, key=answer.key))

    def _wants(self, call: Asked) -> bool:
        """Return whether the actor holds the name, or has requested it once more."""
        again = any(
            other.name == call.name and other.key == call.key and other.what is What.REGISTER
            for other in self._calls.values()
            if other.call not in self._given_up
        )
        return again or self._names.get(call.name) == call.key

    # What the others say.

    def _received(self, source: Process, message: Message, actions: list[Action]) -> None:
        if message.epoch < self.epoch:
            return
        if message.epoch > self.epoch:
            if len(self._early) >= EARLY_MAX or message.epoch > self.epoch + EARLY_EPOCHS_MAX:
                raise RemoteProtocolError(f"{source} is at epoch {message.epoch}, {self._me} at {self.epoch}")
            self._early.append((source, message))
            return
        if source not in self.members or source == self._me:
            raise RemoteProtocolError(f"{source} speaks in epoch {message.epoch} without being in it")
        if source not in self._linked:
            raise LocalProtocolError(f"{source} speaks to {self._me} without a link")
        match message:
            case Here():
                self._on_here(source, message, actions)
            case GroupDelta():
                self._on_delta(source, message, actions)
            case NameAsk():
                self._on_name_ask(source, message, actions)
            case NameAnswer():
                self._on_answer(message, actions)
            case NameRevoked():
                if self._names.get(message.name) == message.key:
                    del self._names[message.name]
                    actions.append(NameLost(name=message.name, key=message.key))
            case _:
                assert_never(message)

    def _on_name_ask(self, source: Process, ask: NameAsk, actions: list[Action]) -> None:
        if self.home(ask.name) != self._me or (ask.key is not None and ask.key[:2] != source):
            raise RemoteProtocolError(
                f"{source} asks {self._me} for {ask.name!r}: not its home, or not its own"
            )
        self._on_ask(source, ask, actions)

    def _on_here(self, source: Process, here: Here, actions: list[Action]) -> None:
        if source in self._spoken:
            raise RemoteProtocolError(f"{source} said twice who is there in epoch {here.epoch}")
        for group in here.groups:
            self._check(source, here.groups[group])
        self._check(source, list(here.names.values()))
        for name in here.names:
            if self.home(name) != self._me:
                raise RemoteProtocolError(f"{source} gives {name!r} to {self._me}, which is not its home")
        so_far = self._parts.pop(source, None)
        if so_far is not None:
            for group, keys in here.groups.items():
                so_far.groups.setdefault(group, []).extend(keys)
            so_far.names.update(here.names)
        whole = so_far or Here(here.epoch, {g: list(keys) for g, keys in here.groups.items()}, {**here.names})
        self._check_size(source, whole.groups, whole.names)
        if here.last:
            self._take_whole(source, whole, actions)
        else:
            self._parts[source] = whole

    def _take_whole(self, source: Process, here: Here, actions: list[Action]) -> None:
        self._heard.add(source)
        self._spoken.add(source)
        before = self._groups.get(source, {})
        now = {group: dict.fromkeys(keys) for group, keys in here.groups.items() if keys}
        self._groups[source] = now
        self._sizes[source] = sum(map(len, now.values()))
        for group in sorted({*before, *now}):
            old, new = before.get(group, {}), now.get(group, {})
            joined = tuple(key for key in new if key not in old)
            left = tuple(key for key in old if key not in new)
            if joined or left:
                actions.append(GroupChanged(group=group, joined=joined, left=left))
        # What it does not hold it never had: its word of that went with a link.
        for name in [n for n, key in self._kept.items() if key[:2] == source and n not in here.names]:
            del self._kept[name]
        for name, key in here.names.items():
            self._claim(name, key, actions)
        self._settle(actions)

    def _check_size(self, source: Process, groups: dict[str, list[Key]], names: Collection[str]) -> None:
        fits = len(groups) <= GROUPS_MAX and len(names) <= NAMES_MAX
        if not fits or sum(map(len, groups.values())) > JOINED_MAX:
            raise RemoteProtocolError(f"{source} has more names, groups or members than a process may have")

    def _claim(self, name: str, key: Key, actions: list[Action]) -> None:
        """An actor of a member holds a name. Two holders exist only if views were not agreed upon."""
        holder = self._kept.get(name)
        keeps = key if holder is None else min(holder, key)
        self._kept[name] = keeps
        loser = holder if keeps == key else key
        if loser is None or loser == keeps:
            return
        if loser[:2] == self._me:
            del self._names[name]
            actions.append(NameLost(name=name, key=loser))
        elif loser[:2] in self._linked:  # else it will claim the name once more
            actions.append(Send(to=loser[:2], message=NameRevoked(self.epoch, name, loser)))

    def _on_delta(self, source: Process, delta: GroupDelta, actions: list[Action]) -> None:
        if source not in self._spoken:
            raise RemoteProtocolError(f"{source} changes a group before it has said who is there")
        self._check(source, delta.joined)
        groups = self._groups[source]
        keys = groups.get(delta.group, {})
        joined = tuple(key for key in delta.joined if key not in keys)
        left = tuple(key for key in delta.left if key in keys)
        too_many = len(keys) + len(joined) > MEMBERS_MAX or self._sizes[source] + len(joined) > JOINED_MAX
        if too_many or len(groups) >= GROUPS_MAX + (delta.group in groups):
            raise RemoteProtocolError(f"{source} has more groups or members than a process may have")
        self._sizes[source] += len(joined) - len(left)
        keys = {key: None for key in (*keys, *joined) if key not in left}
        if keys:
            groups[delta.group] = keys
        else:
            groups.pop(delta.group, None)
        if joined or left:
            actions.append(GroupChanged(group=delta.group, joined=joined, left=left))

    def _check(self, source: Process, keys: list[Key]) -> None:
        if any(key[:2] != source for key in keys):
            raise RemoteProtocolError(f"{source} speaks for actors of another process")


def _weight(name: str, member: Process) -> bytes:
    return hashlib.blake2b(f"{name}\0{member[0]}#{member[1]}".encode(), digest_size=8).digest()


def _build_directory(config: Mapping[str, Any]) -> DirectoryMachine:
    return DirectoryMachine(msgspec.convert(config["me"], tuple[str, int]))


DIRECTORY: MachineKind[Event, Action] = register(
    "directory",
    1,
    _build_directory,
    events=Event,
    actions=Action,
    states=(DirectoryMachine,),
)
"""Its configuration: `me`, the process's name and incarnation."""
