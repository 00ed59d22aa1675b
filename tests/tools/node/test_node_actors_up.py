"""Actors of a cluster of real nodes: `zbmd-node up --actors`, one name, one group, a node that is killed."""

from __future__ import annotations

import pytest
from support.cluster.cluster_nodes import BUDGET, Nodes

APP = '''
import contextlib

from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.signals import Down
from zbmd.actors.contracts import Contract
from zbmd.actors.directory.contracts import GroupNews
from zbmd.actors.errors import NameInUse
from zbmd.transport.errors import PeerLost


def say(system, text):
    print(f"{system.name}: {text}", flush=True)


class WhoAreYou(Contract, id="app.who"):
    pass


class Me(Contract, id="app.me"):
    node: str


class Worker(Actor):
    """Says where it is."""

    @on(WhoAreYou)
    async def who(self, _: WhoAreYou) -> Me:
        return Me(self.system.name)


class Watcher(Actor):
    """Keeps an eye on a worker's group, and on whoever has the name."""

    def __init__(self, worker):
        self.worker = worker
        self.looked = False

    @on(GroupNews)
    async def news(self, news: GroupNews) -> None:
        group = await self.system.group("workers")
        if len(group.members) == 3 and not self.looked:
            self.looked = True
            for ref in group.members:
                if ref != self.worker:
                    self.monitor(ref)
            lives = sorted([(await ref.ask(WhoAreYou(), timeout=10)).node for ref in group.members])
            far = next(ref for ref in group.members if ref != self.worker)
            spawned = await self.system.spawn_on(far.process, "app:Worker", timeout=10)
            answer = await spawned.ask(WhoAreYou(), timeout=10)
            say(self.system, f"group of {len(lives)}, spawned there: {answer.node == far.process}")

    @on(Down)
    async def down(self, down: Down) -> None:
        say(self.system, f"down: {down.reason.kind.value} {down.reason.text}")
        answer = None
        while answer is None:  # until the view is without it, the name is the dead one's
            with contextlib.suppress(NameInUse):
                await self.system.register("leader", self.worker)
            with contextlib.suppress(PeerLost):
                if (found := await self.system.whereis("leader")) is not None:
                    answer = await found.ask(WhoAreYou(), timeout=10)
        say(self.system, f"leader answers: {answer.node == found.process}")


async def start(system):
    ref = await system.spawn(Worker, name="worker")
    group = await system.group("workers", timeout=30)
    await group.watch(await system.spawn(Watcher, ref))
    try:
        await system.register("leader", ref, timeout=30)
        say(system, "leads")
    except NameInUse:
        say(system, "follows")
    await group.join(ref)
'''


@pytest.fixture
def nodes(nodes: Nodes) -> Nodes:
    (nodes.directory / "app.py").write_text(APP)
    return nodes


async def test_actors_of_a_cluster_have_one_leader_also_after_it_is_killed(nodes: Nodes) -> None:
    first = await nodes.up("n1", "--recovery-budget", BUDGET, "--actors", "app")
    await first.until(r"node\d+: leads")
    door = nodes.address("n1")
    others = [await nodes.up(name, "--join", door, "--actors", "app:start") for name in ("n2", "n3")]
    for run in others:
        await run.until(r"node\d+: follows")
    await nodes.agreed("n1", "n2", "n3")
    await others[1].until(r"group of 3, spawned there: True")
    await others[0].until(r"group of 3, spawned there: True")
    await first.kill()
    for run in others:
        await run.until(r"node\d+: down: lost peer node\d+ lost: ")
        await run.until(r"node\d+: leader answers: True")
    await nodes.agreed("n2", "n3")
    for run in others:
        assert sum(": down: lost" in line for line in run.lines) == 1, run


async def test_what_cannot_be_started_is_told(nodes: Nodes) -> None:
    run = await nodes.up("n1", "--actors", "no_such_module")
    await run.until(r"--actors no_such_module: no_such_module cannot be imported \(ModuleNotFoundError")
    assert await run.ended() == 2
    run = await nodes.up("n2", "--actors", "app:begin")
    await run.until(r"app has no `async def begin\(system\)` to call")
    assert await run.ended() == 2
