"""Fair scheduling: no actor keeps the loop, and one that does is named."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from support.actors.actor_recordings import until

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import on
from zbmd.actors.core.actor_base import MailboxSpec
from zbmd.actors.core.native._serving import LOOKS_PER_TURN, MESSAGES_PER_LOOK, TELLS_PER_TURN
from zbmd.actors.hangs.loop_watch import LOOK_S
from zbmd.actors.system import Actor, ActorSystem

PATIENCE_S = 120.0


class Work(Contract, id="fair.work"):
    number: int


class Hog(Contract, id="fair.hog"):
    pass


class Worker(Actor):
    """Works as long as it is asked to; `journal` says who worked when."""

    mailbox = MailboxSpec(capacity=10_000)

    def __init__(self, journal: list[str], busy_s: float = 0.0) -> None:
        self.journal = journal
        self.busy_s = busy_s

    @on(Work)
    async def work(self, _: Work) -> None:
        until_s = time.monotonic() + self.busy_s
        while time.monotonic() < until_s:
            pass
        self.journal.append(self.ref.actor)

    @on(Hog)
    async def hog(self, _: Hog) -> None:
        count = self.system.loop_watch.held
        until_s = time.monotonic() + PATIENCE_S
        while self.system.loop_watch.held == count and time.monotonic() < until_s:
            pass


@pytest.mark.parametrize(("busy_s", "longest_turn"), [(0.0, MESSAGES_PER_LOOK * LOOKS_PER_TURN), (0.001, 8)])
async def test_a_flooded_actor_shares_the_loop(system: ActorSystem, busy_s: float, longest_turn: int) -> None:
    journal: list[str] = []
    flooded = await system.spawn(Worker, journal, busy_s, name="flooded")
    other = await system.spawn(Worker, journal, name="other")
    for number in range(300):
        await flooded.tell(Work(number))
    journal.clear()
    for number in range(4):
        await other.ask(Work(number), timeout=PATIENCE_S)
        assert journal.index("other") <= 2 * longest_turn
        journal.clear()


async def test_a_sender_shares_the_loop_too(system: ActorSystem) -> None:
    ref = await system.spawn(Worker, list[str]())
    rounds = 0

    async def count() -> None:
        nonlocal rounds
        while True:
            await asyncio.sleep(0)
            rounds += 1

    counting = asyncio.create_task(count())
    for number in range(10 * TELLS_PER_TURN):
        await ref.tell(Work(number))
    counting.cancel()
    assert rounds >= 9


async def test_who_holds_the_loop_is_named_with_the_place(system: ActorSystem) -> None:
    assert 2 * LOOK_S < 0.1, "an actor that holds the loop is reported within 100 ms"
    ref = await system.spawn(Worker, list[str](), name="hog")
    watch = system.loop_watch
    for count in (1, 2):
        await ref.ask(Hog(), timeout=2 * PATIENCE_S)
        assert watch.held == count
    notice = watch.notices[-1]
    assert (notice.actor, notice.contract) == ("rank0/hog", "fair.hog/1")
    assert any(frame.function.endswith("hog") for frame in notice.stack)


async def test_the_watch_ends_with_the_last_system() -> None:
    def watching() -> bool:
        return any(thread.name == "zbmd loop watch" for thread in threading.enumerate())

    await until(lambda: not watching())
    systems = [ActorSystem(f"rank{number}") for number in range(2)]
    await systems[0].stop()
    assert watching()
    await systems[1].stop()
    assert not watching()
