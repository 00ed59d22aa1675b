"""Supervision trees over nodes that crash and are cut off, with names, groups, links, and changes of code.

Every node grows a tree of its own, whose workers live on it and on others. Clients on all nodes talk to
workers, give them names, have them join groups, link and watch them, have them fail, and change their code in
stages. A session, which is no node, talks to workers everywhere and watches them. A part of the nodes is
protected, as in the scenario `membership`; the others crash, stand still, are cut off, deaf or mute. Names,
groups and upgrades follow the views that the nodes agree on.

Once the faults have ended, all nodes must act on one view; every tree must be whole, and nobody live who is
in none; names and groups must be known to all alike; every change of code must have come to one end; all who
watched or were linked with one that has ended must know of it; and every node must have answers from every
other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from zbmd.actors.cluster.node.actors import NodeActors
from zbmd.actors.cluster.state.node_id import Node
from zbmd.actors.simulated.clients import CLIENTS, SessionProgram
from zbmd.actors.simulated.links_scenario import InTime
from zbmd.actors.simulated.membership_scenario import Cluster, draw_plan, harms, name_of, protected_of
from zbmd.actors.simulated.supervision_scenario import Rules, ToldOnce, draw_tree
from zbmd.actors.simulated.testbed import SESSIONS, SimActorEndpoint, SimNode, Testbed, TestbedWorld, Worker
from zbmd.actors.system import ActorSystem
from zbmd.actors.upgrade.driver import Coordinator
from zbmd.actors.upgrade.local import CodeBook
from zbmd.transport import sim

FIRST: Final = 1
"""The id of the node that founds the cluster."""
UNIT_NS: Final = 500_000_000
"""What `length` counts."""
LOOK_STRIDE: Final = 64
"""Whether all is well is looked at after every so many events."""
AGAIN_NS: Final = 100_000_000
"""After its incarnation has ended, a node tries again so much later."""
OF_SESSIONS: Final = 0.25
"""The part of the faults that are kills of sessions."""
LIVENESS_NS: Final = 40_000_000_000
"""Longer than a node may knock, and than a child may take to start on another node, and then some."""


class NodeProgram:
    """The program of a node: its membership, its actors, and what is done with them."""

    def __init__(self, testbed: Testbed, node_id: int) -> None:
        self._testbed, self._id = testbed, node_id

    async def __call__(self, process: sim.SimProcess) -> None:
        """One incarnation."""
        testbed, cluster = self._testbed, self._testbed.cluster
        while not (cluster.begun or process.name in cluster.protected):  # noqa: ASYNC110 (no event of its own)
            await asyncio.sleep(AGAIN_NS / 1e9)
        port = SimNode(process, cluster, self._id)
        testbed.ports[process.name] = port
        actors = NodeActors(
            port, cookie=b"", start=partial(self._start, process), endpoint=partial(_endpoint, process)
        )
        failed = asyncio.create_task(actors.failed())
        running = asyncio.create_task(port.run(self._contacts(process.incarnation)))
        waited: set[asyncio.Future[Any]] = {port.over, failed, running}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        for task in (failed, running):
            if task.done():
                await task
        await actors.close()
        testbed.nodes.ended(process)
        world, name = testbed.world, process.name
        world.call_at(world.now_ns + AGAIN_NS, partial(_revive, world, name))

    def _contacts(self, incarnation: int) -> tuple[Node, ...]:
        founds = self._id == FIRST and incarnation == 1
        return () if founds else self._testbed.cluster.contacts(self._id, incarnation)

    async def _start(self, process: sim.SimProcess, system: ActorSystem) -> None:
        self._testbed.nodes.began(process, system)
        async with asyncio.TaskGroup() as tasks:
            for client in CLIENTS:
                tasks.create_task(client(process, system, self._testbed).run())


def names_of(size: int) -> tuple[str, ...]:
    """The nodes of a cluster of that size."""
    return tuple(name_of(FIRST + index) for index in range(size))


def _endpoint(process: sim.SimProcess, _: Node) -> SimActorEndpoint:
    return SimActorEndpoint(process)


def _revive(world: sim.World, name: str) -> None:
    if not world.lives(name) and not world.place(name).starting:
        world.start(name, delay_ns=0)


class Healed:
    """The state that all must reach once all is healed; `missing` says what is not reached."""

    def __init__(self, testbed: Testbed) -> None:
        self._testbed = testbed
        self._since_ns: int | None = None
        self._looks = 0

    def reached(self, core: frozenset[str]) -> bool:
        """Whether nothing is missing."""
        if self._since_ns is None:
            self._since_ns = self._testbed.world.now_ns
            for found in self._testbed.names.found.values():
                found.clear()
        self._looks += 1
        return self._looks % LOOK_STRIDE == 0 and not self.missing()

    def missing(self) -> str:
        """The first thing that is not as it must be."""
        testbed = self._testbed
        return (
            self._view()
            or self._trees()
            or testbed.names.missing()
            or testbed.groups.missing()
            or testbed.upgrades.missing()
            or testbed.ties.missing()
            or self._watches()
            or self._answers()
        )

    def _view(self) -> str:
        cluster, world = self._testbed.cluster, self._testbed.world
        views = [port.view for port in self._testbed.ports.values()]
        whole = len(views) == cluster.size and all(len(view.nodes) == cluster.size for view in views)
        now = all(world.incarnation(name_of(n.id)) == n.key.incarnation for view in views for n in view.nodes)
        same = len({view.epoch for view in views}) == 1
        return "" if whole and now and same and _linked(self._testbed) else f"not in one view: {views}"

    def _trees(self) -> str:
        testbed = self._testbed
        wanted: dict[str, set[str]] = {name: set() for name in testbed.plans}
        for name, plan in testbed.plans.items():
            up = plan.standing(testbed.judges)
            if up is None:
                return f"the tree of {name} is not whole"
            for worker in plan.workers():
                if worker.name in up:
                    wanted[worker.process or name].add(worker.name)
        for process, system in testbed.nodes.living():
            cells = system.cells()
            are = {cell.name for cell in cells if isinstance(cell.actor, Worker)}
            if are != wanted[process.name]:
                return f"{process} has {are} and should have {wanted[process.name]}"
            current = CodeBook.of(system).current(Worker)
            if wrong := [
                c.name for c in cells if isinstance(c.actor, Worker) and type(c.actor) is not current
            ]:
                return f"{process}: {wrong} are not {current}"
            if any(isinstance(cell.actor, Coordinator) for cell in cells):
                return f"{process}: an upgrade is under way"
        versions = {
            process.name: CodeBook.of(system).current(Worker) for process, system in testbed.nodes.living()
        }
        return "" if len({*versions.values()}) == 1 else f"not one version: {versions}"

    def _watches(self) -> str:
        lives = self._testbed.lives
        for process, watch in self._testbed.watches:
            watching = self._testbed.nodes.lives((process.name, process.incarnation))
            if watching and not watch.told and lives.end_of(watch.who.key()) is not None:
                return f"{process} has not heard of the end of {watch.who!r}"
        return ""

    def _answers(self) -> str:
        testbed, since_ns = self._testbed, self._since_ns or 0
        lives = [(process.name, process.incarnation) for process, _ in testbed.nodes.living()]
        sessions = testbed.sessions_in()
        if len(sessions) != len(SESSIONS):
            return f"of the sessions only {sessions} have got in"
        lives += sessions
        targets = {(name, testbed.world.incarnation(name)) for name in self._targets()} | {*sessions}
        for one in lives:
            for other in targets - ({one} if one in sessions else set()):
                if testbed.answered.get((one, other), 0) < since_ns:
                    return f"{one} has had no answer from {other}"
        return ""

    def _targets(self) -> Iterable[str]:
        for process, system in self._testbed.nodes.living():
            if any(isinstance(cell.actor, Worker) for cell in system.cells()):
                yield process.name


def _linked(testbed: Testbed) -> bool:
    lives = {(process.name, process.incarnation) for process, _ in testbed.nodes.living()}
    return all(
        {*system.peers.items(), (process.name, process.incarnation)} == lives
        for process, system in testbed.nodes.living()
    )


def _of_session(rng: random.Random, instead: sim.Fault, span_ns: int) -> sim.Fault:
    """A session is killed instead."""
    return sim.Crash(process=rng.choice(SESSIONS), at_ns=instead.at_ns, for_ns=rng.randrange(1, span_ns))


@dataclass(frozen=True)
class ActorsScenario:
    """Actors on the nodes of a cluster. `length` counts half seconds under faults."""

    name: str = "actors"
    description: str = "trees, names, groups, links, code and scripts, on nodes that crash and are cut off"
    kinds: tuple[type[sim.Fault], ...] = (sim.Crash, sim.Pause, sim.Partition, sim.Cut, sim.Clog)

    def build(self, seed: int | str, options: sim.Options) -> sim.ScenarioStage:
        """See `zbmd.transport.sim.Scenario`."""
        world = TestbedWorld(seed)
        size, span_ns = options.ranks, options.length * UNIT_NS
        protected = protected_of(world.rng("protected"), size, first=FIRST)
        cluster = Cluster(size=size, protected=protected, first=FIRST)
        testbed = world.testbed = Testbed(world, cluster=cluster)
        testbed.torment_until_ns = world.now_ns + span_ns
        names = names_of(size)
        for node_id, name in enumerate(names, FIRST):
            testbed.plans[name] = draw_tree(
                world.rng(f"tree/{name}"), names, here=name, actor=Worker, prefix=f"{name}."
            )
            world.add(name, NodeProgram(testbed, node_id))
        for session in SESSIONS:
            world.add(session, SessionProgram(testbed))
        return sim.ScenarioStage(
            world=world,
            victims=(*names, *SESSIONS),
            converged=Healed(testbed).reached,
            span_ns=span_ns,
            liveness_ns=LIVENESS_NS,
            checkers=(
                Rules(testbed),
                ToldOnce(testbed),
                InTime(testbed, world),
                testbed.lives,
                testbed.talks,
                testbed.names,
                testbed.groups,
            ),
        )

    def draw_plan(self, seed: int | str, options: sim.Options) -> sim.FaultPlan:
        """Faults that leave the protected nodes alive and connected among each other."""
        size = options.ranks
        names = list(names_of(size))
        protected = protected_of(random.Random(f"{seed}/protected"), size, first=FIRST)
        victims = [name for name in names if name not in protected]
        rng, span_ns = random.Random(f"{seed}/plan"), options.length * UNIT_NS
        plan = draw_plan(rng, names, victims, span_ns, options.faults)
        return tuple(
            _of_session(rng, fault, span_ns) if rng.random() < OF_SESSIONS else fault for fault in plan
        )

    def admits(self, seed: int | str, options: sim.Options, plan: sim.FaultPlan) -> bool:
        """Whether a plan leaves the protected nodes of such a run alive and connected among each other."""
        names = {name for fault in plan for name in sim.names_of(fault)}
        if not names <= {*names_of(options.ranks), *SESSIONS}:  # numbers folded for fewer nodes begin at 0
            return False
        protected = protected_of(random.Random(f"{seed}/protected"), options.ranks, first=FIRST)
        return not any(harms(fault, protected) for fault in plan)
