"""Real actor systems on simulated processes: unchanged code, virtual time, every fault by a seed."""

from __future__ import annotations

import asyncio

import pytest
from support.processes.hash_seeds import printed_under_hash_seeds

from zbmd.actors.contracts import Contract, fingerprints
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.ref import Down
from zbmd.actors.errors import ActorFailed
from zbmd.actors.supervision.events import Restart
from zbmd.actors.supervision.supervisor import ChildSpec
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import DeadlineExceeded, PeerLost
from zbmd.transport.sim import (
    NETWORK_FAULTS,
    PROCESS_FAULTS,
    SIM_START_NS,
    Crash,
    Cut,
    SimProcess,
    World,
    draw_plan,
)

MS = 1_000_000


class Add(Contract, id="test_sim.add"):
    amount: int


class Total(Contract, id="test_sim.total"):
    value: int


class Tell(Contract, id="test_sim.tell"):
    value: int


class Fail(Contract, id="test_sim.fail"):
    pass


class Nap(Contract, id="test_sim.nap"):
    seconds: float


class Counter(Actor):
    def __init__(self) -> None:
        self.total = 0

    @on(Add)
    async def add(self, message: Add) -> Total:
        self.total += message.amount
        return Total(self.total)

    @on(Tell)
    async def tell(self, message: Tell) -> None:
        self.total += message.value

    @on(Nap)
    async def nap(self, message: Nap) -> Total:
        await asyncio.sleep(message.seconds)
        return Total(0)

    @on(Fail)
    async def fail(self, _: Fail) -> None:
        raise ValueError("as asked")


async def server(process: SimProcess) -> None:
    system = ActorSystem(process.name, process.incarnation)
    await system.supervise([ChildSpec(name="counter", actor=Counter, restart=Restart.PERMANENT)], name="tree")
    process.listen(system.attach, contracts=fingerprints())
    await asyncio.Event().wait()


async def joined(process: SimProcess) -> ActorSystem:
    system = ActorSystem(process.name, process.incarnation)
    while True:
        try:
            system.attach(await process.dial("rank0", contracts=fingerprints()))
            return system
        except PeerLost:
            await asyncio.sleep(0.001)


def test_two_systems_ask_tell_and_monitor() -> None:
    async def client(process: SimProcess) -> None:
        system = await joined(process)
        counter = system.ref("rank0/counter")
        for _ in range(10):
            await counter.tell(Tell(1))
        process.note((await counter.ask(Add(5), timeout=1)).value)
        monitor = system.monitor(counter)
        with pytest.raises(ActorFailed, match="as asked"):
            await counter.ask(Fail(), timeout=1)
        process.note(str((await monitor.down()).reason.kind.value))
        while True:  # the supervisor restarts it
            try:
                process.note((await counter.ask(Add(1), timeout=1)).value)
                break
            except Exception:  # noqa: BLE001 (dead until it is restarted)
                await asyncio.sleep(0.001)
        await system.stop()

    with World(1) as world:
        world.add("rank0", server)
        world.add("rank1", client)
        world.run(for_ns=10_000 * MS)
        assert [value for _, value in world.notes()] == [15, "failed", 1]
        assert not world.lives("rank1")


def test_deadlines_are_virtual() -> None:
    async def client(process: SimProcess) -> None:
        system = await joined(process)
        loop = asyncio.get_running_loop()
        before_s = loop.time()
        with pytest.raises(DeadlineExceeded):
            await system.ref("rank0/counter").ask(Nap(10_000.0), timeout=3000)
        process.note(round(loop.time() - before_s, -2))

    with World(1) as world:
        world.add("rank0", server)
        world.add("rank1", client)
        world.run(for_ns=20_000_000 * MS)
        assert list(world.notes()) == [("rank1", 3000.0)]


def test_a_crash_is_peer_lost_and_a_restart_is_reached_again() -> None:
    async def client(process: SimProcess) -> None:
        while True:
            system = await joined(process)
            counter = system.ref("rank0/counter")
            monitor = system.monitor(counter)
            with pytest.raises(PeerLost):
                while True:
                    process.note((await counter.ask(Add(1), timeout=1)).value)
                    await asyncio.sleep(0.001)
            down: Down = await monitor.down()
            process.note(down.reason.kind.value)
            await system.stop()

    with World(3) as world:
        world.add("rank0", server)
        world.add("rank1", client)
        world.apply(Crash(process="rank0", at_ns=20 * MS, for_ns=10 * MS))
        world.run(for_ns=60 * MS)
        notes = [value for _, value in world.notes()]
    lost = notes.index("lost")
    assert notes[:lost] == list(range(1, lost + 1))
    after = notes[lost + 1 :]
    assert after == list(range(1, len(after) + 1))
    assert min(lost, len(after)) > 5


def test_a_cut_is_a_deadline_and_no_loss() -> None:
    async def client(process: SimProcess) -> None:
        system = await joined(process)
        counter = system.ref("rank0/counter")
        await asyncio.sleep(0.02)
        with pytest.raises(DeadlineExceeded):
            await counter.ask(Add(1), timeout=0.05)
        process.note((await counter.ask(Add(1), timeout=5)).value)

    with World(1) as world:
        world.add("rank0", server)
        world.add("rank1", client)
        world.apply(Cut(source="rank1", target="rank0", at_ns=10 * MS, for_ns=200 * MS))
        world.run(for_ns=10_000 * MS)
        # The first ask arrived when the cut healed: at most once, but not never.
        assert list(world.notes()) == [("rank1", 2)]
        assert world.now_ns > SIM_START_NS + 200 * MS


async def busy(process: SimProcess) -> None:
    """Asks until the end, whatever happens: an answer is the sum of what this life of the server took."""
    while True:
        system = await joined(process)
        counter = system.ref("rank0/counter")
        try:
            while system.peers:
                process.note((await counter.ask(Add(1), timeout=0.02)).value)
                await asyncio.sleep(process.rng.expovariate(1000))
        except (PeerLost, DeadlineExceeded) as error:
            process.note(type(error).__name__)
        finally:
            await system.stop()


def digest(seed: int) -> str:
    with World(seed) as world:
        world.add("rank0", server)
        for name in ("rank1", "rank2"):
            world.add(name, busy)
        names = ("rank0", "rank1", "rank2")
        for fault in draw_plan(world.rng("plan"), names, 80 * MS, (*PROCESS_FAULTS, *NETWORK_FAULTS), 8):
            world.apply(fault)
        world.run(for_ns=100 * MS)
        assert sum(isinstance(value, int) for _, value in world.notes()) > 3
        return world.digest()


def test_one_seed_one_history_whatever_the_hash_seed() -> None:
    digests = [digest(seed) for seed in range(5)]
    assert digests == [digest(seed) for seed in range(5)]
    assert len(set(digests)) == 5
    printed = printed_under_hash_seeds(__file__, "digest(2)")
    assert {text.splitlines()[-1] for text in printed} == {digests[2]}
