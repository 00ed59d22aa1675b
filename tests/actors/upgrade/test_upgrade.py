"""Actors whose code is changed while they live: nothing lost, nothing reordered, and the way back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import on
from zbmd.actors.core.context import Deferred, DeferredReply
from zbmd.actors.core.ref import Reason, ReasonKind, Ref
from zbmd.actors.errors import ActorFailed, UpgradeRefused, UpgradeUndone
from zbmd.actors.supervision.supervisor import ChildSpec
from zbmd.actors.system import Actor, ActorSystem
from zbmd.actors.upgrade.driver import Upgraded
from zbmd.actors.upgrade.local import CodeBook

Pair = tuple[ActorSystem, ActorSystem]
PROBATION_S = 0.02
LONG_S = 60.0


class Add(Contract, id="upgrade.add"):
    number: int


class Sum(Contract, id="upgrade.sum"):
    value: int
    version: int


class Read(Contract, id="upgrade.read"):
    pass


class Hold(Contract, id="upgrade.hold"):
    pass


class Free(Contract, id="upgrade.free"):
    pass


class Extra(Contract, id="upgrade.extra"):
    pass


class Counter(Actor, remote=True, version=1):
    """Holds a list, so that a copy that is not deep is found out."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    @on(Add)
    async def add(self, message: Add) -> Sum:
        self.seen.append(message.number)
        await asyncio.sleep(0)
        return Sum(len(self.seen), self.version)

    @on(Read)
    async def read(self, _: Read) -> Sum:
        return Sum(len(self.seen), self.version)


class Counter2(Counter, remote=True, version=2):
    """Keeps its numbers elsewhere."""

    @classmethod
    def code_change(cls, state: dict[str, Any], from_version: int) -> dict[str, Any]:
        return state if from_version == 2 else {"numbers": state["seen"], "came_from": from_version}

    @classmethod
    def code_change_back(cls, state: dict[str, Any], to_version: int) -> dict[str, Any]:
        return state if to_version == 2 else {"seen": state["numbers"]}

    numbers: list[int]
    came_from: int

    @on(Add)
    async def add(self, message: Add) -> Sum:
        self.numbers.append(message.number)
        return Sum(len(self.numbers), self.version)

    @on(Read)
    async def read(self, _: Read) -> Sum:
        return Sum(len(self.numbers), self.version)


class Breaks(Counter2, remote=True, version=3):
    """Crashes at a number, after it has changed what it holds."""

    at = 13

    @on(Add)
    async def add(self, message: Add) -> Sum:
        if message.number == self.at:
            self.numbers.append(-1)
            raise RuntimeError("unlucky")
        return await super().add(message)

    @on(Extra)
    async def extra(self, _: Extra) -> None:
        raise RuntimeError("new, and wrong")


class FailsToStart(Counter2, remote=True, version=4):
    async def started(self) -> None:
        raise RuntimeError("not like this")


async def version(ref: Ref) -> int:
    return (await ref.ask(Read(), reply=Sum, timeout=120.0)).version


def actor_of(system: ActorSystem, name: str) -> Any:
    cell = system.find(name, 0)
    assert cell is not None
    return cell.actor


async def until(is_so: Callable[[], bool]) -> None:
    while True:
        if is_so():
            return
        await asyncio.sleep(0)


async def until_on_probation(upgrading: asyncio.Task[Upgraded], system: ActorSystem) -> None:
    while (
        not CodeBook.of(system).on_trial
        or type(actor_of(system, "counter")) not in CodeBook.of(system).on_trial
    ):
        assert not upgrading.done(), upgrading.result()
        await asyncio.sleep(0)


async def test_actors_change_between_two_messages_and_nothing_is_lost(system: ActorSystem) -> None:
    counter = await system.spawn(Counter, name="counter")
    idle = await system.spawn(Counter, name="idle")
    over = asyncio.Event()
    sent = 0

    async def load() -> None:
        nonlocal sent
        while not over.is_set():
            await counter.tell(Add(sent))
            sent += 1

    loading = asyncio.create_task(load())
    done = await system.upgrade(Counter, Counter2, probation_s=PROBATION_S)
    over.set()
    await loading
    assert done.actors == 2 and done.processes == ("rank0",)
    assert await counter.ask(Read(), reply=Sum, timeout=120.0) == Sum(sent, 2)
    assert await version(idle) == 2
    after = actor_of(system, "counter")
    assert after.numbers == list(range(sent)) and after.came_from == 1 and not hasattr(after, "seen")
    fresh = await system.spawn(Counter, name="fresh")
    assert type(actor_of(system, "fresh")) is Counter2 and fresh.incarnation > counter.incarnation


async def test_a_version_that_crashes_is_taken_back_and_its_message_is_handled(system: ActorSystem) -> None:
    counter = await system.spawn(Counter, name="counter")
    other = await system.spawn(Counter, name="other")
    upgrading = asyncio.create_task(system.upgrade(Counter, Breaks, probation_s=LONG_S))
    await until_on_probation(upgrading, system)
    answers = [await counter.ask(Add(n), reply=Sum, timeout=120.0) for n in range(20)]
    await other.ask(Add(7), timeout=120.0)
    with pytest.raises(UpgradeUndone, match=r"rank0/counter Add: RuntimeError: unlucky.*version 1"):
        await upgrading
    assert [answer.value for answer in answers] == list(range(1, 21)), "each counted once"
    assert {a.version for a in answers[:13]} == {3} and {a.version for a in answers[13:]} == {1}
    assert actor_of(system, "counter").seen == list(range(20))
    assert type(actor_of(system, "other")) is Counter and actor_of(system, "other").seen == [7]
    assert CodeBook.of(system).newer == {} and CodeBook.of(system).on_trial == {}


async def test_what_only_the_new_version_understands_fails_and_nothing_else_does(system: ActorSystem) -> None:
    counter = await system.spawn(Counter, name="counter")
    upgrading = asyncio.create_task(system.upgrade(Counter, Breaks, probation_s=LONG_S))
    await until_on_probation(upgrading, system)
    with pytest.raises(ActorFailed, match="runs version 1 again"):
        await counter.ask(Extra(), timeout=120.0)
    with pytest.raises(UpgradeUndone):
        await upgrading
    assert await version(counter) == 1


class Shaky(Counter, remote=True, version=7):
    @on(Extra)
    async def extra(self, _: Extra) -> None:
        raise RuntimeError("new, and wrong")


class Steady(Counter, remote=True, version=8):
    pass


async def test_what_was_spawned_on_a_probation_that_failed_says_nothing_of_the_next(
    system: ActorSystem,
) -> None:
    """It ran the version that was taken back; now it runs another, which is kept."""
    counter = await system.spawn(Counter, name="counter")
    upgrading = asyncio.create_task(system.upgrade(Counter, Shaky, probation_s=LONG_S))
    await until_on_probation(upgrading, system)
    fresh = await system.spawn(Counter, name="fresh")
    with pytest.raises(ActorFailed):
        await counter.ask(Extra(), timeout=120.0)
    with pytest.raises(UpgradeUndone):
        await upgrading
    await system.upgrade(Counter, Steady, probation_s=PROBATION_S)
    assert type(actor_of(system, "fresh")) is Steady
    monitor = system.monitor(fresh)
    system.exit(fresh, Reason(ReasonKind.FAILED, "test"))
    await monitor.down(timeout=120.0)
    await system.spawn(Counter, name="fresh")
    assert type(actor_of(system, "fresh")) is Steady


async def test_after_the_probation_a_crash_is_a_crash(system: ActorSystem) -> None:
    counter = await system.spawn(Counter, name="counter")
    await system.upgrade(Counter, Breaks, probation_s=PROBATION_S)
    with pytest.raises(ActorFailed, match="unlucky"):
        await counter.ask(Add(13), timeout=120.0)


async def test_a_supervisor_restarts_the_version_that_holds(system: ActorSystem) -> None:
    await system.supervise([ChildSpec(name="counter", actor=Counter)], intensity=10)
    await system.upgrade(Counter, Breaks, probation_s=PROBATION_S)
    with pytest.raises(ActorFailed):
        await system.ref("counter").ask(Add(13), timeout=120.0)
    await until(lambda: system.find("counter", 0) is not None)
    assert type(actor_of(system, "counter")) is Breaks


async def test_a_version_that_does_not_start_is_taken_back(system: ActorSystem) -> None:
    await system.supervise([ChildSpec(name="counter", actor=Counter)], intensity=10)
    upgrading = asyncio.create_task(system.upgrade(Counter, FailsToStart, probation_s=LONG_S))
    await until_on_probation(upgrading, system)
    system.exit(system.ref("counter"), Reason(ReasonKind.KILLED, "to have it restarted"))
    with pytest.raises(UpgradeUndone, match="not like this"):
        await upgrading
    await until(lambda: system.find("counter", 0) is not None)
    assert await version(system.ref("counter")) == 1


# Over processes.


async def test_the_canary_changes_first_and_if_it_crashes_the_others_never_do(pair: Pair) -> None:
    here, there = pair
    canary = await here.spawn(Counter, name="counter")
    await there.spawn(Counter, name="counter")
    upgrading = asyncio.create_task(
        here.upgrade(Counter, Breaks, processes=["rank0", "rank1"], probation_s=LONG_S)
    )
    await until_on_probation(upgrading, here)
    assert Counter not in CodeBook.of(there).newer
    assert (await canary.ask(Add(13), reply=Sum, timeout=120.0)).version == 1
    with pytest.raises(UpgradeUndone, match=r"rank0: .*unlucky"):
        await upgrading
    assert type(actor_of(there, "counter")) is Counter and CodeBook.of(there).newer == {}
    assert not [cell.name for system in pair for cell in system.cells() if "upgrade" in cell.name]


async def test_all_processes_change_and_a_crash_in_the_second_stage_takes_all_back(pair: Pair) -> None:
    here, there = pair
    await here.spawn(Counter, name="counter")
    await there.spawn(Counter, name="counter")
    done = await here.upgrade(Counter, Counter2, processes=["rank1", "rank0"], probation_s=PROBATION_S)
    assert done.actors == 2 and done.silent == ()
    remote = here.ref("rank1/counter")
    assert await version(remote) == 2
    upgrading = asyncio.create_task(
        here.upgrade(Counter2, Breaks, processes=["rank0", "rank1"], canaries=2, probation_s=LONG_S)
    )
    await until_on_probation(upgrading, here)
    await until_on_probation(upgrading, there)
    assert (await here.ref("counter").ask(Add(1), reply=Sum, timeout=120.0)).version == 3
    assert (await remote.ask(Add(13), reply=Sum, timeout=120.0)).version == 2
    with pytest.raises(UpgradeUndone, match="rank1: "):
        await upgrading
    assert await version(here.ref("counter")) == 2 and actor_of(here, "counter").numbers == [1]


async def test_a_process_that_is_lost_on_probation_takes_it_back(pair: Pair) -> None:
    here, there = pair
    await here.spawn(Counter, name="counter")
    await there.spawn(Counter, name="counter")
    upgrading = asyncio.create_task(
        here.upgrade(Counter, Counter2, processes=["rank0", "rank1"], canaries=2, probation_s=LONG_S)
    )
    await until_on_probation(upgrading, there)
    await until_on_probation(upgrading, here)
    here.detach("rank1")
    with pytest.raises(UpgradeUndone, match="rank1 was lost on probation"):
        await upgrading
    assert await version(here.ref("counter")) == 1
    await until(lambda: type(actor_of(there, "counter")) is Counter)  # it has lost its coordinator


async def test_who_gives_up_leaves_the_old_version(pair: Pair) -> None:
    here, there = pair
    await there.spawn(Counter, name="counter")
    upgrading = asyncio.create_task(here.upgrade(Counter, Counter2, processes=["rank1"], probation_s=LONG_S))
    await until_on_probation(upgrading, there)
    upgrading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upgrading
    await until(lambda: not CodeBook.of(there).newer and type(actor_of(there, "counter")) is Counter)


async def test_a_process_that_lacks_the_class_is_named_and_nothing_changes(pair: Pair) -> None:
    here, there = pair
    await here.spawn(Counter, name="counter")

    class Local(Counter2, version=9):
        pass

    with pytest.raises(UpgradeRefused, match="remote=True"):
        await here.upgrade(Counter, Local, processes=["rank0", "rank1"])
    with pytest.raises(UpgradeUndone, match=r"rank0 has no link to it"):
        await here.upgrade(Counter, Counter2, processes=["rank0", "rank7"], probation_s=PROBATION_S)
    assert await version(here.ref("counter")) == 1 and CodeBook.of(there).newer == {}


# What is refused.


class Loses(Actor, version=2):
    @on(Add)
    async def add(self, _: Add) -> Sum:
        return Sum(0, 2)


class AnswersMore(Counter, version=2):
    @on(Read)
    async def read(self, _: Read) -> Sum | Add:  # type: ignore[override]
        return Add(1)


class NoWayBack(Counter, version=2):
    @classmethod
    def code_change(cls, state: dict[str, Any], from_version: int) -> dict[str, Any]:
        return state


class Slotted(Counter, version=2):
    __slots__ = ("more",)


@pytest.mark.parametrize(
    ("new", "words"),
    [
        (Loses, "no handler for upgrade.read/1"),
        (AnswersMore, "answered with Add"),
        (NoWayBack, "no code_change_back"),
        (Slotted, "__slots__"),
        (type("Same", (Counter,), {}), "both are version 1"),
    ],
)
async def test_what_could_lose_a_message_is_refused(
    system: ActorSystem, new: type[Actor], words: str
) -> None:
    counter = await system.spawn(Counter, name="counter")
    with pytest.raises(UpgradeRefused, match=words):
        await system.upgrade(Counter, new)
    assert await version(counter) == 1


async def test_attributes_that_cannot_be_copied_are_told_of(system: ActorSystem) -> None:
    counter = await system.spawn(Counter, name="counter")
    actor_of(system, "counter").lock = threading.Lock()
    with pytest.raises(UpgradeUndone, match="override code_state of Counter"):
        await system.upgrade(Counter, Counter2, probation_s=PROBATION_S)
    assert await version(counter) == 1
    await system.upgrade(Counter, Counter2, probation_s=0)
    assert await version(counter) == 2


async def test_one_change_of_a_class_at_a_time(system: ActorSystem) -> None:
    await system.spawn(Counter, name="counter")
    upgrading = asyncio.create_task(system.upgrade(Counter, Counter2, probation_s=PROBATION_S))
    await until_on_probation(upgrading, system)
    with pytest.raises(UpgradeUndone, match="is being replaced"):
        await system.upgrade(Counter, Breaks)
    await upgrading
    with pytest.raises(UpgradeUndone, match="or has been"):
        await system.upgrade(Counter, Breaks)


# Answers owed, and contracts.


class Clerk(Actor, version=1):
    def __init__(self) -> None:
        self.owed: list[Deferred] = []

    @on(Hold)
    async def hold(self, _: Hold) -> Sum | DeferredReply:
        self.owed.append(later := self.defer())
        return later

    @on(Free)
    async def free(self, _: Free) -> None:
        for later in self.owed:
            later.reply(Sum(0, self.version))
        self.owed.clear()


class Clerk2(Clerk, version=2):
    @on(Hold)
    async def hold(self, _: Hold) -> Sum | DeferredReply:
        self.owed.append(self.defer())
        raise RuntimeError("changed its mind")


async def test_answers_owed_outlive_the_change_and_a_crash_after_putting_one_off(
    system: ActorSystem,
) -> None:
    clerk = await system.spawn(Clerk, name="clerk")
    first = asyncio.create_task(clerk.ask(Hold(), reply=Sum, timeout=120.0))
    await until(lambda: bool(actor_of(system, "clerk").owed))
    upgrading = asyncio.create_task(system.upgrade(Clerk, Clerk2, probation_s=LONG_S))
    await until(lambda: type(actor_of(system, "clerk")) is Clerk2)
    second = asyncio.create_task(clerk.ask(Hold(), reply=Sum, timeout=120.0))
    with pytest.raises(UpgradeUndone, match="changed its mind"):
        await upgrading
    assert len(actor_of(system, "clerk").owed) == 2
    await clerk.ask(Free(), timeout=120.0)
    assert (await first, await second) == (Sum(0, 1), Sum(0, 1))


class Note(Contract, id="upgrade.note", version=1):
    text: str


class NoteWithTime(Contract, id="upgrade.note", version=2, compatible_from=1):
    text: str
    at: int = -1


class Pad(Actor, version=1):
    def __init__(self) -> None:
        self.notes: list[object] = []

    @on(Note)
    async def note(self, message: Note) -> None:
        self.notes.append(message.text)

    @on(Hold)
    async def hold(self, _: Hold) -> None:
        await actor_gate(self.system).wait()


class Pad2(Pad, version=2):
    @on(NoteWithTime)
    async def note_with_time(self, message: NoteWithTime) -> None:
        self.notes.append((message.text, message.at))


del Pad2._handlers[Note]
_gates: dict[ActorSystem, asyncio.Event] = {}


def actor_gate(system: ActorSystem) -> asyncio.Event:
    return _gates.setdefault(system, asyncio.Event())


async def test_messages_of_the_older_contract_that_wait_are_handled_by_the_newer(system: ActorSystem) -> None:
    pad = await system.spawn(Pad, name="pad")
    await pad.tell(Note("before"))
    await pad.tell(Hold())
    await pad.tell(Note("waits"))
    upgrading = asyncio.create_task(system.upgrade(Pad, Pad2, probation_s=PROBATION_S))
    actor = actor_of(system, "pad")
    await until(lambda: bool(CodeBook.of(system).newer))
    assert type(actor) is Pad, "it is at a message"
    actor_gate(system).set()
    await upgrading
    await pad.tell(NoteWithTime("after", 7))
    await pad.tell(Note("late"))
    await pad.ask(Hold(), timeout=120.0)
    assert actor.notes == ["before", ("waits", -1), ("after", 7), ("late", -1)]
