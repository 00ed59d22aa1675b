"""Actors of two processes: one Ref for both, typed rejections, back-pressure, monitors, links, real kills."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest
from programs import PROGRAMS
from support.actors.remote_counter import Add, Counter, Crash, Hold, Through, Total, endpoint

from zbmd.actors.contracts import fingerprints
from zbmd.actors.core import wire
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.actor_base import MailboxSpec
from zbmd.actors.core.peer import Peer
from zbmd.actors.core.ref import Down, Exited, Reason, ReasonKind, Ref, Undelivered
from zbmd.actors.errors import (
    ActorFailed,
    ActorStartFailed,
    ContractMismatch,
    DeadActor,
    InvalidMessage,
    MailboxFull,
    NotUnderstood,
    UnknownActorClass,
    UnknownContract,
)
from zbmd.actors.supervision.supervisor import Children, ChildSpec, WhichChildren
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import (
    DeadlineExceeded,
    LocalProtocolError,
    PeerLost,
    RemoteProtocolError,
    ZbmdError,
)
from zbmd.transport.link.interface import LinkLimits
from zbmd.transport.shm.connect import link_pair, listen
from zbmd.transport.shm.link import ShmLink

Pair = tuple[ActorSystem, ActorSystem]
Join = Callable[..., None]
SMALL = LinkLimits(ring_bytes=1 << 12, queue_bytes_max=1 << 13, queue_frames_max=32)
TIMEOUT_S = 180.0


class Listener(Actor):
    trap_exit = True

    def __init__(self, heard: asyncio.Queue[object]) -> None:
        self.heard = heard

    @on(Down)
    async def down(self, signal: Down) -> None:
        self.heard.put_nowait(signal)

    @on(Exited)
    async def exited(self, signal: Exited) -> None:
        self.heard.put_nowait(signal)

    @on(Undelivered)
    async def undelivered(self, signal: Undelivered) -> None:
        self.heard.put_nowait(signal)

    @on(Through)
    async def send(self, message: Through) -> None:
        await message.to.tell(Add(1))


async def test_one_ref_for_both_sides(pair: Pair) -> None:
    here, there = pair
    ref = await there.spawn(Counter, 10, name="counter")
    far = here.ref("rank1/counter")
    for i in range(100):
        await far.tell(Add(i))
    assert (await far.ask(Add(0), timeout=TIMEOUT_S, reply=Total)).value == 10 + 4950
    totals = await asyncio.gather(*(far.ask(Add(1), timeout=TIMEOUT_S, reply=Total) for _ in range(300)))
    assert [t.value for t in totals] == list(range(4961, 5261))
    assert (await ref.ask(Add(0), timeout=TIMEOUT_S, reply=Total)).value == 5260


async def test_references_are_passed_on_and_deadlines_and_traces_with_them(pair: Pair) -> None:
    here, there = pair
    home = await here.spawn(Counter, name="home")
    await there.spawn(Counter, name="away")
    total = await here.ref("rank1/away").ask(Through(home), timeout=TIMEOUT_S, reply=Total)
    assert total.value == 1 and total.trace_id != 0


async def test_rejections_are_typed(pair: Pair) -> None:
    here, there = pair
    await there.spawn(Counter, name="counter", mailbox=MailboxSpec(capacity=1))
    far = here.ref("rank1/counter")
    with pytest.raises(DeadActor, match="rank1/nobody"):
        await here.ref("rank1/nobody").ask(Add(1), timeout=TIMEOUT_S)
    with pytest.raises(PeerLost, match="rank9"):
        await here.ref("rank9/counter").tell(Add(1))
    with pytest.raises(NotUnderstood, match=r"remote.total/1"):
        await far.ask(Total(1), timeout=TIMEOUT_S)
    with pytest.raises(InvalidMessage, match="Expected `int`, got `str`"):
        await far.ask(Add("x"), timeout=TIMEOUT_S)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidMessage, match="cannot be encoded"):
        await far.ask(Add(object()), timeout=TIMEOUT_S)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    with pytest.raises(DeadlineExceeded):
        await far.ask(Hold(), timeout=0.01)
    await far.tell(Add(1))
    with pytest.raises(MailboxFull, match="1 messages waiting"):
        await far.ask(Add(1), timeout=TIMEOUT_S)


async def test_an_unknown_contract_is_answered_never_ignored(pair: Pair) -> None:
    """A raw peer sends what only a newer release would know."""
    here, there = pair
    counter = await there.spawn(Counter, name="counter")
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[object] = loop.create_future()
    link = here._peers["rank1"].link
    call = here._peers["rank1"].open_call(answer)
    body = msgspec.Raw(msgspec.msgpack.encode(["remote.add/2", 5]))
    link.send(wire.encode(wire.Ask(call, "counter", 0, 10**9, "", body)))
    with pytest.raises(UnknownContract, match=r"remote.add/2 here; versions of it here: \[1\]"):
        await answer
    assert (await counter.ask(Add(0), timeout=TIMEOUT_S, reply=Total)).value == 0


async def test_rejected_tells_come_back_to_the_sending_actor(pair: Pair) -> None:
    here, _there = pair
    heard: asyncio.Queue[object] = asyncio.Queue()
    listener = await here.spawn(Listener, heard)
    await listener.ask(Through(here.ref("rank1/nobody")), timeout=TIMEOUT_S)
    async with asyncio.timeout(120):
        signal_ = await heard.get()
    assert isinstance(signal_, Undelivered)
    assert (signal_.ref.address, signal_.contract) == ("rank1/nobody", "remote.add/1")
    assert isinstance(signal_.error, DeadActor)
    await here.ref("rank1/nobody").tell(Add(1))
    with pytest.raises(DeadActor):  # an answer after it: the bounce has arrived
        await here.ref("rank1/nobody").ask(Add(1), timeout=TIMEOUT_S)
    assert here.undelivered == 2


async def test_a_crash_there_reaches_asker_and_monitor_here(pair: Pair) -> None:
    here, there = pair
    await there.spawn(Counter, name="counter")
    far = here.ref("rank1/counter")
    monitor = here.monitor(far)
    cancelled = here.monitor(far)
    cancelled.cancel()
    with pytest.raises(ActorFailed, match="rank1/counter failed: ValueError: boom"):
        await far.ask(Crash(), timeout=TIMEOUT_S)
    down = await monitor.down(timeout=TIMEOUT_S)
    assert down.reason == Reason(ReasonKind.FAILED, "ValueError: boom")
    assert down.ref.incarnation != 0 and down.ref.process_incarnation == 1
    again = await here.monitor(far).down(timeout=TIMEOUT_S)
    assert again.reason.kind is ReasonKind.NO_ACTOR
    with pytest.raises(DeadActor):
        await down.ref.ask(Add(1), timeout=TIMEOUT_S)
    with pytest.raises(DeadlineExceeded):
        await cancelled.down(timeout=0.001)


async def test_links_cross_processes(pair: Pair) -> None:
    here, there = pair
    heard: asyncio.Queue[object] = asyncio.Queue()
    a = await there.spawn(Counter, name="a")
    far_a = Ref(here, *a.key())
    b = await here.spawn_on("rank1", Counter, 5, name="b", timeout=TIMEOUT_S)
    listener = await here.spawn(Listener, heard)
    plain = await here.spawn(Counter, name="plain")
    here.link(listener, far_a)
    here.link(plain, far_a)
    monitor = here.monitor(plain)
    with pytest.raises(ActorFailed):
        await far_a.ask(Crash(), timeout=TIMEOUT_S)
    async with asyncio.timeout(120):
        assert await heard.get() == Exited(far_a, Reason(ReasonKind.FAILED, "ValueError: boom"))
    assert (await monitor.down(timeout=TIMEOUT_S)).reason.kind is ReasonKind.FAILED
    # The other way round: an end here ends the linked actor there.
    local = await here.spawn(Counter, link_to=b)
    watch_b = here.monitor(b)
    with pytest.raises(ActorFailed):
        await local.ask(Crash(), timeout=TIMEOUT_S)
    assert "linked rank0/" in (await watch_b.down(timeout=TIMEOUT_S)).reason.text
    # A link to what does not live.
    here.link(listener, far_a)
    async with asyncio.timeout(120):
        gone = await heard.get()
    assert isinstance(gone, Exited) and gone.reason.kind is ReasonKind.NO_ACTOR


async def test_spawning_from_afar(pair: Pair) -> None:
    here, there = pair

    class Unregistered(Actor):
        pass

    ref = await here.spawn_on("rank1", Counter, 5, name="far", timeout=TIMEOUT_S)
    assert (await ref.ask(Add(1), timeout=TIMEOUT_S, reply=Total)).value == 6
    assert [i.name for i in there.describe()] == ["far"] and ref.address == "rank1/far"
    with pytest.raises(UnknownActorClass, match="Unregistered"):
        await here.spawn_on("rank1", Unregistered, timeout=TIMEOUT_S)
    with pytest.raises(ActorStartFailed, match="ValueError: negative"):
        await here.spawn_on("rank1", Counter, -1, timeout=TIMEOUT_S)
    with pytest.raises(ActorStartFailed, match="NameTaken"):
        await here.spawn_on("rank1", Counter, name="far", timeout=TIMEOUT_S)
    assert (await here.terminate(ref)).reason.kind is ReasonKind.SHUTDOWN
    assert there.describe() == []


async def test_a_supervisor_with_a_child_in_another_process(pair: Pair) -> None:
    here, there = pair
    children = [ChildSpec(name="far", actor=Counter, args=(7,), process="rank1")]
    sup = await here.supervise(children, name="sup")
    far = here.ref("rank1/far")
    monitor = here.monitor(far)
    with pytest.raises(ActorFailed):
        await far.ask(Crash(), timeout=TIMEOUT_S)
    await monitor.down(timeout=TIMEOUT_S)
    listed: list[tuple[str, str, int]] = []
    async with asyncio.timeout(120):
        while listed != [("far", "running", 2)]:
            listed = (await sup.ask(WhichChildren(), timeout=TIMEOUT_S, reply=Children)).children
    assert (await far.ask(Add(1), timeout=TIMEOUT_S, reply=Total)).value == 8
    again = here.monitor(far)
    here.exit(sup, Reason(ReasonKind.KILLED, "test"))
    assert (await again.down(timeout=TIMEOUT_S)).reason.kind is ReasonKind.KILLED
    assert there.describe() == []


async def test_back_pressure_of_a_small_link(system: ActorSystem, other: ActorSystem, join: Join) -> None:
    join(system, other, SMALL)
    await other.spawn(Counter, name="counter", mailbox=MailboxSpec(capacity=4096))
    far = system.ref("rank1/counter")
    pad = "x" * 600
    asks = [asyncio.create_task(far.ask(Add(1, pad), timeout=120, reply=Total)) for _ in range(200)]
    for _ in range(200):
        await far.tell(Add(1, pad))
    totals = await asyncio.gather(*asks)
    assert (await far.ask(Add(0), timeout=120, reply=Total)).value == 400
    assert [t.value for t in totals] == sorted(t.value for t in totals)


async def test_answers_wait_for_room_and_keep_their_order(
    system: ActorSystem, other: ActorSystem, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Echo(Actor):
        @on(Add)
        async def add(self, message: Add) -> Add:
            return message

    # As they come over the link: which of two tasks runs first that have their answers is asyncio's affair.
    answered: list[int] = []
    take = Peer._on_reply

    def noted(peer: Peer, reply: wire.Reply) -> None:
        answered.append(reply.call)
        take(peer, reply)

    monkeypatch.setattr(Peer, "_on_reply", noted)
    join(system, other, SMALL)
    await other.spawn(Echo, name="echo", mailbox=MailboxSpec(capacity=4096))
    far = system.ref("rank1/echo")
    monitors = [system.monitor(system.ref("rank1/nobody")) for _ in range(500)]
    asks = (far.ask(Add(i, "y" * 900), timeout=120, reply=Add) for i in range(300))
    assert [reply.amount for reply in await asyncio.gather(*asks)] == list(range(300))
    assert len(answered) == 300 and answered == sorted(answered)
    for monitor in monitors:
        assert (await monitor.down(timeout=TIMEOUT_S)).reason.kind is ReasonKind.NO_ACTOR


async def test_detaching_fails_at_once_all_that_waits(pair: Pair) -> None:
    here, there = pair
    await there.spawn(Counter, name="counter")
    heard: asyncio.Queue[object] = asyncio.Queue()
    listener = await here.spawn(Listener, heard)
    far = here.ref("rank1/counter")
    here.monitor(far, to=listener)
    ask = asyncio.create_task(far.ask(Hold(), timeout=60))
    await asyncio.sleep(0)
    here.detach("rank1")
    with pytest.raises(PeerLost, match="rank1 lost: detached"):
        await ask
    async with asyncio.timeout(120):
        down = await heard.get()
    assert isinstance(down, Down) and down.reason.kind is ReasonKind.LOST
    with pytest.raises(PeerLost):
        await far.tell(Add(1))
    assert here.peers == {}


async def test_a_newer_incarnation_of_a_process_replaces_the_older(system: ActorSystem, join: Join) -> None:
    old, new = ActorSystem("rank1", 1), ActorSystem("rank1", 2)
    join(system, old)
    ref = await system.spawn_on("rank1", Counter, name="counter", timeout=TIMEOUT_S)
    ask = asyncio.create_task(ref.ask(Hold(), timeout=60))
    await asyncio.sleep(0)
    join(system, new)
    with pytest.raises(PeerLost, match="replaced by incarnation 2"):
        await ask
    with pytest.raises(DeadActor, match="now incarnation 2"):
        await ref.tell(Add(1))
    await new.spawn(Counter, 3, name="counter")
    assert (await system.ref("rank1/counter").ask(Add(0), timeout=TIMEOUT_S, reply=Total)).value == 3
    with pytest.raises(LocalProtocolError, match="already"):
        join(system, old)
    await old.stop(timeout=0.2)
    await new.stop()


async def test_contradicting_contracts_are_refused_at_attach(system: ActorSystem) -> None:
    theirs = fingerprints() | {"remote.add/1": "0" * 16}
    to_them, to_us = link_pair(endpoint("rank0", {}), endpoint("rank1", theirs))
    with pytest.raises(ContractMismatch, match=r"remote.add/1"):
        system.attach(to_them)
    assert to_them.closed and system.peers == {}
    to_us.close()


async def test_garbage_ends_its_own_link_and_nothing_else(system: ActorSystem) -> None:
    await system.spawn(Counter, name="counter")
    for garbage in (b"", b"\xc1", b"\x92\x63\x01", os.urandom(64), b"\xdd\xff\xff\xff\xff"):
        to_stranger, stranger = link_pair(endpoint("rank0", {}), endpoint("rank7", {}))
        closed: asyncio.Future[ZbmdError | None] = asyncio.get_running_loop().create_future()
        system.attach(to_stranger, on_closed=closed.set_result)
        stranger.send(garbage)
        async with asyncio.timeout(120):
            assert isinstance(await closed, RemoteProtocolError)
        assert system.peers == {}
        stranger.close()
    assert (await system.ref("counter").ask(Add(1), timeout=TIMEOUT_S, reply=Total)).value == 1


# A real process, killed.

SERVES = str(PROGRAMS / "actors" / "serves_counter.py")


@asynccontextmanager
async def other_process(here: ActorSystem) -> AsyncGenerator[int]:
    """Start the process, join it, yield its pid."""
    address = f"zbmd-test-{os.getpid()}-{os.urandom(4).hex()}"
    came: asyncio.Future[ShmLink] = asyncio.get_running_loop().create_future()
    listener = listen(address, came.set_result, endpoint(here.name, fingerprints()))
    child = await asyncio.create_subprocess_exec(sys.executable, SERVES, address)
    try:
        async with asyncio.timeout(120):
            here.attach(await came)
        yield child.pid
    finally:
        listener.close()
        await listener.wait_closed()
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


async def test_a_killed_process_is_told_to_everyone_who_depends_on_it(system: ActorSystem) -> None:
    heard: asyncio.Queue[object] = asyncio.Queue()
    listener = await system.spawn(Listener, heard)
    async with other_process(system) as pid:
        far = system.ref("rank1/counter")
        assert (await far.ask(Add(2), timeout=120, reply=Total)).value == 2
        bystander = await system.spawn(Counter, name="bystander")
        monitor = system.monitor(far, to=listener)
        watched = asyncio.create_task(monitor.down(timeout=120))
        pending = [asyncio.create_task(far.ask(Hold(), timeout=60)) for _ in range(20)]
        first = await system.monitor(system.ref("rank1/nobody")).down(timeout=120)
        assert first.reason.kind is ReasonKind.NO_ACTOR
        os.kill(pid, signal.SIGKILL)
        for outcome in await asyncio.gather(*pending, return_exceptions=True):
            assert isinstance(outcome, PeerLost) and outcome.peer == "rank1"
        assert (await watched).reason.kind is ReasonKind.LOST
        async with asyncio.timeout(120):
            assert isinstance(await heard.get(), Down)
        with pytest.raises(PeerLost):
            await far.tell(Add(1))
        assert (await bystander.ask(Add(1), timeout=TIMEOUT_S, reply=Total)).value == 1
