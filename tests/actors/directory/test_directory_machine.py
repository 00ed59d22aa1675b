"""Names and groups by any history: processes come and go, actors end, messages take their time."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.actors.directory import events as ev
from zbmd.actors.directory.events import Key, NameOutcome, Process, What
from zbmd.actors.directory.machine import DirectoryMachine
from zbmd.transport.errors import LocalProtocolError, RemoteProtocolError
from zbmd.transport.frames import MAX_PAYLOAD_BYTES

NAMES = ["red", "green", "blue"]


@dataclass
class Member:
    """One process: its machine, its actors, and what it believes."""

    me: Process
    machine: DirectoryMachine
    alive: list[Key] = field(default_factory=list[Key])
    ended: set[Key] = field(default_factory=set[Key])
    seen: dict[str, set[Key]] = field(default_factory=dict[str, set[Key]])
    calls: dict[int, ev.Asked] = field(default_factory=dict[int, ev.Asked])
    holds: dict[str, Key] = field(default_factory=dict[str, Key])
    joined: dict[str, list[Key]] = field(default_factory=dict[str, list[Key]])
    actors: int = 0


class World:
    """Processes with a queue of messages between each two, and views that each enters when it comes to it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.members: dict[Process, Member] = {}
        self.queues: dict[tuple[Process, Process], deque[ev.Message]] = {}
        self.views: list[tuple[Process, ...]] = []
        self.last_call = 0
        self.incarnations = 0
        self.answers: list[tuple[int, str, Key]] = []
        self.links: set[frozenset[Process]] = set()
        self.down: set[frozenset[Process]] = set()

    # What happens.

    def grow(self, count: int) -> None:
        fresh = [(f"p{self.incarnations + i}", self.incarnations + i + 1) for i in range(count)]
        self.incarnations += count
        for process in fresh:
            others = list(self.members)
            self.members[process] = Member(process, DirectoryMachine(process))
            for other in others:
                self.link(process, other)
        self.views.append((*self.current, *fresh))

    def shrink(self) -> None:
        gone = self.rng.choice(self.current)
        for other in [other for other in self.members if other != gone]:
            if frozenset((gone, other)) in self.links:
                self.cut(gone, other)
            self.down = {pair for pair in self.down if gone not in pair}
        del self.members[gone]
        self.views.append(tuple(process for process in self.current if process != gone))

    def link(self, one: Process, other: Process) -> None:
        self.links.add(frozenset((one, other)))
        self.down.discard(frozenset((one, other)))
        self.event(one, ev.LinkUp(process=other))
        self.event(other, ev.LinkUp(process=one))

    def cut(self, one: Process, other: Process) -> None:
        """Messages under way are lost."""
        self.links.remove(frozenset((one, other)))
        self.down.add(frozenset((one, other)))
        self.queues.pop((one, other), None)
        self.queues.pop((other, one), None)
        self.event(one, ev.LinkDown(process=other))
        self.event(other, ev.LinkDown(process=one))

    def cut_any(self) -> None:
        if self.links:
            one, other = sorted(self.rng.choice(sorted(sorted(pair) for pair in self.links)))
            self.cut(one, other)

    def heal_any(self) -> bool:
        if not self.down:
            return False
        one, other = self.rng.choice(sorted(sorted(pair) for pair in self.down))
        self.link(one, other)
        return True

    @property
    def current(self) -> tuple[Process, ...]:
        return tuple(p for p in self.views[-1] if p in self.members) if self.views else ()

    def event(self, process: Process, event: ev.Event) -> None:
        member = self.members[process]
        actions = member.machine.handle(event, now_ns=0)
        member.machine.check_invariants()
        for action in actions:
            match action:
                case ev.Send(to=to, message=message):
                    assert frozenset((to, process)) in self.links
                    self.queues.setdefault((process, to), deque()).append(message)
                case ev.GroupChanged(group=group, joined=joined, left=left):
                    seen = member.seen.setdefault(group, set())
                    assert seen.isdisjoint(joined) and seen.issuperset(left), "each change is reported once"
                    seen.update(joined)
                    seen.difference_update(left)
                case ev.Answered():
                    self.answered(member, action)
                case ev.NameLost():
                    raise AssertionError("views are agreed upon: nobody loses a name")

    def answered(self, member: Member, action: ev.Answered) -> None:
        call = member.calls.pop(action.call)
        if call.key in member.ended:
            return
        if call.what is What.REGISTER and action.outcome is NameOutcome.DONE:
            assert call.key is not None
            member.holds[call.name] = call.key
        if action.outcome is NameOutcome.FOUND:
            assert action.key is not None
            me, holder = member.me, action.key[:2]
            assert holder == me or frozenset((me, holder)) in self.links
            self.answers.append((member.machine.epoch, call.name, action.key))

    def step(self) -> bool:
        """A view that is due is entered, or a message arrives; False if there is nothing."""
        due = [p for p in self.members if p in self.views[-1] and self.next_view(p)]
        full = [pair for pair, queue in self.queues.items() if queue]
        if not due and not full:
            return False
        chosen = self.rng.choice([*due, *full])
        if isinstance(chosen[0], str):
            process = next(p for p in due if p == chosen)
            epoch = self.next_view(process)
            self.event(process, ev.ViewBegun(epoch=epoch, members=self.views[epoch - 1]))
        else:
            source, to = next(pair for pair in full if pair == chosen)
            self.event(to, ev.MessageReceived(source=source, message=self.queues[source, to].popleft()))
        return True

    def next_view(self, process: Process) -> int:
        at = self.members[process].machine.epoch
        later = [e for e in range(max(at, 0) + 1, len(self.views) + 1) if process in self.views[e - 1]]
        return later[0] if later else 0

    # What is done by actors.

    def act(self) -> None:
        process = self.rng.choice(list(self.members))
        member = self.members[process]
        what = self.rng.randint(0, 7)
        if what < 2 or not member.alive:
            member.actors += 1
            member.alive.append((*process, f"a{member.actors}", member.actors))
            return
        key, name = self.rng.choice(member.alive), self.rng.choice(NAMES)
        if what == 2:
            member.alive.remove(key)
            member.ended.add(key)
            for group in member.joined.values():
                if key in group:
                    group.remove(key)
            member.holds = {n: k for n, k in member.holds.items() if k != key}
            self.event(process, ev.Ended(key=key))
        elif what == 3:
            if key not in member.joined.setdefault(name, []):
                member.joined[name].append(key)
            self.event(process, ev.GroupJoined(group=name, key=key))
        elif what == 4:
            if key in member.joined.get(name, []):
                member.joined[name].remove(key)
            self.event(process, ev.GroupLeft(group=name, key=key))
        else:
            self.ask(process, [What.REGISTER, What.LOOK_UP, What.UNREGISTER][what - 5], name, key)

    def ask(self, process: Process, what: What, name: str, key: Key) -> None:
        member = self.members[process]
        self.last_call += 1
        given = None if what is What.LOOK_UP else key
        asked = ev.Asked(call=self.last_call, what=what, name=name, key=given)
        if what is What.UNREGISTER and member.holds.get(name) == key:
            del member.holds[name]
        if what is What.UNREGISTER and any(c.name == name and c.key == key for c in member.calls.values()):
            return  # which of the two comes first is for the actor to know
        member.calls[asked.call] = asked
        self.event(process, asked)
        if self.rng.random() < 0.2 and asked.call in member.calls:
            del member.calls[asked.call]
            self.event(process, ev.GivenUp(call=asked.call))

    def ask_plainly(self, process: Process, name: str) -> None:
        self.last_call += 1
        asked = ev.Asked(call=self.last_call, what=What.LOOK_UP, name=name)
        self.members[process].calls[asked.call] = asked
        self.event(process, asked)

    def check_names(self) -> None:
        holders: dict[str, Key] = {}
        for member in self.members.values():
            for name, key in member.holds.items():
                assert holders.setdefault(name, key) == key, f"{name} has two holders"


@given(seed=st.integers(0, 2**64 - 1))
def test_by_any_history_a_name_has_one_holder_and_all_see_the_same_groups(seed: int) -> None:
    rng = random.Random(seed)
    world = World(rng)
    world.grow(rng.randint(1, 4))
    for _ in range(rng.randint(0, 150)):
        dice = rng.random()
        if dice < 0.03 and len(world.current) < 6:
            world.grow(1)
        elif dice < 0.06 and len(world.current) > 1:
            world.shrink()
        elif dice < 0.09:
            world.cut_any()
        elif dice < 0.12:
            world.heal_any()
        elif dice < 0.5:
            world.act()
        else:
            world.step()
        world.check_names()
    # Liveness: once nothing more happens, all is answered, and known to all alike.
    while world.heal_any() or world.step():
        world.check_names()
    wanted: dict[str, set[Key]] = {}
    for member in world.members.values():
        assert not member.calls, "every question is answered"
        for group, keys in member.joined.items():
            wanted.setdefault(group, set()).update(keys)
    for member in world.members.values():
        for group in NAMES:
            assert set(member.machine.group(group)) == wanted.get(group, set())
            assert member.seen.get(group, set()) == wanted.get(group, set())
    held = {name: key for member in world.members.values() for name, key in member.holds.items()}
    world.answers.clear()
    for process in list(world.members):
        for name in NAMES:
            world.ask_plainly(process, name)
    while world.step():
        pass
    assert {(name, key) for _, name, key in world.answers} == set(held.items())


def machine(me: Process, *others: Process) -> DirectoryMachine:
    made = DirectoryMachine(me)
    for other in others:
        made.handle(ev.LinkUp(process=other), now_ns=0)
    made.handle(ev.ViewBegun(epoch=1, members=(me, *others)), now_ns=0)
    return made


A, B, C = ("a", 1), ("b", 1), ("c", 1)


def test_two_parts_that_meet_leave_a_name_to_one() -> None:
    """Views that were not agreed upon: the smaller key keeps the name, and the other receives notice."""
    machines = {A: DirectoryMachine(A), B: DirectoryMachine(B)}
    keys: dict[Process, Key] = {A: ("a", 1, "x", 1), B: ("b", 1, "y", 1)}
    for me, made in machines.items():
        made.handle(ev.LinkUp(process=B if me == A else A), now_ns=0)
        made.handle(ev.ViewBegun(epoch=1, members=(me,)), now_ns=0)
        asked = ev.Asked(call=1, what=What.REGISTER, name="red", key=keys[me])
        (answer,) = made.handle(asked, now_ns=0)
        assert isinstance(answer, ev.Answered) and answer.outcome is NameOutcome.DONE
    lost: list[ev.NameLost] = []
    todo: list[tuple[Process, ev.Event]] = [(me, ev.ViewBegun(epoch=2, members=(A, B))) for me in machines]
    while todo:
        me, event = todo.pop(0)
        for action in machines[me].handle(event, now_ns=0):
            if isinstance(action, ev.Send):
                todo.append((action.to, ev.MessageReceived(source=me, message=action.message)))
            elif isinstance(action, ev.NameLost):
                lost.append(action)
    assert [(action.name, action.key) for action in lost] == [("red", keys[B])]


@pytest.mark.parametrize(
    "message",
    [
        ev.Here(1, {"g": [("c", 1, "x", 1)]}, {}),
        ev.GroupDelta(1, "g", [("b", 1, "x", 1)], []),
        ev.NameAsk(1, 1, What.REGISTER, "red", ("c", 1, "x", 1)),
        ev.Here(5000, {}, {}),
    ],
)
def test_what_a_member_may_not_say(message: ev.Message) -> None:
    with pytest.raises(RemoteProtocolError):
        machine(A, B).handle(ev.MessageReceived(source=B, message=message), now_ns=0)


def test_what_its_driver_may_not_do() -> None:
    made = machine(A, B)
    stranger: Key = ("b", 1, "x", 1)
    for event in (
        ev.ViewBegun(epoch=1, members=(A,)),
        ev.ViewBegun(epoch=2, members=(B,)),
        ev.GroupJoined(group="g", key=stranger),
        ev.Asked(call=1, what=What.REGISTER, name="n", key=stranger),
        ev.Asked(call=0, what=What.LOOK_UP, name="n"),
        ev.LinkUp(process=B),
        ev.LinkUp(process=A),
        ev.LinkDown(process=C),
    ):
        with pytest.raises(LocalProtocolError):
            made.handle(event, now_ns=0)
    assert made.handle(ev.MessageReceived(source=C, message=ev.Here(0, {}, {})), now_ns=0) == [], (
        "of a view that is over"
    )


def test_what_does_not_fit_into_one_message_goes_in_parts() -> None:
    one, other = DirectoryMachine(A), machine(B, A)
    for number in range(2 * ev.HERE_KEYS_MAX):
        one.handle(ev.GroupJoined(group=f"g{number % 3}", key=("a", 1, f"x{number}", number + 1)), now_ns=0)
    one.handle(ev.LinkUp(process=B), now_ns=0)
    actions = one.handle(ev.ViewBegun(epoch=1, members=(A, B)), now_ns=0)
    parts = [action.message for action in actions if isinstance(action, ev.Send)]
    assert [part.last for part in parts if isinstance(part, ev.Here)] == [False, True]
    for part in parts:
        assert other.group("g0") == ()
        assert len(msgspec.msgpack.encode(part)) < MAX_PAYLOAD_BYTES
        other.handle(ev.MessageReceived(source=A, message=part), now_ns=0)
        other.check_invariants()
    assert {len(other.group(f"g{n}")) for n in range(3)} == {1333, 1334}


@pytest.mark.parametrize("given_up", [True, False])
def test_a_name_that_was_granted_over_a_link_that_ended_is_free_or_asked_for_again(given_up: bool) -> None:
    """The answer is lost: nobody knows that the name is taken, so it is free, but for one that still asks."""
    name = next(name for name in map(str, range(99)) if machine(A, B).home(name) == B)
    key: Key = ("a", 1, "x", 1)
    one, home = machine(A, B), machine(B, A)
    one.handle(ev.MessageReceived(source=B, message=ev.Here(1, {}, {})), now_ns=0)
    home.handle(ev.MessageReceived(source=A, message=ev.Here(1, {}, {})), now_ns=0)
    asked = ev.Asked(call=1, what=What.REGISTER, name=name, key=key)
    (send,) = one.handle(asked, now_ns=0)
    assert isinstance(send, ev.Send)
    home.handle(ev.MessageReceived(source=A, message=send.message), now_ns=0)  # its answer is lost
    if given_up:
        one.handle(ev.GivenUp(call=1), now_ns=0)
    for made, peer in ((one, B), (home, A)):
        made.handle(ev.LinkDown(process=peer), now_ns=0)
    home.handle(ev.LinkUp(process=A), now_ns=0)
    for action in one.handle(ev.LinkUp(process=B), now_ns=0):
        assert isinstance(action, ev.Send)
        home.handle(ev.MessageReceived(source=A, message=action.message), now_ns=0)
        home.check_invariants()
    (found,) = home.handle(ev.Asked(call=1, what=What.LOOK_UP, name=name), now_ns=0)
    assert isinstance(found, ev.Answered)
    assert found.outcome is (NameOutcome.FREE if given_up else NameOutcome.FOUND)
