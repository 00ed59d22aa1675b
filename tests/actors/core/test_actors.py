"""Actors of one process: order, back-pressure, deadlines, ends, monitors and links."""

from __future__ import annotations

import asyncio

import pytest

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.actor_base import MailboxSpec
from zbmd.actors.core.context import deadline_ns, trace_id
from zbmd.actors.core.ref import Down, Exited, Reason, ReasonKind, Ref
from zbmd.actors.errors import (
    ActorFailed,
    ActorStartFailed,
    ContractError,
    DeadActor,
    InvalidMessage,
    MailboxFull,
    MissingDeadline,
    NameTaken,
    NotUnderstood,
    SystemStopped,
)
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import DeadlineExceeded, LocalProtocolError


class Add(Contract, id="test.add"):
    amount: int


class Total(Contract, id="test.total"):
    value: int


class Read(Contract, id="test.read"):
    pass


class Gauge(Contract, id="test.gauge", telemetry=True):
    amount: int


class Crash(Contract, id="test.crash"):
    text: str


class Hold(Contract, id="test.hold"):
    pass


class Relay(Contract, id="test.relay"):
    to: Ref
    timeout: float | None = None


class Times(Contract, id="test.times"):
    deadline_ns: int
    trace_id: int


class Counter(Actor):
    def __init__(self, start: int = 0) -> None:
        self.value = start
        self.seen: list[int] = []

    @on(Add)
    async def add(self, message: Add) -> Total:
        self.value += message.amount
        self.seen.append(message.amount)
        return Total(self.value)

    @on(Read)
    async def read(self, _: Read) -> Total:
        return Total(self.value)

    @on(Crash)
    async def crash(self, message: Crash) -> None:
        raise ValueError(message.text)


class Gate(Actor):
    """Holds its first message until the test opens it."""

    def __init__(self, gate: asyncio.Event, holding: asyncio.Event, journal: list[str]) -> None:
        self.gate = gate
        self.holding = holding
        self.journal = journal

    @on(Hold)
    async def hold(self, _: Hold) -> None:
        self.holding.set()
        await self.gate.wait()

    @on(Add)
    async def add(self, message: Add) -> Total:
        self.journal.append(f"add {message.amount}")
        return Total(message.amount)

    @on(Gauge)
    async def gauge(self, message: Gauge) -> Total:
        self.journal.append(f"gauge {message.amount}")
        return Total(message.amount)

    @on(Down)
    async def down(self, signal: Down) -> None:
        self.journal.append(f"down {signal.reason.kind.value}")

    async def stopping(self, reason: Reason) -> None:
        self.journal.append(f"stopping {reason.kind.value}")


class Gates:
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.holding = asyncio.Event()
        self.journal: list[str] = []

    async def spawn(self, system: ActorSystem, capacity: int) -> Ref:
        """A gate that is already holding."""
        spec = MailboxSpec(capacity=capacity)
        ref = await system.spawn(Gate, self.gate, self.holding, self.journal, name="gate", mailbox=spec)
        await ref.tell(Hold())
        await self.holding.wait()
        return ref


class Relayer(Actor):
    @on(Relay)
    async def relay(self, message: Relay) -> Times:
        return await message.to.ask(Read(), timeout=message.timeout, reply=Times)


class Clock(Actor):
    @on(Read)
    async def read(self, _: Read) -> Times:
        return Times(deadline_ns(), trace_id())


async def test_tells_and_asks_of_one_sender_arrive_in_order(system: ActorSystem) -> None:
    ref = await system.spawn(Counter, 10)
    for amount in range(1, 101):
        await ref.tell(Add(amount))
    assert await ref.ask(Read(), timeout=60, reply=Total) == Total(10 + 5050)
    answers = await asyncio.gather(*(ref.ask(Add(1), timeout=60, reply=Total) for _ in range(200)))
    assert [a.value for a in answers] == list(range(5061, 5261))


async def test_a_full_mailbox_makes_local_senders_wait_in_order(system: ActorSystem) -> None:
    gates = Gates()
    ref = await gates.spawn(system, 2)
    sends = [asyncio.create_task(ref.tell(Add(i))) for i in range(6)]
    await asyncio.gather(*sends[:2])
    await asyncio.sleep(0)
    assert not any(s.done() for s in sends[2:])
    sends[3].cancel()
    gates.gate.set()
    await asyncio.gather(*sends, return_exceptions=True)
    await ref.ask(Add(9), timeout=60)
    assert gates.journal == [f"add {i}" for i in (0, 1, 2, 4, 5, 9)]


async def test_an_ask_that_waits_for_room_keeps_its_deadline(system: ActorSystem) -> None:
    gates = Gates()
    ref = await gates.spawn(system, 1)
    await ref.tell(Add(1))
    with pytest.raises(DeadlineExceeded, match=r"gate.*test.add/1"):
        await ref.ask(Add(2), timeout=0.01)
    gates.gate.set()
    await ref.ask(Add(3), timeout=60)
    assert gates.journal == ["add 1", "add 3"]


async def test_a_full_mailbox_drops_the_oldest_telemetry_and_nothing_else(system: ActorSystem) -> None:
    gates = Gates()
    ref = await gates.spawn(system, 3)
    await ref.tell(Add(1))
    first = asyncio.create_task(ref.ask(Gauge(2), timeout=60))
    await asyncio.sleep(0)
    for i in (3, 4, 5):
        await ref.tell(Gauge(i))
    with pytest.raises(MailboxFull):
        await first
    waits = asyncio.create_task(ref.tell(Add(6)))
    await asyncio.sleep(0)
    assert not waits.done()
    gates.gate.set()
    await waits
    await ref.ask(Add(7), timeout=60)
    assert gates.journal == ["add 1", "gauge 4", "gauge 5", "add 6", "add 7"]
    assert system.describe()[0].dropped == 2


async def test_telemetry_is_dropped_itself_where_nothing_else_may_be(system: ActorSystem) -> None:
    gates = Gates()
    ref = await gates.spawn(system, 2)
    for i in (1, 2):
        await ref.tell(Add(i))
    await ref.tell(Gauge(3))
    with pytest.raises(MailboxFull):
        await ref.ask(Gauge(4), timeout=60)
    gates.gate.set()
    await ref.ask(Add(5), timeout=60)
    assert gates.journal == ["add 1", "add 2", "add 5"]


async def test_signals_come_before_messages(system: ActorSystem) -> None:
    gates = Gates()
    ref = await gates.spawn(system, 10)
    victim = await system.spawn(Counter)
    await ref.tell(Add(1))
    system.monitor(victim, to=ref)
    await system.terminate(victim)
    gates.gate.set()
    await ref.ask(Add(2), timeout=60)
    assert gates.journal == ["down shutdown", "add 1", "add 2"]


async def test_an_actor_never_waits_for_room_in_its_own_mailbox(system: ActorSystem) -> None:
    class Talker(Actor):
        @on(Add)
        async def add(self, message: Add) -> None:
            for _ in range(3):
                await self.ref.tell(message)

    ref = await system.spawn(Talker, mailbox=MailboxSpec(capacity=2))
    with pytest.raises(ActorFailed, match="MailboxFull"):
        await ref.ask(Add(1), timeout=60)


async def test_deadlines_are_required_and_inherited(system: ActorSystem) -> None:
    clock = await system.spawn(Clock)
    relay = await system.spawn(Relayer)
    with pytest.raises(MissingDeadline):
        await clock.ask(Read())
    outer = await clock.ask(Read(), timeout=10, reply=Times)
    inherited = await relay.ask(Relay(clock), timeout=20, reply=Times)
    shorter = await relay.ask(Relay(clock, 5), timeout=20, reply=Times)
    longer = await relay.ask(Relay(clock, 100), timeout=20, reply=Times)
    assert shorter.deadline_ns < inherited.deadline_ns < longer.deadline_ns
    assert longer.deadline_ns - outer.deadline_ns < 80_000_000_000
    assert outer.trace_id and outer.trace_id != inherited.trace_id != shorter.trace_id


async def test_the_trace_id_and_deadline_of_one_ask_go_through_all_it_causes(system: ActorSystem) -> None:
    class Root(Actor):
        @on(Relay)
        async def relay(self, message: Relay) -> Times:
            inner = await message.to.ask(Read(), reply=Times)
            assert inner == Times(deadline_ns(), trace_id())
            return inner

    clock = await system.spawn(Clock)
    root = await system.spawn(Root)
    assert (await root.ask(Relay(clock), timeout=60, reply=Times)).trace_id != 0


async def test_neither_an_expired_ask_is_handled_nor_a_cancelled_one(system: ActorSystem) -> None:
    gates = Gates()
    ref = await gates.spawn(system, 10)
    with pytest.raises(DeadlineExceeded, match=r"gate.*within 0.01 s"):
        await ref.ask(Add(1), timeout=0.01)
    ask = asyncio.create_task(ref.ask(Add(2), timeout=60))
    await asyncio.sleep(0)
    ask.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ask
    gates.gate.set()
    assert await ref.ask(Add(3), timeout=60) == Total(3)
    assert gates.journal == ["add 3"]


async def test_a_crash_reaches_asker_monitor_and_those_who_wait(system: ActorSystem) -> None:
    ref = await system.spawn(Counter, name="counter")
    monitor = system.monitor(ref)
    crash = asyncio.create_task(ref.ask(Crash("boom"), timeout=60))
    waiting = asyncio.create_task(ref.ask(Read(), timeout=60))
    with pytest.raises(ActorFailed, match="rank0/counter failed: ValueError: boom"):
        await crash
    with pytest.raises(DeadActor):
        await waiting
    down = await monitor.down(timeout=60)
    assert down == Down(ref, Reason(ReasonKind.FAILED, "ValueError: boom"))
    with pytest.raises(DeadActor):
        await ref.tell(Add(1))
    assert (await system.monitor(ref).down(timeout=60)).reason.kind is ReasonKind.NO_ACTOR


async def test_an_old_incarnation_is_dead_though_its_name_lives(system: ActorSystem) -> None:
    old = await system.spawn(Counter, name="counter")
    with pytest.raises(NameTaken):
        await system.spawn(Counter, name="counter")
    await system.terminate(old)
    new = await system.spawn(Counter, 7, name="counter")
    with pytest.raises(DeadActor):
        await old.ask(Read(), timeout=60)
    by_name = system.ref("counter")
    assert await by_name.ask(Read(), timeout=60) == Total(7)
    assert new != old and new != by_name and system.ref("rank0/counter") == by_name
    assert repr(new) == f"<Ref rank0/counter#1.{new.incarnation}>"


async def test_messages_and_replies_are_checked(system: ActorSystem) -> None:
    class Liar(Actor):
        @on(Read)
        async def read(self, _: Read) -> Total:
            return Add(1)  # type: ignore[return-value] # pyright: ignore[reportReturnType]

    ref = await system.spawn(Counter)
    with pytest.raises(NotUnderstood):
        await ref.ask(Hold(), timeout=60)
    with pytest.raises(InvalidMessage):
        await ref.tell("add")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidMessage, match="not Add"):
        await ref.ask(Read(), timeout=60, reply=Add)
    liar = await system.spawn(Liar)
    with pytest.raises(ActorFailed, match="returned Add"):
        await liar.ask(Read(), timeout=60)

    class Untyped(Actor):
        @on(Read)
        async def read(self, _: Read):  # type: ignore[no-untyped-def]
            return None

    with pytest.raises(ContractError, match=r"Untyped.read must be annotated"):
        await system.spawn(Untyped)
    with pytest.raises(LocalProtocolError):
        system.ref("/counter")
    with pytest.raises(LocalProtocolError):
        await system.spawn(Counter, name="a/b")


async def test_an_actor_that_cannot_start_does_not_exist(system: ActorSystem) -> None:
    class Stillborn(Actor):
        async def started(self) -> None:
            raise RuntimeError("no ground")

        async def stopping(self, reason: Reason) -> None:
            raise AssertionError("it never started")

    with pytest.raises(ActorStartFailed, match="no ground"):
        await system.spawn(Stillborn, name="x")
    assert system.describe() == []


async def test_stop_is_ordered_and_lets_the_current_message_finish(system: ActorSystem) -> None:
    gates = Gates()
    ref = await gates.spawn(system, 10)
    waiting = asyncio.create_task(ref.ask(Add(1), timeout=60))
    await asyncio.sleep(0)
    ending = asyncio.create_task(system.terminate(ref))
    await asyncio.sleep(0)
    assert not ending.done()
    gates.gate.set()
    assert (await ending).reason == Reason(ReasonKind.SHUTDOWN, "asked to stop")
    with pytest.raises(DeadActor):
        await waiting
    assert gates.journal == ["stopping shutdown"]


async def test_what_does_not_stop_is_killed(system: ActorSystem) -> None:
    gates = Gates()
    ref = await gates.spawn(system, 10)
    down = await system.terminate(ref, timeout=0.01)
    assert down.reason.kind is ReasonKind.KILLED
    assert gates.journal == []
    await system.stop()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_system_stops_the_youngest_first() -> None:
    system = ActorSystem("rank0")
    journal: list[str] = []

    class Named(Actor):
        async def stopping(self, reason: Reason) -> None:
            journal.append(self.ref.actor)

    ref = await system.spawn(Named, name="a")
    for name in "bc":
        await system.spawn(Named, name=name)
    await system.stop()
    assert journal == ["c", "b", "a"]
    with pytest.raises(SystemStopped):
        await ref.tell(Add(1))
    with pytest.raises(SystemStopped):
        await system.spawn(Named)


async def test_an_actor_may_stop_itself(system: ActorSystem) -> None:
    class Once(Actor):
        @on(Add)
        async def add(self, message: Add) -> Total:
            self.stop("had enough")
            return Total(message.amount)

    ref = await system.spawn(Once)
    monitor = system.monitor(ref)
    assert await ref.ask(Add(3), timeout=60) == Total(3)
    assert (await monitor.down(timeout=60)).reason == Reason(ReasonKind.NORMAL, "had enough")


async def test_links_end_together_unless_the_end_is_normal(system: ActorSystem) -> None:
    a = await system.spawn(Counter)
    b = await system.spawn(Counter, link_to=a)
    c = await system.spawn(Counter, link_to=b)
    monitor = system.monitor(c)
    with pytest.raises(ActorFailed):
        await a.ask(Crash("x"), timeout=60)
    down = await monitor.down(timeout=60)
    assert down.reason.kind is ReasonKind.FAILED and "ValueError: x" in down.reason.text
    assert system.describe() == []

    d = await system.spawn(Counter)
    e = await system.spawn(Counter, link_to=d)
    system.exit(d, Reason(ReasonKind.NORMAL))
    await system.monitor(d).down(timeout=60)
    assert await e.ask(Read(), timeout=60) == Total(0)

    f = await system.spawn(Counter, link_to=e)
    system.unlink(f, e)
    with pytest.raises(ActorFailed):
        await e.ask(Crash("x"), timeout=60)
    assert await f.ask(Read(), timeout=60) == Total(0)
    with pytest.raises(LocalProtocolError):
        system.link(f, system.ref("by-name"))


async def test_trapping_exits_and_monitoring_as_an_actor(system: ActorSystem) -> None:
    class Trapper(Actor):
        trap_exit = True

        def __init__(self, target: Ref) -> None:
            self.target = target
            self.noticed: asyncio.Queue[str] = queue

        async def started(self) -> None:
            self.link(self.target)
            self.monitor(self.target)

        @on(Exited)
        async def exited(self, signal: Exited) -> None:
            self.noticed.put_nowait(f"exited {signal.ref.actor} {signal.reason}")

        @on(Down)
        async def down(self, signal: Down) -> None:
            self.noticed.put_nowait(f"down {signal.ref.actor} {signal.reason}")

    queue: asyncio.Queue[str] = asyncio.Queue()
    target = await system.spawn(Counter, name="target")
    await system.spawn(Trapper, target, name="trapper")
    with pytest.raises(ActorFailed):
        await target.ask(Crash("x"), timeout=60)
    async with asyncio.timeout(120):
        noticed = {await queue.get(), await queue.get()}
    assert noticed == {"exited target failed: ValueError: x", "down target failed: ValueError: x"}
    assert [a.name for a in system.describe()] == ["trapper"]


async def test_an_end_without_a_supervisor_frees_everything_it_held(system: ActorSystem) -> None:
    gates = Gates()
    ref = await gates.spawn(system, 1)
    await ref.tell(Add(0))
    blocked = [asyncio.create_task(ref.tell(Add(i))) for i in range(3)]
    await asyncio.sleep(0)
    system.exit(ref, Reason(ReasonKind.KILLED, "test"))
    outcomes = await asyncio.gather(*blocked, return_exceptions=True)
    assert all(isinstance(o, DeadActor) for o in outcomes)
