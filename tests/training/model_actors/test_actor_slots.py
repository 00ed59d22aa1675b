"""Seats: direct calls hold what an actor promises, are done again at its next life, and end at a bound."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import on
from zbmd.actors.core.ref import Reason, ReasonKind
from zbmd.actors.supervision.events import BackOff, Restart
from zbmd.actors.system import ActorSystem
from zbmd.training.model_actors.model_actors import SupervisorActor
from zbmd.training.model_actors.slot import (
    ActorSlot,
    DescribeSlot,
    RestartsExhausted,
    SlotActor,
    SlotDescription,
)
from zbmd.transport.errors import UserError

SOON = BackOff(first_ns=1_000_000, max_ns=4_000_000)


class Take(Contract, id="test.slots.take"):
    fail: bool = False


class Taken(Contract, id="test.slots.taken"):
    life: int
    together: int


class Worker(SlotActor):
    """Counts how many are at work in it, and fails in as many calls as `failures` has left."""

    def __init__(self, slot: ActorSlot[Any], failures: list[Exception]) -> None:
        super().__init__(slot)
        self.failures = failures
        self.inside = 0
        self.taking = asyncio.Event()

    def work(self, entered: threading.Event | None = None, go_on: threading.Event | None = None) -> int:
        self.inside += 1
        assert self.inside == 1
        if entered is not None and go_on is not None:
            entered.set()
            assert go_on.wait(180)
        self.inside -= 1
        if self.failures:
            raise self.failures.pop()
        return self.slot.incarnations

    @on(Take)
    async def take(self, message: Take) -> Taken:
        self.taking.set()
        async with self.turn:
            if message.fail and self.failures:
                raise self.failures.pop()
            return Taken(self.slot.incarnations, self.inside)


async def seated(
    system: ActorSystem, failures: list[Exception], *, intensity: int = 50, **more: Any
) -> ActorSlot[Worker]:
    slot = ActorSlot[Worker]("worker", **more)
    children = [slot.child(Worker, failures)]
    await system.spawn(SupervisorActor, children, intensity=intensity, back_off=SOON, name="boss")
    return slot


async def test_a_call_that_fails_is_done_again_by_the_next_life(system: ActorSystem) -> None:
    slot = await seated(system, [ValueError("again"), ValueError("once")])
    assert await asyncio.to_thread(slot.call, Worker.work) == 3
    told = await system.ref("here/worker").ask(DescribeSlot(), reply=SlotDescription, timeout=60)
    assert (told.kind, told.incarnation, told.failures) == ("Worker", 3, 2)
    assert told.last_failure == "ValueError: again"
    assert await asyncio.to_thread(slot.call, Worker.work) == 3, "what did not fail lives on"


async def test_a_message_is_given_up_after_so_many_lives(system: ActorSystem) -> None:
    slot = await seated(system, [ValueError(str(n)) for n in range(9)], attempts_max=3)
    with pytest.raises(RestartsExhausted, match="worker failed 3 times in a row; the last: ValueError: 6"):
        await asyncio.to_thread(slot.call, Worker.work)


async def test_when_the_supervisor_gives_up_the_callers_are_told(system: ActorSystem) -> None:
    slot = await seated(system, [ValueError(str(n)) for n in range(9)], intensity=2)
    with pytest.raises(
        RestartsExhausted, match="worker is not coming back: failed: more than 2 restarts within"
    ):
        await asyncio.to_thread(slot.call, Worker.work)
    with pytest.raises(RestartsExhausted):
        await slot.ask(Take(), reply=Taken, timeout=60)


async def test_what_is_an_answer_ends_nobody(system: ActorSystem) -> None:
    slot = await seated(
        system, [KeyError("mine"), UserError("a setting"), MemoryError()], caller_errors=(KeyError,)
    )
    for error in (MemoryError, UserError, KeyError):
        with pytest.raises(error):
            await asyncio.to_thread(slot.call, Worker.work)
    assert await asyncio.to_thread(slot.call, Worker.work) == 1


async def test_a_result_of_a_life_that_was_killed_meanwhile_does_not_count(system: ActorSystem) -> None:
    slot = await seated(system, [])
    entered, go_on = threading.Event(), threading.Event()
    calling = asyncio.create_task(asyncio.to_thread(slot.call, Worker.work, entered, go_on))
    await asyncio.to_thread(entered.wait, 10)
    first = slot.actor
    assert first is not None
    system.exit(first.ref, Reason(ReasonKind.KILLED, "a test"))
    assert (await slot.ask(Take(), reply=Taken, timeout=60)).life == 2
    entered.clear()
    go_on.set()
    assert await calling == 2
    assert entered.is_set(), "it was done again"


async def test_messages_and_direct_calls_take_turns(system: ActorSystem) -> None:
    slot = await seated(system, [])
    stop = threading.Event()

    def call_on() -> int:
        calls = 0
        while not stop.is_set():
            slot.call(Worker.work)
            calls += 1
        return calls

    callers = [asyncio.create_task(asyncio.to_thread(call_on)) for _ in range(3)]
    for _ in range(200):
        taken = await slot.ask(Take(), reply=Taken, timeout=60)
        assert taken.together == 0
    stop.set()
    assert min(await asyncio.gather(*callers)) > 0


async def test_a_handler_that_waits_for_its_turn_can_be_withdrawn(system: ActorSystem) -> None:
    slot = await seated(system, [])
    entered, go_on = threading.Event(), threading.Event()
    calling = asyncio.create_task(asyncio.to_thread(slot.call, Worker.work, entered, go_on))
    await asyncio.to_thread(entered.wait, 10)
    asking = asyncio.create_task(slot.ask(Take(), reply=Taken, timeout=60))
    assert slot.actor is not None
    await slot.actor.taking.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    go_on.set()
    assert await calling == 1
    assert (await slot.ask(Take(), reply=Taken, timeout=60)).life == 1


async def test_an_ask_is_done_again_too(system: ActorSystem) -> None:
    slot = await seated(system, [ValueError("a"), ValueError("b")])
    assert (await slot.ask(Take(fail=True), reply=Taken, timeout=60)).life == 3
    assert slot.failures == 2


async def test_who_waits_for_the_next_life_can_be_called_off(system: ActorSystem) -> None:
    slot = ActorSlot[Worker]("worker")
    children = [slot.child(Worker, [ValueError("x")], restart=Restart.TEMPORARY)]
    await system.spawn(SupervisorActor, children, name="boss")

    def call_off() -> None:
        raise InterruptedError("the epoch is over")

    slot.check = call_off
    with pytest.raises(InterruptedError):
        await asyncio.to_thread(slot.call, Worker.work)
