"""What `Ref.tell` returns is as good as a coroutine; an actor's turn lets its handlers wait in any way."""

from __future__ import annotations

import asyncio
import functools
import gc
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from support.actors.actor_recordings import until

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.actor_base import MailboxSpec
from zbmd.actors.core.context import deadline_ns, trace_id
from zbmd.actors.core.native._serving import MESSAGES_PER_LOOK
from zbmd.actors.core.ref import Ref
from zbmd.actors.errors import ActorFailed, DeadActor, InvalidMessage
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import DeadlineExceeded

PATIENCE_S = 120.0


class Take(Contract, id="short.take"):
    number: int


class Wait(Contract, id="short.wait"):
    number: int


class Show(Contract, id="short.show"):
    pass


class Shown(Contract, id="short.shown"):
    numbers: list[int]


class Taker(Actor):
    mailbox = MailboxSpec(capacity=4)

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.traces: list[int] = []
        self.gate = asyncio.Event()

    @on(Take)
    async def take(self, message: Take) -> None:
        self.numbers.append(message.number)
        self.traces.append(trace_id())

    @on(Wait)
    async def wait(self, message: Wait) -> None:
        await self.gate.wait()
        self.numbers.append(message.number)

    @on(Show)
    async def show(self, _: Show) -> Shown:
        return Shown(list(self.numbers))


async def numbers(ref: Ref) -> list[int]:
    shown: Shown = await ref.ask(Show(), reply=Shown, timeout=PATIENCE_S)
    return shown.numbers


async def test_a_tell_can_be_awaited_in_every_way(system: ActorSystem) -> None:
    ref = await system.spawn(Taker)
    await ref.tell(Take(1))
    await asyncio.create_task(ref.tell(Take(2)))
    async with asyncio.timeout(PATIENCE_S):
        await ref.tell(Take(3))
    await asyncio.gather(ref.tell(Take(4)), ref.tell(Take(5)))
    assert await numbers(ref) == [1, 2, 3, 4, 5]


async def test_a_tell_that_is_not_awaited_sends_nothing_and_is_told_of(system: ActorSystem) -> None:
    ref = await system.spawn(Taker)
    with pytest.warns(RuntimeWarning, match=r"Ref\.tell.*never awaited"):
        ref.tell(Take(1))  # pyright: ignore[reportUnusedCoroutine]
        gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ref.tell(Take(2)).close()
    assert await numbers(ref) == []


async def test_a_tell_is_awaited_once(system: ActorSystem) -> None:
    ref = await system.spawn(Taker)
    told = ref.tell(Take(1))
    await told
    with pytest.raises(RuntimeError, match="already awaited"):
        await told
    assert await numbers(ref) == [1]


async def test_a_tell_that_is_thrown_into_before_it_runs_sends_nothing(system: ActorSystem) -> None:
    ref = await system.spawn(Taker)
    told = ref.tell(Take(1))
    with pytest.raises(ValueError, match="no"):
        told.throw(ValueError("no"))
    assert await numbers(ref) == []


async def test_what_is_out_of_the_ordinary_is_told_at_the_tell(system: ActorSystem) -> None:
    ref = await system.spawn(Taker)
    with pytest.raises(InvalidMessage):
        await ref.tell("no contract")  # type: ignore[arg-type]
    await system.terminate(ref)
    with pytest.raises(DeadActor):
        await ref.tell(Take(1))


async def test_a_full_mailbox_makes_its_sender_wait_in_turn(system: ActorSystem) -> None:
    ref = await system.spawn(Taker)
    actor = system.cells()[0].actor
    assert isinstance(actor, Taker)
    await ref.tell(Wait(0))
    tells = [asyncio.create_task(ref.tell(Take(number))) for number in range(1, 9)]
    for _ in range(4):
        await asyncio.sleep(0)
    assert [told.done() for told in tells] == [True] * 4 + [False] * 4
    actor.gate.set()
    await asyncio.gather(*tells)
    assert await numbers(ref) == list(range(9))


async def test_a_sender_that_is_cancelled_while_it_waits_has_not_sent(system: ActorSystem) -> None:
    ref = await system.spawn(Taker)
    actor = system.cells()[0].actor
    assert isinstance(actor, Taker)
    await ref.tell(Wait(0))
    for number in range(1, 5):
        await ref.tell(Take(number))
    waiting = asyncio.create_task(ref.tell(Take(5)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    actor.gate.set()
    assert await numbers(ref) == list(range(5))


def in_a_task(
    handler: Callable[[Any, Take], Coroutine[Any, Any, None]],
) -> Callable[[Any, Take], Awaitable[None]]:
    """Decorators of users: a handler that returns no coroutine, but another awaitable."""

    @functools.wraps(handler)
    def run(actor: Any, message: Take) -> Awaitable[None]:
        return asyncio.ensure_future(handler(actor, message))

    return run


class Outer(Contract, id="short.outer"):
    """Have all of this done in one turn."""


class Seen(Contract, id="short.seen"):
    deadline_ns: int
    trace_id: int


class Many(Actor):
    """Handlers that wait in every way: for a future, for a bare turn of the loop, for an answer."""

    def __init__(self, taker: Ref) -> None:
        self.taker = taker

    @on(Outer)
    async def outer(self, _: Outer) -> Seen:
        before = Seen(deadline_ns(), trace_id())
        await asyncio.sleep(0)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(done.set_result, None)
        await done
        await self.taker.tell(Take(trace_id() % 1000))
        await self.taker.ask(Show())  # under the deadline that it has inherited
        assert Seen(deadline_ns(), trace_id()) == before
        return before

    @on(Take)
    @in_a_task
    async def apart(self, message: Take) -> None:
        assert trace_id()

    @on(Wait)
    async def fails(self, message: Wait) -> None:
        await asyncio.sleep(0)
        raise ValueError(message.number)


async def test_handlers_that_wait_keep_their_message_and_its_deadline(system: ActorSystem) -> None:
    taker = await system.spawn(Taker, mailbox=MailboxSpec(capacity=100))
    many = await system.spawn(Many, taker)
    seen = await asyncio.gather(*(many.ask(Outer(), reply=Seen, timeout=PATIENCE_S) for _ in range(20)))
    assert len({each.trace_id for each in seen}) == 20 and all(each.deadline_ns for each in seen)
    assert await numbers(taker) == [each.trace_id % 1000 for each in seen]
    assert await many.ask(Take(1), timeout=PATIENCE_S) is None


async def test_a_failure_behind_a_wait_names_its_place_and_rejects_the_rest(system: ActorSystem) -> None:
    many = await system.spawn(Many, await system.spawn(Taker))
    asks = [asyncio.create_task(many.ask(Wait(n), timeout=PATIENCE_S)) for n in range(MESSAGES_PER_LOOK + 2)]
    ends = await asyncio.gather(*asks, return_exceptions=True)
    assert isinstance(ends[0], ActorFailed) and "ValueError: 0" in str(ends[0])
    assert all(isinstance(end, DeadActor) for end in ends[1:])


@pytest.mark.parametrize("late", [0, MESSAGES_PER_LOOK, 2 * MESSAGES_PER_LOOK + 1])
async def test_an_ask_that_is_given_up_while_it_is_handled_ends_its_handler_alone(
    system: ActorSystem, late: int
) -> None:
    ref = await system.spawn(Taker, mailbox=MailboxSpec(capacity=100))
    for number in range(late):
        await ref.tell(Take(number))
    with pytest.raises(DeadlineExceeded):
        await ref.ask(Wait(-1), timeout=0.001)
    withdrawn = asyncio.create_task(ref.ask(Wait(-2), timeout=PATIENCE_S))
    actor = system.cells()[0].actor
    assert isinstance(actor, Taker)
    await until(lambda: (cell := system.cells()[0]).current is not None and not cell.mailbox)
    withdrawn.cancel()
    actor.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await withdrawn
    assert -2 not in await numbers(ref)
