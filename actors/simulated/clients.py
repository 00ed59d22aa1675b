"""Clients of the actors on each simulated node: they grow trees, and do everything else that users do.

Every client is a loop of its own, for as long as its node lives; its errors are those that a user would get.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, TypeVar

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor_base import ActorBase
from zbmd.actors.core.ref import Ref, owner_of
from zbmd.actors.errors import NameInUse, UpgradeRefused, UpgradeUndone
from zbmd.actors.routing.contracts import Enrol, Route
from zbmd.actors.routing.dialer import Lease
from zbmd.actors.routing.routes import RemoteLocator, Routes
from zbmd.actors.simulated.ledgers import CodeTrial, ProcessKey
from zbmd.actors.simulated.supervision_scenario import NotingSupervisor, Watch
from zbmd.actors.simulated.testbed import (
    ERRAND,
    LATER,
    SESSIONS,
    Answer,
    Fail,
    Fresh,
    Here,
    Leave,
    Question,
    SessionMessage,
    Testbed,
    Watcher,
    Who,
    Worker,
    accept_clients,
    dial_client,
)
from zbmd.actors.system import ActorSystem
from zbmd.actors.upgrade.local import CodeBook
from zbmd.transport.errors import DeadlineExceeded, ZbmdError
from zbmd.transport.link.interface import Link
from zbmd.transport.sim import SimProcess

NAMES: Final = ("ledger", "clock")
GROUPS: Final = ("choir",)
ASK_S: Final = 0.05
CALL_S: Final = 0.5
"""For questions to a directory."""
ROUND_S: Final = 0.01
CALM_ROUND_S: Final = 0.3
"""From one round to the next, once all is healed."""
BURST_MAX: Final = 4
ROUNDS_MAX: Final = 12
CALM_ROUNDS_MAX: Final = 3
RETRY_S: Final = 0.02
TORMENT_S: Final = 0.03
CHANGE_S: Final = 0.2
PROBATION_S: Final = (0.01, 0.1, 0.4)
CHANGE_ANSWER_S: Final = (0.2, 1.0)

ERRANDS: Final = 0.15
"""The share of workers that are a session's."""

AnswerT = TypeVar("AnswerT", bound=Contract)


class Client:
    """Base of all clients: a process, the node's actors, and the testbed."""

    def __init__(self, process: SimProcess, system: ActorSystem, testbed: Testbed) -> None:
        self.process, self.system, self.testbed, self.rng = process, system, testbed, process.rng
        self.incarnation: ProcessKey = (process.name, process.incarnation)

    async def run(self) -> None:
        """For as long as the node lives."""
        raise NotImplementedError

    def mine(self) -> list[Ref]:
        """The workers of this node."""
        return [cell.ref for cell in self.system.cells() if isinstance(cell.actor, Worker) and cell.accepts]

    def anybody(self) -> Ref:
        """The address of a worker of some tree, or of a session, which may not live."""
        if self.rng.random() < ERRANDS:
            return self.system.ref(f"{self.rng.choice(SESSIONS)}/{ERRAND}")
        plan = self.testbed.plans[self.rng.choice(list(self.testbed.plans))]
        worker = self.rng.choice(list(plan.workers()))
        return self.system.ref(f"{worker.process or plan.name.partition('.')[0]}/{worker.name}")

    async def ask(self, ref: Ref, message: Contract, reply: type[AnswerT]) -> AnswerT:
        """Ask, and have it noted for how long."""
        testbed = self.testbed
        testbed.next_ask += 1
        number = testbed.next_ask
        testbed.asks[number] = (self.process, testbed.world.now_ns + int(ASK_S * 1e9), repr(ref))
        try:
            return await ref.ask(message, reply=reply, timeout=ASK_S)
        finally:
            testbed.asks.pop(number, None)


class Tormentor(Client):
    """A client that acts while faults strike, now and then."""

    every_s = TORMENT_S

    async def run(self) -> None:
        """Act, wait, act."""
        while self.testbed.tormented:
            await asyncio.sleep(self.rng.expovariate(1 / self.every_s))
            with suppress(ZbmdError):
                await self.act()

    async def act(self) -> None:
        """Do something."""
        raise NotImplementedError


class Grower(Client):
    """Grows the node's tree again and again."""

    async def run(self) -> None:
        """Spawn the root, wait for its end."""
        plan, testbed = self.testbed.plans[self.process.name], self.testbed
        while True:
            for name in plan.supervisors():
                testbed.judges.pop(name, None)
            try:
                root = await self.system.spawn(NotingSupervisor, *plan.args(testbed), name=plan.name)
            except ZbmdError as error:
                testbed.note(f"no tree: {type(error).__name__}")
                await asyncio.sleep(RETRY_S)
                continue
            down = await self.system.monitor(root).down()
            testbed.note(f"the tree is gone: {down.reason.kind.value}")


class Talker(Client):
    """Talks to workers anywhere, found by address, by name or in a group."""

    async def run(self) -> None:
        """One session after the other."""
        while True:
            try:
                found = await self._find()
                if found is not None:
                    await self._session((await self.ask(found, Who(), Here)).ref)
            except ZbmdError as error:
                self.testbed.note(f"talk: {type(error).__name__}")
            await self._pause()

    async def _pause(self) -> None:
        mean_s = ROUND_S if self.testbed.tormented else CALM_ROUND_S
        await asyncio.sleep(self.rng.expovariate(1 / mean_s))

    async def _find(self) -> Ref | None:
        if not self.testbed.tormented:
            return self._unheard()
        dice = self.rng.random()
        if dice < 0.2:
            return await self.system.whereis(self.rng.choice(NAMES), timeout=CALL_S)
        if dice < 0.4:
            members = (await self.system.group(self.rng.choice(GROUPS), timeout=CALL_S)).members
            return self.rng.choice(members) if members else None
        return self.anybody()

    def _unheard(self) -> Ref | None:
        """A worker of the node or session that has answered this one longest ago."""
        sessions = [
            incarnation for incarnation in self.testbed.sessions_in() if incarnation != self.incarnation
        ]
        there = {incarnation: [ERRAND] for incarnation in sessions}
        for process, system in self.testbed.nodes.living():
            cells = system.cells()
            workers = [cell.name for cell in cells if isinstance(cell.actor, Worker) and cell.accepts]
            if workers:
                there[process.name, process.incarnation] = workers
        if not there:
            return None
        answered, lives = self.testbed.answered, list(there)
        self.rng.shuffle(lives)
        incarnation = min(lives, key=lambda one: answered.get((self.incarnation, one), 0))
        return self.system.ref(f"{incarnation[0]}/{self.rng.choice(there[incarnation])}")

    async def _session(self, target: Ref) -> None:
        testbed = self.testbed
        session = testbed.talks.begin(target)
        number = sure = certain = 0
        for _ in range(self.rng.randint(1, ROUNDS_MAX if testbed.tormented else CALM_ROUNDS_MAX)):
            for _ in range(self.rng.randint(0, BURST_MAX)):
                number += 1
                await target.tell(SessionMessage(session, number, sure))
                sure, certain = number, certain + 1
            number += 1
            try:
                answer = await self.ask(target, Question(SessionMessage(session, number, sure)), Answer)
            except DeadlineExceeded:
                continue  # it may have been handled: the numbers go on
            testbed.talks.answered(session, number, (answer.number, answer.count), certain)
            sure, certain = number, certain + 1
            testbed.answered[self.incarnation, target.key()[:2]] = testbed.world.now_ns
            await self._pause()


class Poisoner(Tormentor):
    """Has workers fail and leave."""

    async def act(self) -> None:
        """Tell one to."""
        command = Leave() if self.rng.random() < 0.2 else Fail()
        ref = self.anybody()
        self.testbed.note(f"{ref.address} receives {type(command).__name__}")
        await ref.tell(command)


class Namer(Tormentor):
    """Gives names and takes them away."""

    async def act(self) -> None:
        """Give one to a worker of this node, or take one from whoever has it."""
        names, name = self.testbed.names, self.rng.choice(NAMES)
        mine = self.mine()
        if self.rng.random() < 0.2:
            names.takes(name, self.incarnation)
            try:
                await self.system.unregister(name, timeout=CALL_S)
            except ZbmdError:
                names.took(name, self.incarnation, certain=False)
                raise
            names.took(name, self.incarnation, certain=True)
        elif mine:
            ref = self.rng.choice(mine)
            asked = names.asked(name, ref)
            try:
                await self.system.register(name, ref, timeout=CALL_S)
            except NameInUse:
                return
            except ZbmdError:
                names.unsure(name, ref)
                raise
            self.testbed.note(f"{ref!r} is {name!r}")
            names.granted(name, ref, asked)


class Joiner(Tormentor):
    """Has workers join groups and leave them, and tells all who are in them."""

    def __init__(self, process: SimProcess, system: ActorSystem, testbed: Testbed) -> None:
        super().__init__(process, system, testbed)
        testbed.next_ask += 1
        self._source, self._number = testbed.next_ask, 0

    async def act(self) -> None:
        """One of these."""
        name, mine, dice = self.rng.choice(GROUPS), self.mine(), self.rng.random()
        group = await self.system.group(name, timeout=CALL_S)
        if dice < 0.5:
            self._number += 1
            await group.broadcast(Fresh(self._source, self._number))
        elif mine:
            ref, joins = self.rng.choice(mine), dice < 0.85
            self.testbed.groups.joined(name, ref, None)
            await (group.join if joins else group.leave)(ref, timeout=CALL_S)
            self.testbed.groups.joined(name, ref, joins)


class Tier(Tormentor):
    """Links workers, and watches them."""

    async def act(self) -> None:
        """Link one of this node with any, or watch one."""
        other = (await self.ask(self.anybody(), Who(), Here)).ref
        mine = self.mine()
        if mine and self.rng.random() < 0.3:
            one = self.rng.choice(mine)
            if one != other:
                self.system.link(one, other)
                self.testbed.ties.tie(one, other)
        else:
            watch = Watch(other)
            self.testbed.watches.append((self.process, watch))
            self.system.watch(other, watch.tell)


class Operator(Tormentor):
    """Changes the code of workers, one change at a time in the cluster."""

    every_s = CHANGE_S

    async def act(self) -> None:
        """Change one version to a later one, on all nodes that run it."""
        upgrades, nodes = self.testbed.upgrades, self.testbed.nodes
        if upgrades.under_way is not None and nodes.lives(upgrades.under_way):
            return
        upgrades.under_way = self.incarnation
        try:
            await self._change()
        finally:
            upgrades.under_way = None

    async def _change(self) -> None:
        members = self.system.open_directory(alone=False).members
        runs: dict[type[ActorBase], list[ProcessKey]] = {}
        for incarnation in members:
            system = self.testbed.nodes.system(incarnation)
            if system is not None:
                runs.setdefault(CodeBook.of(system).current(Worker), []).append(incarnation)
        if not runs:
            return
        old = self.rng.choice(list(runs))
        if old in LATER:
            await self._upgrade(old, self.rng.choice(LATER[old]), runs[old])

    async def _upgrade(self, old: type[ActorBase], new: type[ActorBase], lives: Sequence[ProcessKey]) -> None:
        change = CodeTrial(self.incarnation, old, new, tuple(lives))
        self.testbed.upgrades.changes.append(change)
        try:
            done = await self.system.upgrade(
                old,
                new,
                processes=[name for name, _ in lives],
                canaries=self.rng.randint(1, len(lives)),
                probation_s=self.rng.choice(PROBATION_S),
                answer_s=self.rng.choice(CHANGE_ANSWER_S),
                lasting=True,
            )
        except UpgradeUndone as error:
            change.kept, change.silent = False, "did not say that it is done" in str(error)
            self.testbed.note(f"undone: {error}")
        except UpgradeRefused as error:
            raise AssertionError(f"{old} to {new}: {error}") from error
        else:
            change.kept, change.silent = True, bool(done.silent)
            self.testbed.note(f"{old.__name__} is {new.__name__} now on {done.processes}")


class Onlooker(Client):
    """Follows the changes of a group, by a stream and by an actor."""

    async def run(self) -> None:
        """Both, of each group."""
        async with asyncio.TaskGroup() as tasks:
            for name in GROUPS:
                tasks.create_task(self._stream(name))
                tasks.create_task(self._watch(name))

    async def _stream(self, name: str) -> None:
        changes = self.system.open_directory(alone=False).changes(name)
        async for change in changes:
            self.testbed.groups.changed(self.incarnation, name, "stream", change.joined, change.left)

    async def _watch(self, name: str) -> None:
        watcher = await self.system.spawn(Watcher, self.testbed, name, name=f"watcher-{name}")
        while True:
            try:
                group = await self.system.group(name, timeout=CALL_S)
                await group.watch(watcher, timeout=CALL_S)
            except DeadlineExceeded:
                continue
            return


class Census(Client):
    """Asks who has which name, once nothing changes any more."""

    async def run(self) -> None:
        """Again and again."""
        while True:
            await asyncio.sleep(CALM_ROUND_S)
            for name in NAMES if not self.testbed.tormented else ():
                with suppress(ZbmdError):
                    found = await self.system.whereis(name, timeout=CALL_S)
                    key = None if found is None else found.key()
                    self.testbed.names.found.setdefault(name, {})[self.incarnation] = key


CLIENTS: Final = (Grower, Talker, Talker, Poisoner, Namer, Joiner, Tier, Operator, Onlooker, Census)


# --- sessions: external clients of a node, whose actors talk to those of all others -----------------------


class SessionTalker(Talker):
    """Talks to workers that it finds by address: names and groups are those of the nodes."""

    async def _find(self) -> Ref | None:
        return self.anybody() if self.testbed.tormented else self._unheard()

    async def _pause(self) -> None:
        mean_s = ROUND_S if self.testbed.tormented else CALM_ROUND_S
        await asyncio.sleep(self.rng.expovariate(1 / mean_s))


class SessionWatcher(Tormentor):
    """Watches workers anywhere."""

    async def act(self) -> None:
        """Watch one."""
        other = (await self.ask(self.anybody(), Who(), Here)).ref
        watch = Watch(other)
        self.testbed.watches.append((self.process, watch))
        self.system.watch(other, watch.tell)


class Errands(Client):
    """Has a worker of the session that others may ask, again and again."""

    async def run(self) -> None:
        """Spawn it, wait for its end."""
        while True:
            try:
                ref = await self.system.spawn(Worker, name=ERRAND)
            except ZbmdError as error:
                self.testbed.note(f"no errand: {error}")
                await asyncio.sleep(RETRY_S)
                continue
            await self.system.monitor(ref).down()


class SessionProgram:
    """The program of a session, whose node is never lost."""

    def __init__(self, testbed: Testbed) -> None:
        self._testbed = testbed

    async def __call__(self, process: SimProcess) -> None:
        """Until the simulation ends."""
        name = process.name

        async def dial(route: Route) -> Link:
            return await dial_client(process, route, name)

        system = ActorSystem(name, process.incarnation)
        routes = Routes(system, RemoteLocator(system, owner_of(name)), dial)
        accept_clients(process, routes.accepted)

        async def link_up() -> tuple[Link, Enrol]:
            node = owner_of(name)
            return await dial(Route(node, 0, "", "", node)), Enrol("", "", name)

        while True:
            try:
                await Lease(system, routes, link_up).enter()
                break
            except ZbmdError as error:
                self._testbed.note(f"{name}: {error}")
                await asyncio.sleep(RETRY_S)
        self._testbed.sessions[name] = process.incarnation
        async with asyncio.TaskGroup() as tasks:
            for client in (SessionTalker, SessionTalker, SessionWatcher, Errands):
                tasks.create_task(client(process, system, self._testbed).run())
