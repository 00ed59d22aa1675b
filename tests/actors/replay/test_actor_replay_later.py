"""Timers, casts, stashes, answers that come later and withdrawn asks: recorded, and replayed the same."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import sleep as real_sleep  # nobody waits for it: actors' timers are what is tried
from pathlib import Path

import pytest
import uvloop
from support.actors.actor_recordings import assert_identical, events_of, record, until

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.actor_base import MailboxSpec
from zbmd.actors.core.context import Deferred, DeferredReply
from zbmd.actors.core.ref import Ref
from zbmd.actors.core.timers import Timer
from zbmd.actors.errors import ActorError, NoReply, StashFull
from zbmd.actors.system import ActorSystem

RUNS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


class Note(Contract, id="later.note"):
    number: int


class Take(Contract, id="later.take"):
    pass


class Item(Contract, id="later.item"):
    number: int


class Tick(Contract, id="later.tick"):
    pass


class Fan(Contract, id="later.fan"):
    to: list[Ref]
    number: int


class Never(Contract, id="later.never"):
    pass


class Chain(Contract, id="later.chain"):
    to: Ref


class Store(Actor):
    """Uses all there is."""

    mailbox = MailboxSpec(capacity=4)

    def __init__(self, opens_at: int) -> None:
        self.opens_at = opens_at
        self.ticks = 0
        self.owed: list[Deferred] = []
        self.seen: list[int] = []
        self.broken_off = 0
        self.ticking: Timer | None = None

    async def started(self) -> None:
        self.ticking = self.every(0.002, Tick())
        self.after(0.001, Note(-1))
        self.after(60.0, Note(-2)).cancel()

    @on(Tick)
    async def tick(self, _: Tick) -> None:
        self.ticks += 1
        if self.ticks == self.opens_at:
            assert self.ticking is not None
            self.ticking.cancel()
            self.unstash()

    @on(Note)
    async def note(self, message: Note) -> Item | DeferredReply:
        if self.ticks < self.opens_at:
            try:
                return self.stash()
            except StashFull:
                return Item(-1)
        self.seen.append(message.number)
        return Item(sum(self.seen))

    @on(Take)
    async def take(self, _: Take) -> Item | DeferredReply:
        later = self.defer()
        if len(self.owed) < 2:
            self.owed.append(later)
        else:
            task = asyncio.create_task(self.deliver(later))
            task.add_done_callback(lambda _: None)
        return later

    async def deliver(self, later: Deferred) -> None:
        await real_sleep(0.001)
        later.reply(Item(self.ticks))
        self.owed.pop().fail(StashFull("sold out"))
        self.owed.clear()

    @on(Fan)
    async def fan(self, message: Fan) -> Item:
        failed = await self.system.tell_all(message.to, Note(message.number))
        return Item(len(failed))

    @on(Never)
    async def never(self, _: Never) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.broken_off += 1

    @on(Chain)
    async def chain(self, message: Chain) -> None:
        try:
            await message.to.ask(Never())
        finally:
            self.broken_off += 10


@RUNS
def test_timers_and_what_is_put_aside(tmp_path: Path, run: object) -> None:
    async def scenario(system: ActorSystem) -> None:
        ref = await system.spawn(Store, 3, name="store")
        asks = [asyncio.create_task(ref.ask(Note(number), timeout=60, reply=Item)) for number in range(6)]
        assert {(await ask).number for ask in asks} >= {-1}
        assert (await ref.ask(Note(10), timeout=60, reply=Item)).number >= 10

    record(tmp_path, scenario, run)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    assert_identical(tmp_path)
    # Three ticks, six notes and the timer's, four that were put aside come twice, and one more.
    assert events_of(tmp_path, "store#1").count("Received") >= 3 + 7 + 4 + 1


@RUNS
def test_answers_that_come_later(tmp_path: Path, run: object) -> None:
    async def scenario(system: ActorSystem) -> None:
        ref = await system.spawn(Store, 1, name="store")
        asks = [asyncio.create_task(ref.ask(Take(), timeout=60)) for _ in range(3)]
        answers = await asyncio.gather(*asks, return_exceptions=True)
        assert [type(a) for a in answers] == [NoReply, StashFull, Item]

    record(tmp_path, scenario, run)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    assert_identical(tmp_path)


def test_casts_and_those_they_miss(tmp_path: Path) -> None:
    async def scenario(system: ActorSystem) -> None:
        store = await system.spawn(Store, 0, name="store")
        others = [await system.spawn(Store, 0) for _ in range(3)]
        await system.terminate(others[1])
        missed = await store.ask(Fan([*others, system.ref("rank7/x")], 5), timeout=60)
        assert missed == Item(2)
        assert (await others[0].ask(Note(1), timeout=60, reply=Item)).number in (5, 6)

    record(tmp_path, scenario)
    assert_identical(tmp_path)
    assert "CastDone" in events_of(tmp_path, "store#1")


@RUNS
def test_asks_that_are_withdrawn(tmp_path: Path, run: object) -> None:
    async def scenario(system: ActorSystem) -> None:
        first = await system.spawn(Store, 0, name="first")
        last = await system.spawn(Store, 0, name="last")
        stores = [system.find(name, 0) for name in ("first", "last")]
        for ask, ref in ((Never(), first), (Chain(last), first), (Chain(last), first)):
            asking = asyncio.create_task(ref.ask(ask, timeout=60))
            waits = asyncio.create_task(ref.ask(Note(1), timeout=60))
            end = stores[1 if isinstance(ask, Chain) else 0]
            assert end is not None
            current = end
            await until(lambda current=current: isinstance(getattr(current.current, "message", None), Never))
            waits.cancel()
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError, ActorError):
                await asking
            await ref.ask(Note(2), timeout=60)
        broken_off = [store.actor for store in stores if store is not None]
        assert [b.broken_off for b in broken_off if isinstance(b, Store)] == [21, 2]

    record(tmp_path, scenario, run)  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
    assert_identical(tmp_path)
    assert events_of(tmp_path, "first#1").count("Withdrawn") == 3
