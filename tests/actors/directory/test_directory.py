"""Names and groups of several processes over real links: systems of this process, given views by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
from support.actors.actor_recordings import until

from zbmd.actors.contracts import Contract
from zbmd.actors.core import wire
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.ref import Reason, ReasonKind, Ref
from zbmd.actors.directory import events as ev
from zbmd.actors.directory.driver import NEWS_WAITING_MAX, GroupChange
from zbmd.actors.directory.events import DIRECTORY, GroupNews
from zbmd.actors.errors import DeadActor, InvalidMessage, NameInUse
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import DeadlineExceeded, LocalProtocolError

Join = Callable[[ActorSystem, ActorSystem], None]
Trio = tuple[ActorSystem, ActorSystem, ActorSystem]


class Add(Contract, id="directory_test.add"):
    amount: int


class Total(Contract, id="directory_test.total"):
    value: int


class Keep(Contract, id="directory_test.keep"):
    """Somebody to forward what comes to; None for nobody."""

    to: Ref | None


class Counter(Actor):
    def __init__(self) -> None:
        self.value = 0
        self.to: Ref | None = None

    @on(Add)
    async def add(self, message: Add) -> Total:
        if self.to is not None:
            return await self.to.ask(message, reply=Total)
        self.value += message.amount
        return Total(self.value)

    @on(Keep)
    async def keep(self, message: Keep) -> None:
        self.to = message.to


class Watcher(Actor):
    """Keeps count of a group by its news."""

    def __init__(self, seen: set[Ref]) -> None:
        self.seen = seen
        self.gate = asyncio.Event()
        self.gate.set()

    @on(GroupNews)
    async def news(self, news: GroupNews) -> None:
        await self.gate.wait()
        assert self.seen.issuperset(news.left)
        self.seen -= set(news.left)
        assert self.seen.isdisjoint(news.joined)
        self.seen |= set(news.joined)


def enter(epoch: int, *systems: ActorSystem) -> None:
    members = [(system.name, system.incarnation) for system in systems]
    for system in systems:
        system.open_directory(alone=False).enter(epoch, members)


@pytest.fixture
async def trio(join: Join) -> AsyncIterator[Trio]:
    """Three, linked, in one view."""
    a, b, c = (ActorSystem(f"rank{n}", n + 1) for n in range(3))
    for system in (a, b, c):
        system.open_directory(alone=False)
    for one, other in ((a, b), (a, c), (b, c)):
        join(one, other)
    enter(1, a, b, c)
    yield a, b, c
    for system in (a, b, c):
        await system.stop(timeout=0.2)


# Names.


async def test_a_process_by_itself_has_names_and_groups(system: ActorSystem) -> None:
    ref = await system.spawn(Counter)
    assert await system.whereis("sum") is None
    await system.register("sum", ref)
    await system.register("sum", ref)
    assert await system.whereis("sum") == ref
    with pytest.raises(NameInUse, match=r"'sum' is the name of <Ref rank0/Counter-1#1.1>"):
        await system.register("sum", await system.spawn(Counter))
    assert await system.unregister("sum") and not await system.unregister("sum")
    await system.register("sum", system.ref(ref.actor))
    await system.terminate(ref)
    assert await system.whereis("sum") is None
    with pytest.raises(DeadActor):
        await system.register("sum", ref)
    with pytest.raises(LocalProtocolError, match="1 to 128 characters"):
        await system.whereis("")
    group = await system.group("all")
    with pytest.raises(DeadActor):
        await group.join(ref)
    assert group.members == ()


async def test_a_name_is_one_actors_in_the_whole_view(trio: Trio) -> None:
    refs = [await system.spawn(Counter) for system in trio]
    names = [f"name{number}" for number in range(24)]  # of all three homes
    for number, name in enumerate(names):
        await trio[number % 3].register(name, refs[number % 3])
    for system in trio:
        for number, name in enumerate(names):
            found = await system.whereis(name)
            assert found == refs[number % 3] and found is not None
            await found.ask(Add(1), timeout=60)
            with pytest.raises(NameInUse):
                await system.register(name, system.ref(refs[(number + 1) % 3].address))
    assert await refs[0].ask(Add(0), timeout=60) == Total(24)
    await trio[1].terminate(trio[1].ref(refs[0].address))
    for name in names[::3]:
        for system in trio:
            await until_free(system, name)
        await trio[2].register(name, trio[2].ref(refs[1].address))


async def until_free(system: ActorSystem, name: str) -> None:
    while await system.whereis(name) is not None:  # noqa: ASYNC110 (there is no notice of it)
        await asyncio.sleep(0)


async def test_names_are_given_and_taken_for_actors_of_other_processes(trio: Trio) -> None:
    a, b, c = trio
    far = c.ref((await a.spawn(Counter)).address)
    await c.register("sum", far)
    found = await b.whereis("sum")
    assert found is not None and found.process == "rank0" and found.incarnation
    assert await b.unregister("sum")
    assert await c.whereis("sum") is None
    with pytest.raises(DeadActor):
        await c.register("sum", c.ref("rank0/nobody"))


async def test_names_wait_for_the_first_view_and_for_all_of_its_members(join: Join) -> None:
    a, b = ActorSystem("rank0"), ActorSystem("rank1")
    try:
        ref = await a.spawn(Counter)
        for system in (a, b):
            system.open_directory(alone=False)
        registering = asyncio.create_task(a.register("sum", ref))
        with pytest.raises(DeadlineExceeded):
            await a.whereis("sum", timeout=0.0)
        enter(1, a, b)
        assert not registering.done()
        join(a, b)
        await registering
        assert await b.whereis("sum") == ref
    finally:
        await a.stop(timeout=0.2)
        await b.stop(timeout=0.2)


async def test_a_name_stays_over_views_and_goes_with_its_process(trio: Trio, join: Join) -> None:
    a, b, _ = trio
    refs = {system.name: await system.spawn(Counter) for system in trio}
    names = {f"name{n}": trio[n % 3].name for n in range(12)}
    for name, process in names.items():
        await a.register(name, a.ref(refs[process].address))
    monitor = a.monitor((await a.whereis("name2")) or refs["rank0"])
    a.detach("rank2", "its node was lost")
    b.detach("rank2", "its node was lost")
    down = await monitor.down(timeout=60)
    assert down.reason == Reason(ReasonKind.LOST, "peer rank2 lost: its node was lost")
    enter(2, a, b)
    again = ActorSystem("rank2", 9)
    again.open_directory(alone=False)
    join(again, a)
    join(again, b)
    enter(3, a, b, again)
    try:
        for system in (a, b, again):
            for name, process in names.items():
                found = await system.whereis(name)
                assert found == (None if process == "rank2" else refs[process])
        ref = await again.spawn(Counter)
        await again.register("name2", ref)
        assert await b.whereis("name2") == ref
    finally:
        await again.stop(timeout=0.2)


async def test_a_link_that_is_made_anew_brings_all_that_was_missed(trio: Trio, join: Join) -> None:
    a, b, _ = trio
    ref, other = await a.spawn(Counter), await a.spawn(Counter)
    names = [f"name{number}" for number in range(12)]
    for name in names:
        await a.register(name, ref)
    group = await b.group("workers")
    await (await a.group("workers")).join(ref)
    await until(lambda: group.members == (ref,))
    a.detach("rank1")
    await until(lambda: not b.peers.get("rank0"))
    await a.terminate(ref)
    asked = [asyncio.create_task(a.register(name, other)) for name in names]
    await (await a.group("workers")).join(other)
    await asyncio.sleep(0)
    assert group.members == (ref,), "it is in the view"
    join(a, b)
    await asyncio.gather(*asked)
    assert await group.settled() == (other,)
    for name in names:
        assert await b.whereis(name) == other


# Groups.


async def test_groups_are_the_same_everywhere_and_broadcasts_reach_all(trio: Trio) -> None:
    a, b, c = trio
    groups = [await system.group("workers") for system in trio]
    refs = [await system.spawn(Counter) for system in (a, a, b, c)]
    for ref in refs:
        await groups[0].join(ref)
        await groups[0].join(ref)
    for group in groups:
        await until(lambda group=group: group.members == tuple(refs))  # type: ignore[misc]
    assert groups[0].local_members == tuple(refs[:2])
    assert await groups[1].broadcast(Add(3)) == {}
    for ref in refs:
        assert await b.ref(ref.address).ask(Add(0), timeout=60) == Total(3)
    await groups[2].leave(b.ref(refs[1].address))
    await a.terminate(refs[0])
    for group in groups:
        await until(lambda group=group: group.members == tuple(refs[2:]))  # type: ignore[misc]
    b.detach("rank2")
    failed = await groups[1].broadcast(Add(1))
    assert list(failed) == [refs[3]]
    enter(2, a, b)
    assert groups[0].members == groups[1].members == (refs[2],)


async def test_changes_are_told_to_who_awaits_them_and_to_actors(trio: Trio) -> None:
    a, _, c = trio
    first, second = await a.spawn(Counter), await c.spawn(Counter)
    far, near = await c.group("workers"), await a.group("workers")
    await near.join(first)
    await until(lambda: far.members == (first,))
    seen, seen_far = set[Ref](), set[Ref]()
    watcher, far_watcher = await a.spawn(Watcher, seen), await c.spawn(Watcher, seen_far)
    await near.watch(watcher)
    await near.watch(a.ref(far_watcher.address))
    changes = far.changes()
    assert await anext(changes) == GroupChange((first,), ())
    await far.join(second)
    assert await anext(changes) == GroupChange((second,), ())
    await until(lambda: seen == seen_far == {first, second})
    await near.unwatch(c.ref(far_watcher.address))
    await a.terminate(first)
    assert await anext(changes) == GroupChange((), (first,))
    await until(lambda: seen == {second})
    assert seen_far == {first, second}
    await changes.aclose()
    waiting = asyncio.ensure_future(anext(far.changes(), None))
    await waiting
    await c.stop()


async def test_who_does_not_look_for_long_sees_what_it_comes_to(system: ActorSystem) -> None:
    group = await system.group("g")
    stays, goes = await system.spawn(Counter), await system.spawn(Counter)
    changes = group.changes()
    assert await anext(changes) == GroupChange((), ())
    await group.join(stays)
    for _ in range(1100):
        await group.join(goes)
        await group.leave(goes)
    seen = set[Ref]()
    told = 0
    while seen != {stays}:
        change = await anext(changes)
        told += 1
        seen = (seen - set(change.left)) | set(change.joined)
    assert told <= 1024
    await system.stop()
    assert [change async for change in changes] == [] or seen == {stays}


async def test_an_actor_that_reads_no_news_is_killed(system: ActorSystem) -> None:
    seen = set[Ref]()
    ref = await system.spawn(Watcher, seen)
    watcher = system.find(ref.actor, 0)
    assert watcher is not None and isinstance(watcher.actor, Watcher)
    watcher.actor.gate.clear()
    group = await system.group("g")
    await group.watch(ref)
    other = await system.spawn(Counter)
    monitor = system.monitor(ref)
    for _ in range(NEWS_WAITING_MAX // 2 + 2):
        await group.join(other)
        if not watcher.is_alive:
            break
        await group.leave(other)
    assert (await monitor.down(timeout=60)).reason.kind is ReasonKind.KILLED


# References.


async def test_a_reference_found_by_name_works_from_wherever_it_is_sent_to(trio: Trio) -> None:
    a, b, c = trio
    await a.register("sum", await a.spawn(Counter))
    front = c.ref((await b.spawn(Counter)).address)
    await front.ask(Keep(await c.whereis("sum")), timeout=60)
    assert await front.ask(Add(5), timeout=60) == Total(5)
    found = await a.whereis("sum")
    assert found is not None and found.process == "rank0"
    assert await found.ask(Add(0), timeout=60) == Total(5)


@pytest.mark.parametrize(
    "bad",
    [
        ["rank0", 1, "sp ace", 1],
        ["rank0", 1, "x" * 129, 1],
        ["", 1, "x", 1],
        ["rank0", -1, "x", 1],
        ["rank0", 1, "x"],
        ["rank0", "1", "x", 1],
        {"process": "rank0"},
        7,
    ],
)
def test_a_reference_in_a_message_is_checked_when_it_is_decoded(bad: object) -> None:
    codec = wire.Codec(lambda data: pytest.fail(f"bound {data}"))
    with pytest.raises(InvalidMessage):
        codec.decode_contract(msgspec.msgpack.encode(["directory_test.keep/1", bad]))


async def test_a_directory_that_lies_loses_its_link_and_nothing_else(trio: Trio) -> None:
    a, b, c = trio
    ref = await a.spawn(Counter)
    await a.register("sum", ref)
    lie = ev.GroupDelta(1, "workers", [("rank1", 2, "x", 1)], [])
    await c.ref(f"rank0/{DIRECTORY}").tell(lie)
    await until(lambda: "rank2" not in a.peers and "rank0" not in c.peers)
    assert await b.whereis("sum") == ref
    assert (await a.group("workers")).members == ()
