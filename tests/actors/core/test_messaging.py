"""Casts, answers that come later, stashes, timers, withdrawn asks, and the memory that messages may take."""

from __future__ import annotations

import asyncio
import gc

import pytest
from support.actors.actor_recordings import until

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.actor_base import MailboxSpec
from zbmd.actors.core.context import Deferred, DeferredReply
from zbmd.actors.core.ref import Reason, ReasonKind, Ref, Undelivered
from zbmd.actors.core.timers import TIMERS_PER_ACTOR_MAX, Timer
from zbmd.actors.errors import (
    ActorFailed,
    DeadActor,
    MailboxFull,
    MailboxMemoryFull,
    NoReply,
    StashFull,
    TooManyPending,
)
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import LocalProtocolError, PeerLost

Pair = tuple[ActorSystem, ActorSystem]


class Note(Contract, id="messaging.note"):
    number: int
    payload: bytes = b""


class Take(Contract, id="messaging.take"):
    pass


class Item(Contract, id="messaging.item"):
    number: int


class Read(Contract, id="messaging.read"):
    pass


class Notes(Contract, id="messaging.notes"):
    numbers: list[int]


class Hold(Contract, id="messaging.hold"):
    pass


class Open(Contract, id="messaging.open"):
    pass


class Tick(Contract, id="messaging.tick"):
    number: int


class Start(Contract, id="messaging.start"):
    delay_s: float
    again: bool = False


class Pad(Actor):
    """Takes notes."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    @on(Note)
    async def note(self, message: Note) -> None:
        self.numbers.append(message.number)

    @on(Read)
    async def read(self, _: Read) -> Notes:
        return Notes(self.numbers)


class Shop(Actor):
    """A taker that comes before there is something waits for it."""

    def __init__(self) -> None:
        self.waiting: list[Deferred] = []

    @on(Take)
    async def take(self, _: Take) -> Item | DeferredReply:
        later = self.defer()
        self.waiting.append(later)
        return later

    @on(Note)
    async def note(self, message: Note) -> None:
        self.waiting.pop(0).reply(Item(message.number))

    @on(Hold)
    async def lose(self, _: Hold) -> None:
        self.waiting.clear()

    @on(Open)
    async def crash(self, _: Open) -> None:
        raise ValueError("robbed")

    @on(Read)
    async def wrong(self, _: Read) -> None:
        with pytest.raises(LocalProtocolError, match="none of the answers"):
            self.waiting[0].reply(Notes([]))
        later = self.waiting.pop(0)
        later.fail(StashFull("sold out"))
        with pytest.raises(LocalProtocolError, match="given already"):
            later.reply(Item(1))


class Door(Actor):
    """Puts notes aside until it is opened."""

    mailbox = MailboxSpec(capacity=8)

    def __init__(self) -> None:
        self.is_open = False
        self.numbers: list[int] = []

    @on(Note)
    async def note(self, message: Note) -> Item | DeferredReply:
        if not self.is_open:
            return self.stash()
        self.numbers.append(message.number)
        return Item(message.number)

    @on(Open)
    async def open(self, _: Open) -> None:
        self.is_open = True
        self.unstash()

    @on(Read)
    async def read(self, _: Read) -> Notes:
        return Notes(self.numbers)


class Patient(Actor):
    """Is slow, and reports what becomes of it."""

    def __init__(self, holding: asyncio.Event, journal: list[str]) -> None:
        self.holding = holding
        self.journal = journal

    @on(Hold)
    async def hold(self, _: Hold) -> None:
        self.holding.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.journal.append("let go")

    @on(Take)
    async def stubborn(self, _: Take) -> Item:
        self.holding.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.journal.append("no")
        return Item(1)

    @on(Note)
    async def note(self, message: Note) -> Item:
        self.journal.append(f"note {message.number}")
        return Item(message.number)


class Clockwork(Actor):
    """Lives by its timers."""

    def __init__(self) -> None:
        self.timer: Timer | None = None
        self.ticks: asyncio.Queue[int] = asyncio.Queue()

    @on(Start)
    async def start(self, message: Start) -> None:
        set_timer = self.every if message.again else self.after
        self.timer = set_timer(message.delay_s, Tick(1))

    @on(Tick)
    async def tick(self, message: Tick) -> None:
        self.ticks.put_nowait(message.number)

    @on(Hold)
    async def cancel(self, _: Hold) -> Item:
        assert self.timer is not None
        self.timer.cancel()
        return Item(self.ticks.qsize())


def actor_of(system: ActorSystem, ref: Ref) -> Actor:
    cell = system.find(ref.actor, ref.incarnation)
    assert cell is not None and isinstance(cell.actor, Actor)
    return cell.actor


# Casts.


async def test_a_cast_reaches_all_in_order_and_names_those_it_could_not_reach(pair: Pair) -> None:
    here, there = pair
    refs = [await here.spawn(Pad) for _ in range(3)] + [await there.spawn(Pad) for _ in range(300)]
    dead = await here.spawn(Pad)
    await here.terminate(dead)
    stranger = here.ref("rank9/pad")
    far = [here.ref(ref.address) for ref in refs]
    for number in range(20):
        failed = await here.tell_all([*far, dead, stranger], Note(number))
        assert {ref: type(error) for ref, error in failed.items()} == {dead: DeadActor, stranger: PeerLost}
        await far[-1].tell(Note(100 + number))
    wanted = [n for number in range(20) for n in (number, 100 + number)]
    assert await far[-1].ask(Read(), timeout=60) == Notes(wanted)
    for ref in far[:-1]:
        assert await ref.ask(Read(), timeout=60) == Notes(list(range(20)))


async def test_a_cast_to_a_dead_actor_of_another_process_comes_back(pair: Pair) -> None:
    here, there = pair

    class Caster(Actor):
        def __init__(self) -> None:
            self.bounced: asyncio.Queue[str] = asyncio.Queue()

        @on(Note)
        async def note(self, message: Note) -> None:
            assert await self.system.tell_all([here.ref("rank1/nobody"), alive], message) == {}

        @on(Undelivered)
        async def undelivered(self, signal: Undelivered) -> None:
            self.bounced.put_nowait(f"{signal.ref.actor} {signal.contract} {type(signal.error).__name__}")

    alive = here.ref((await there.spawn(Pad)).address)
    ref = await here.spawn(Caster)
    await ref.tell(Note(1))
    caster = actor_of(here, ref)
    assert isinstance(caster, Caster)
    async with asyncio.timeout(120):
        assert await caster.bounced.get() == "nobody messaging.note/1 DeadActor"
    assert await alive.ask(Read(), timeout=60) == Notes([1])


async def test_that_a_parting_word_was_not_taken_is_no_news(pair: Pair) -> None:
    here, there = pair

    class Farewell(Contract, id="messaging.farewell", parting=True):
        pass

    alive = here.ref((await there.spawn(Pad)).address)
    for message in (Farewell(), Note(1)):
        await here.ref("rank1/nobody").tell(message)
    assert await alive.ask(Read(), timeout=60) == Notes([]), "all answers of before have come"
    assert here.undelivered == 1, "the note"


async def test_a_cast_serves_those_with_room_before_it_waits(system: ActorSystem) -> None:
    holding, journal = asyncio.Event(), list[str]()
    full = await system.spawn(Patient, holding, journal, mailbox=MailboxSpec(capacity=1))
    held = asyncio.create_task(full.ask(Hold(), timeout=60))
    await holding.wait()
    await full.tell(Note(1))
    free = await system.spawn(Pad)
    cast = asyncio.create_task(system.tell_all([full, free], Note(2)))
    await asyncio.sleep(0)
    assert await free.ask(Read(), timeout=60) == Notes([2])
    assert not cast.done()
    held.cancel()
    assert await cast == {}
    await full.ask(Note(3), timeout=60)
    assert journal == ["let go", "note 1", "note 2", "note 3"]


# Answers that come later.


@pytest.mark.parametrize("remote", [False, True])
async def test_an_answer_may_come_later_and_others_are_served_meanwhile(pair: Pair, remote: bool) -> None:
    here, there = pair
    owner = there if remote else here
    shop = here.ref((await owner.spawn(Shop)).address)
    takers = [asyncio.create_task(shop.ask(Take(), timeout=60, reply=Item)) for _ in range(3)]
    for number in range(3):
        await asyncio.sleep(0)
        await shop.tell(Note(number))
    assert [(await taker).number for taker in takers] == [0, 1, 2]
    sold_out = asyncio.create_task(shop.ask(Take(), timeout=60))
    await asyncio.sleep(0)
    await shop.ask(Read(), timeout=60)
    with pytest.raises(StashFull, match="sold out"):
        await sold_out


@pytest.mark.parametrize("remote", [False, True])
async def test_an_answer_that_is_dropped_or_dies_is_told(pair: Pair, remote: bool) -> None:
    here, there = pair
    owner = there if remote else here
    shop = here.ref((await owner.spawn(Shop, name="shop")).address)
    takers = [asyncio.create_task(shop.ask(Take(), timeout=60)) for _ in range(2)]
    await asyncio.sleep(0)
    await shop.ask(Hold(), timeout=60)
    gc.collect()
    for taker in takers:
        with pytest.raises(NoReply, match=r"messaging.take/1 by rank./shop was put off and dropped"):
            await taker
    taker = asyncio.create_task(shop.ask(Take(), timeout=60))
    await asyncio.sleep(0)
    with pytest.raises(ActorFailed):
        await shop.ask(Open(), timeout=60)
    with pytest.raises(DeadActor, match="robbed"):
        await taker


async def test_only_a_running_handler_that_says_so_may_put_its_answer_off(system: ActorSystem) -> None:
    class Sly(Actor):
        @on(Take)
        async def take(self, _: Take) -> Item:
            return self.defer()  # type: ignore[return-value] # pyright: ignore[reportReturnType]

    sly = await system.spawn(Sly)
    with pytest.raises(NoReply):
        await sly.ask(Take(), timeout=60)
    shop = actor_of(system, await system.spawn(Shop))
    with pytest.raises(LocalProtocolError, match="outside of a running handler"):
        shop.defer()


# Messages put aside.


async def test_what_is_put_aside_comes_first_and_in_order(system: ActorSystem) -> None:
    door = await system.spawn(Door)
    asks = [asyncio.create_task(door.ask(Note(number), timeout=60)) for number in range(4)]
    await door.ask(Read(), timeout=60)
    opening = [door.tell(Open()), door.tell(Note(8))]
    for sending in opening:
        await sending
    assert [await ask for ask in asks] == [Item(number) for number in range(4)]
    assert await door.ask(Read(), timeout=60) == Notes([0, 1, 2, 3, 8])
    assert system.memory.used == 0


async def test_an_actor_puts_aside_no_more_than_its_mailbox_holds(system: ActorSystem) -> None:
    door = await system.spawn(Door)
    asks = [asyncio.create_task(door.ask(Note(number), timeout=60)) for number in range(8)]
    await door.ask(Read(), timeout=60)
    assert system.memory.used > 0
    with pytest.raises(ActorFailed, match="StashFull"):
        await door.ask(Note(8), timeout=60)
    for ask in asks:
        with pytest.raises(DeadActor):
            await ask
    assert system.memory.used == 0


# Withdrawn asks.


@pytest.mark.parametrize("remote", [False, True])
async def test_a_cancelled_ask_ends_its_handler_and_not_its_actor(pair: Pair, remote: bool) -> None:
    here, there = pair
    holding, journal = asyncio.Event(), list[str]()
    ref = await (there if remote else here).spawn(Patient, holding, journal)
    patient = here.ref(ref.address)
    held = asyncio.create_task(patient.ask(Hold(), timeout=60))
    await holding.wait()
    waits = asyncio.create_task(patient.ask(Note(1), timeout=60))
    after = asyncio.create_task(patient.ask(Note(2), timeout=60))
    await asyncio.sleep(0)
    waits.cancel()
    await asyncio.sleep(0)
    held.cancel()
    assert await after == Item(2)
    assert journal == ["let go", "note 2"]
    holding.clear()
    stubborn = asyncio.create_task(patient.ask(Take(), timeout=60))
    await holding.wait()
    stubborn.cancel()
    assert await patient.ask(Note(3), timeout=60) == Item(3)
    assert journal == ["let go", "note 2", "no", "note 3"]


async def test_a_withdrawal_goes_down_a_chain_of_asks(pair: Pair) -> None:
    here, there = pair
    holding, journal = asyncio.Event(), list[str]()
    end = await there.spawn(Patient, holding, journal)

    class Middle(Actor):
        def __init__(self, to: Ref) -> None:
            self.to = to

        @on(Hold)
        async def hold(self, message: Hold) -> None:
            await self.to.ask(message)

        @on(Read)
        async def read(self, _: Read) -> Notes:
            return Notes([])

    middle = await here.spawn(Middle, here.ref(end.address))
    asking = asyncio.create_task(middle.ask(Hold(), timeout=60))
    await holding.wait()
    asking.cancel()
    assert await middle.ask(Read(), timeout=60) == Notes([])
    assert await here.ref(end.address).ask(Note(1), timeout=60) == Item(1)
    assert journal == ["let go", "note 1"]


async def test_a_kill_is_no_withdrawal(system: ActorSystem) -> None:
    holding, journal = asyncio.Event(), list[str]()
    ref = await system.spawn(Patient, holding, journal)
    asking = asyncio.create_task(ref.ask(Hold(), timeout=60))
    await holding.wait()
    asking.cancel()
    await asyncio.sleep(0)
    system.exit(ref, Reason(ReasonKind.KILLED, "test"))
    with pytest.raises(DeadActor):
        await ref.ask(Note(1), timeout=60)
    await system.stop()
    assert journal == ["let go"]


# Timers.


async def test_timers_fire_through_the_mailbox_until_they_are_cancelled(system: ActorSystem) -> None:
    ref = await system.spawn(Clockwork)
    clockwork = actor_of(system, ref)
    assert isinstance(clockwork, Clockwork)
    await ref.tell(Start(0.0))
    async with asyncio.timeout(120):
        assert await clockwork.ticks.get() == 1
    await ref.tell(Start(0.001, again=True))
    for _ in range(3):
        async with asyncio.timeout(120):
            await clockwork.ticks.get()
    await ref.ask(Hold(), timeout=60)
    assert clockwork.timer is not None and not clockwork.timer.is_armed
    with pytest.raises(ActorFailed, match="LocalProtocolError: a timer of"):
        await ref.ask(Start(0.0, again=True), timeout=60)


async def test_a_timer_whose_message_waits_can_be_cancelled_and_sends_no_second(system: ActorSystem) -> None:
    class Busy(Clockwork):
        @on(Open)
        async def busy(self, _: Open) -> None:
            timers = [self.every(0.001, Tick(2)), self.after(0.0, Tick(3)), self.after(0.0, Tick(4))]
            await until(lambda: timers[0].missed >= 3 and system.describe()[0].waiting == 3)
            timers[0].cancel()
            timers[2].cancel()

    ref = await system.spawn(Busy, mailbox=MailboxSpec(capacity=1))
    await ref.ask(Open(), timeout=60)
    busy = actor_of(system, ref)
    assert isinstance(busy, Busy)
    async with asyncio.timeout(120):
        assert await busy.ticks.get() == 3
    await until(lambda: system.memory.used == 0)  # the handler of the last tick is over
    assert busy.ticks.empty()


async def test_timers_are_bounded_and_end_with_their_actor(system: ActorSystem) -> None:
    class Greedy(Clockwork):
        async def started(self) -> None:
            for _ in range(TIMERS_PER_ACTOR_MAX):
                self.after(60.0, Tick(1))
            with pytest.raises(TooManyPending):
                self.after(60.0, Tick(1))

    ref = await system.spawn(Greedy)
    greedy = actor_of(system, ref)
    timer = greedy._running_cell().timers._timers[1]
    assert timer.is_armed
    await system.terminate(ref)
    assert not timer.is_armed


# Memory.


async def test_all_mailboxes_together_hold_no_more_bytes_than_they_may(system: ActorSystem) -> None:
    tight = ActorSystem("tight", mailbox_bytes_max=1 << 20)
    try:
        holding, journal = asyncio.Event(), list[str]()
        big = await tight.spawn(Patient, holding, journal, name="big")
        held = asyncio.create_task(big.ask(Hold(), timeout=60))
        await holding.wait()
        small = await tight.spawn(Pad)
        with pytest.raises(MailboxMemoryFull, match=r"tight/big holds [\d,]+ of them"):
            for number in range(100):
                await big.tell(Note(number, bytes(1 << 16)))
        assert 0.9 < tight.memory.used / tight.memory.bound <= 1
        with pytest.raises(MailboxFull):
            await small.tell(Note(1, bytes(1 << 20)))
        await small.ask(Note(1), timeout=60)
        held.cancel()
        await big.ask(Note(100), timeout=60)
        assert tight.memory.used == 0
    finally:
        await tight.stop()


async def test_senders_that_wait_are_accounted_for_and_let_go(system: ActorSystem) -> None:
    holding, journal = asyncio.Event(), list[str]()
    ref = await system.spawn(Patient, holding, journal, mailbox=MailboxSpec(capacity=1))
    held = asyncio.create_task(ref.ask(Hold(), timeout=60))
    await holding.wait()
    await ref.tell(Note(0))
    one = system.memory.used
    senders = [asyncio.create_task(ref.tell(Note(number))) for number in range(1, 4)]
    await asyncio.sleep(0)
    assert system.memory.used == 4 * one
    senders[0].cancel()
    held.cancel()
    await asyncio.gather(*senders, return_exceptions=True)
    await ref.ask(Note(9), timeout=60)
    assert journal == ["let go", "note 0", "note 2", "note 3", "note 9"]
    assert system.memory.used == 0
