"""What `Ref.ask` returns is as good as a coroutine, and leaves nothing behind however it ends."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable

import pytest

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.ref import Ref
from zbmd.actors.errors import DeadActor, InvalidMessage, MissingDeadline
from zbmd.actors.hangs.loop_watch import asked_address
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import DeadlineExceeded, PeerLost

PATIENCE_S = 120.0
Join = Callable[..., None]


class Take(Contract, id="asking.take"):
    number: int


class Wait(Contract, id="asking.wait"):
    """Answered when the gate is opened."""


class Taken(Contract, id="asking.taken"):
    number: int


class Other(Contract, id="asking.other"):
    pass


class Taker(Actor):
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.began = asyncio.Event()
        self.withdrawn = asyncio.Event()

    @on(Take)
    async def take(self, message: Take) -> Taken:
        return Taken(message.number)

    @on(Wait)
    async def wait(self, _: Wait) -> Taken:
        self.began.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.withdrawn.set()
            raise
        return Taken(0)


@pytest.fixture(params=["here", "there"])
async def where(
    request: pytest.FixtureRequest, system: ActorSystem, other: ActorSystem, join: Join
) -> ActorSystem:
    """The system that the actor lives in."""
    join(system, other)
    return system if request.param == "here" else other


async def taker(system: ActorSystem, where: ActorSystem) -> tuple[Ref, Taker]:
    made = await where.spawn(Taker, name="taker")
    cell = where.find("taker", 0)
    assert cell is not None and isinstance(cell.actor, Taker)
    return system.ref(made.address), cell.actor


def nothing_pends(system: ActorSystem) -> bool:
    return not system.deadlines.pending and not any(peer._calls for peer in system._peers.values())


async def test_an_ask_can_be_awaited_in_every_way(system: ActorSystem, where: ActorSystem) -> None:
    ref, _ = await taker(system, where)
    asks = [ref.ask(Take(number), timeout=PATIENCE_S) for number in range(5)]
    answers = [
        await asks[0],
        await asyncio.create_task(asks[1]),
        await asyncio.wait_for(asks[2], PATIENCE_S),  # noqa: TID251 (as users may)
        *await asyncio.gather(asks[3], asks[4]),
    ]
    assert answers == [Taken(number) for number in range(5)] and nothing_pends(system)


async def test_an_ask_that_is_not_awaited_sends_nothing_and_is_told_of(
    system: ActorSystem, where: ActorSystem
) -> None:
    ref, actor = await taker(system, where)
    with pytest.warns(RuntimeWarning, match=r"Ref\.ask.*never awaited"):
        ref.ask(Wait(), timeout=PATIENCE_S)  # pyright: ignore[reportUnusedCoroutine]
        gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ref.ask(Wait(), timeout=PATIENCE_S).close()
    await ref.ask(Take(1), timeout=PATIENCE_S)
    assert not actor.began.is_set() and nothing_pends(system)


async def test_an_ask_is_awaited_once(system: ActorSystem, where: ActorSystem) -> None:
    ref, _ = await taker(system, where)
    ask = ref.ask(Take(1), timeout=PATIENCE_S)
    await ask
    with pytest.raises(RuntimeError, match="already awaited"):
        await ask


@pytest.mark.parametrize("how", ["closed", "dropped"])
async def test_an_ask_that_is_given_up_while_it_waits_is_forgotten(
    system: ActorSystem, where: ActorSystem, how: str
) -> None:
    ref, actor = await taker(system, where)
    ask = ref.ask(Wait(), timeout=PATIENCE_S)
    ask.send(None)
    async with asyncio.timeout(PATIENCE_S):
        await actor.began.wait()
    assert system.deadlines.pending
    if how == "closed":
        ask.close()
    else:
        del ask
        gc.collect()
    assert nothing_pends(system)
    actor.gate.set()
    assert await ref.ask(Take(2), timeout=PATIENCE_S) == Taken(2), "and its answer hurts nobody"


async def test_a_cancelled_ask_is_withdrawn(system: ActorSystem, where: ActorSystem) -> None:
    ref, actor = await taker(system, where)
    asking = asyncio.create_task(ref.ask(Wait(), timeout=PATIENCE_S))
    async with asyncio.timeout(PATIENCE_S):
        await actor.began.wait()
    assert asked_address(asking) == ref.address
    asking.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await actor.withdrawn.wait()
    assert asking.cancelled() and nothing_pends(system)
    assert not asked_address(asking)


async def test_how_an_ask_fails(system: ActorSystem, where: ActorSystem) -> None:
    ref, actor = await taker(system, where)
    with pytest.raises(DeadlineExceeded, match=r"did not answer asking\.wait/1 within 0\.001 s") as late:
        await ref.ask(Wait(), timeout=0.001)
    assert late.value.__suppress_context__
    actor.gate.set()
    with pytest.raises(MissingDeadline):
        await ref.ask(Take(1))
    with pytest.raises(InvalidMessage, match=r"answered asking\.take/1 with Taken, not Other"):
        await ref.ask(Take(1), reply=Other, timeout=PATIENCE_S)
    with pytest.raises(DeadActor):
        await system.ref(f"{where.name}/nobody").ask(Take(1), timeout=PATIENCE_S)
    with pytest.raises(PeerLost):
        await system.ref("nowhere/taker").ask(Take(1), timeout=PATIENCE_S)
    assert nothing_pends(system)
