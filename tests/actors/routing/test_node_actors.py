"""Actors of the nodes of a cluster: real machines of membership, real TCP between the actors of each two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest
from support.actors.actor_recordings import until
from support.cluster.memory_cluster import MemoryCluster, MemoryNode

from zbmd.actors.cluster.node.actors import NodeActors
from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.ref import Down, Exited, ReasonKind
from zbmd.actors.errors import UnknownActorClass
from zbmd.actors.routing.contracts import Enrol, Route
from zbmd.actors.routing.dialer import ExternalDialer, Lease
from zbmd.actors.routing.routes import RemoteLocator, Routes
from zbmd.actors.system import ActorSystem
from zbmd.transport.clock.deadlines import derive
from zbmd.transport.errors import PeerLost
from zbmd.transport.link.interface import Link
from zbmd.transport.tcp.address import TcpSettings

COOKIE = b"the cookie of all nodes with actors of a test"


class Add(Contract, id="node_actors.add"):
    amount: int


class Total(Contract, id="node_actors.total"):
    value: int


class Counter(Actor, remote=True):
    """Counts, and keeps what it hears of others' ends."""

    trap_exit = True

    def __init__(self) -> None:
        self.value = 0
        self.heard: list[Down | Exited] = []

    @on(Add)
    async def add(self, message: Add) -> Total:
        self.value += message.amount
        return Total(self.value)

    @on(Down)
    async def down(self, down: Down) -> None:
        self.heard.append(down)

    @on(Exited)
    async def exited(self, exited: Exited) -> None:
        self.heard.append(exited)


class Nodes:
    """Nodes of one process, each with its actors; ids from 1."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster(3, lambda: None, first=1)
        self.started: list[str] = []
        self.where: dict[int, str] = {}
        self.actors = {node_id: self._actors(node) for node_id, node in self.cluster.nodes.items()}

    def _actors(self, node: MemoryNode) -> NodeActors:
        where = partial(self.where.__setitem__, node.me.id)
        return NodeActors(node, cookie=COOKIE, start=self._start, on_listening=where)

    async def _start(self, system: ActorSystem) -> None:
        await system.spawn(Counter, name="counter")
        self.started.append(f"{system.name}#{system.incarnation}")

    def add(self) -> MemoryNode:
        node = self.cluster.add()
        self.actors[len(self.actors) + 1] = self._actors(node)
        node.start(self.cluster.nodes[1])
        return node

    async def linked(self, *ids: int) -> list[ActorSystem]:
        """The systems of these nodes, once they are linked with each other and nobody else, in one view."""

        def ready() -> bool:
            found = [self.actors[node_id].system for node_id in ids]
            processes = {(system.name, system.incarnation) for system in found if system is not None}
            return len(processes) == len(ids) and all(
                set(system.open_directory(alone=False).members) == processes
                and set(system.peers.items()) == processes - {(system.name, system.incarnation)}
                and system.find("counter", 0) is not None
                for system in found
                if system is not None
            )

        async with asyncio.timeout(120):
            while not ready():  # noqa: ASYNC110 (several things of several nodes)
                await asyncio.sleep(0)
        return [system for node_id in ids if (system := self.actors[node_id].system) is not None]

    async def close(self) -> None:
        for actors in self.actors.values():
            await actors.close()
        self.cluster.close()


@pytest.fixture
async def nodes() -> AsyncIterator[Nodes]:
    made = Nodes()
    yield made
    await made.close()


def actor_of(system: ActorSystem, name: str) -> Counter:
    cell = system.find(name, 0)
    assert cell is not None and isinstance(cell.actor, Counter)
    return cell.actor


async def test_names_groups_spawns_and_references_work_over_all_nodes(nodes: Nodes) -> None:
    one, two, three = await nodes.linked(1, 2, 3)
    ref = await one.spawn_on("node3", Counter, name="far", timeout=120)
    assert ref.process == "node3"
    await two.register("sum", two.ref("node3/far"))
    for system in (one, two, three):
        found = await system.whereis("sum")
        assert found == ref and found is not None
        await found.ask(Add(2), reply=Total, timeout=120)
    group = await one.group("counters")
    for system in (one, two, three):
        await group.join(one.ref(f"{system.name}/counter"))
    seen = await three.group("counters")
    await until(lambda: len(seen.members) == 3)
    assert await seen.broadcast(Add(5)) == {}
    for member in seen.members:
        assert await member.ask(Add(0), reply=Total, timeout=120) == Total(5)
    with pytest.raises(UnknownActorClass):
        await one.spawn_on("node2", "os:system", timeout=120)


async def test_a_node_that_is_lost_is_told_of_once_and_its_actors_end(nodes: Nodes) -> None:
    """As in a partition: nobody says goodbye, and the lost node goes on until it learns that it is out."""
    one, two, three = await nodes.linked(1, 2, 3)
    watcher = actor_of(one, "counter")
    there = one.ref((await three.spawn(Counter, name="there")).address)
    lasting = await one.spawn_on("node3", Counter, name="linked", timeout=120)
    await one.register("there", there)
    found = await two.whereis("there")
    assert found is not None
    watcher.monitor(there)
    watcher.link(lasting)
    monitors = [two.monitor(found), one.monitor(there)]
    nodes.cluster.nodes[3].die()
    for monitor in monitors:
        down = await monitor.down(timeout=120)
        assert down.reason.kind is ReasonKind.LOST and "node3 lost" in down.reason.text
    await nodes.linked(1, 2)
    await until(lambda: not three.peers)
    assert actor_of(three, "there").value == 0, "it lives, and knows nothing of it"
    nodes.cluster.nodes[3].cut_off()
    assert nodes.actors[3].system is None
    await until(lambda: not three.describe())
    assert await two.whereis("there") is None
    with pytest.raises(PeerLost):
        await there.ask(Add(1), timeout=60)
    nodes.cluster.nodes[3].again(nodes.cluster.nodes[1])
    _, _, again = await nodes.linked(1, 2, 3)
    assert again.incarnation == 2
    fresh = await again.spawn(Counter, name="there")
    await two.register("there", two.ref(fresh.address))
    assert await one.whereis("there") == fresh
    await watcher.ref.ask(Add(0), timeout=60)
    assert sorted(type(end).__name__ for end in watcher.heard) == ["Down", "Exited"], "each once"
    assert sorted(nodes.started) == ["node1#1", "node2#1", "node3#1", "node3#2"]


async def test_a_link_that_breaks_between_two_members_is_made_again(nodes: Nodes) -> None:
    one, two, three = await nodes.linked(1, 2, 3)
    await one.register("sum", one.ref("node1/counter"))
    two.detach("node1", "a test cuts it")
    await nodes.linked(1, 2, 3)
    for system in (one, two, three):
        found = await system.whereis("sum", timeout=120)
        assert found is not None
        await found.ask(Add(1), timeout=120)
    nodes.add()
    four = (await nodes.linked(1, 2, 3, 4))[3]
    found = await four.whereis("sum", timeout=120)
    assert found is not None and await found.ask(Add(0), timeout=120) == Total(3)


async def test_a_start_that_fails_is_told(nodes: Nodes) -> None:
    async def fail(_: ActorSystem) -> None:
        raise ValueError("nothing to start")

    node = nodes.cluster.add()
    actors = NodeActors(node, cookie=COOKIE, start=fail)
    node.start(nodes.cluster.nodes[1])
    with pytest.raises(ValueError, match="nothing to start"):
        async with asyncio.timeout(120):
            await actors.failed()
    await actors.close()


async def stay(script: ActorSystem, nodes: Nodes) -> None:
    """Put a script into the cluster by way of node 2, as `Session.connect` does."""
    guest = ExternalDialer(script.name, script.incarnation, 0, COOKIE, TcpSettings(), derive())
    ways = Routes(script, RemoteLocator(script, "node2"), guest.dial)
    far = await guest.listen_far("127.0.0.1", ways)

    async def link_up() -> tuple[Link, Enrol]:
        return await guest.dial(Route("node2", 1, "", "", nodes.where[2])), Enrol("", "", far)

    await Lease(script, ways, link_up).enter()


async def test_a_script_is_found_by_all_and_again_once_its_link_is_back(nodes: Nodes) -> None:
    systems = await nodes.linked(1, 2, 3)
    script = ActorSystem("session-1@node2")
    try:
        await stay(script, nodes)
        await script.spawn(Counter, name="counter")
        address = f"{script.name}/counter"
        answers = [await system.ref(address).ask(Add(1), reply=Total, timeout=120) for system in systems]
        assert [answer.value for answer in answers] == [1, 2, 3]
        monitor = systems[0].monitor(systems[0].ref(address))
        systems[1].dismiss(script.name, script.incarnation, "cut")
        down = await monitor.down(timeout=120)
        assert down.reason.kind is ReasonKind.LOST, "its node says that it is gone, though its link stands"
        async with asyncio.timeout(120):
            while (await heard(systems[2], address)) is None:
                pass
    finally:
        await script.stop()
    with pytest.raises(PeerLost, match="has ended"):
        await systems[0].ref(address).ask(Add(1), timeout=120)


async def heard(system: ActorSystem, address: str) -> Total | None:
    """An answer from there, if it is found."""
    try:
        return await system.ref(address).ask(Add(1), reply=Total, timeout=120)
    except PeerLost:
        return None
