"""Starts that are given up, here and in other processes: their end is reported, nothing is left behind."""

from __future__ import annotations

import asyncio

from zbmd.actors.contracts import Contract, fingerprints
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.errors import ActorError
from zbmd.actors.supervision.events import Restart, Strategy
from zbmd.actors.supervision.supervisor import Children, ChildSpec, WhichChildren
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import DeadlineExceeded, PeerLost
from zbmd.transport.link.interface import Link
from zbmd.transport.sim import Clog, SimProcess, World

MS = 1_000_000


class Fail(Contract, id="test.given_up.fail"):
    pass


class Ready(Actor, remote=True):
    @on(Fail)
    async def fail(self, _: Fail) -> None:
        raise RuntimeError("as told")


class Slow(Actor, remote=True):
    """Takes a second to start."""

    async def started(self) -> None:
        await asyncio.sleep(1.0)


async def host(process: SimProcess) -> None:
    system = ActorSystem(process.name, process.incarnation)
    while not system.peers:
        try:
            system.attach(await process.dial("node", contracts=fingerprints()))
        except PeerLost:
            await asyncio.sleep(0.001)
    while True:
        await asyncio.sleep(0.01)
        process.note(sorted(actor.name for actor in system.describe()))


async def linked(process: SimProcess) -> ActorSystem:
    system, joined = ActorSystem(process.name, process.incarnation), asyncio.Event()

    def accept(link: Link) -> None:
        system.attach(link)
        joined.set()

    process.listen(accept, contracts=fingerprints())
    await joined.wait()
    return system


def last_seen(world: World) -> object:
    """The host's last state."""
    return [value for name, value in world.notes() if name == "rank0"][-1]


async def outcome_of(spawn: asyncio.Task[object]) -> str:
    try:
        await spawn
    except (asyncio.CancelledError, DeadlineExceeded, ActorError) as error:
        return type(error).__name__
    return "spawned"


def test_a_cancelled_spawn_in_another_process_leaves_nobody_and_frees_the_name() -> None:
    async def node(process: SimProcess) -> None:
        system = await linked(process)
        for wait_s in (0.0, 0.00003, 0.0001, 0.1):  # not sent, under way, being started
            spawn: asyncio.Task[object] = asyncio.create_task(
                system.spawn_on("rank0", Slow, name="w", timeout=9)
            )
            await asyncio.sleep(wait_s)
            spawn.cancel()
            process.note(await outcome_of(spawn))
        ref = await system.spawn_on("rank0", Ready, name="w", timeout=9)
        process.note(ref.address)
        await asyncio.sleep(2)

    with World(1) as world:
        world.add("node", node)
        world.add("rank0", host)
        world.run(for_ns=1_500 * MS)
        told = [value for name, value in world.notes() if name == "node"]
        assert told == ["CancelledError"] * 4 + ["rank0/w"]
        assert last_seen(world) == ["w"]


def test_a_spawn_that_timed_out_leaves_nobody() -> None:
    async def node(process: SimProcess) -> None:
        system = await linked(process)
        await asyncio.sleep(0.02)
        spawn: asyncio.Task[object] = asyncio.create_task(
            system.spawn_on("rank0", Ready, name="w", timeout=0.1)
        )
        process.note(await outcome_of(spawn))
        await asyncio.sleep(1)

    with World(2) as world:
        world.add("node", node)
        world.add("rank0", host)
        world.apply(Clog(source="node", target="rank0", at_ns=15 * MS, for_ns=300 * MS))
        world.run(for_ns=800 * MS)
        assert [value for name, value in world.notes() if name == "node"] == ["DeadlineExceeded"]
        assert last_seen(world) == []


def test_an_answer_that_crosses_the_cancellation_is_undone() -> None:
    """The spawner is cancelled in the turn between the answer's arrival and its own."""

    async def node(process: SimProcess) -> None:
        system = await linked(process)
        spawn = asyncio.create_task(system.spawn_on("rank0", Ready, name="w", timeout=9))
        (peer,) = system._peers.values()
        while not peer._calls:  # noqa: ASYNC110 (turn by turn)
            await asyncio.sleep(0)
        while peer._calls:  # noqa: ASYNC110 (turn by turn)
            await asyncio.sleep(0)
        assert not spawn.done()
        spawn.cancel()
        await asyncio.wait([spawn])
        process.note("cancelled" if spawn.cancelled() else "spawned")
        await asyncio.sleep(1)

    with World(1) as world:
        world.add("node", node)
        world.add("rank0", host)
        world.run(for_ns=500 * MS)
        assert [value for name, value in world.notes() if name == "node"] == ["cancelled"]
        assert last_seen(world) == []


async def children_of(system: ActorSystem) -> list[tuple[str, str, int]]:
    return (await system.ref("tree").ask(WhichChildren(), timeout=5, reply=Children)).children


async def test_a_child_stopped_in_the_moment_of_its_start_holds_nobody_up(system: ActorSystem) -> None:
    """`a` fails while `b` starts: `b` is stopped and, being temporary, never comes up; the tree does."""

    class Waiting(Actor):
        entered = asyncio.Event()

        async def started(self) -> None:
            self.entered.set()
            await asyncio.Event().wait()

    children = [
        ChildSpec(name="a", actor=Ready),
        ChildSpec(name="b", actor=Waiting, restart=Restart.TEMPORARY),
    ]
    growing = asyncio.create_task(system.supervise(children, strategy=Strategy.ONE_FOR_ALL, name="tree"))
    await Waiting.entered.wait()
    await system.ref("a").tell(Fail())
    async with asyncio.timeout(5):
        await growing
    assert await children_of(system) == [("a", "running", 2)]
