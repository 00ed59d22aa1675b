"""Supervisors whose children come and go: the requests, their answers, and what is refused."""

from __future__ import annotations

import asyncio

import pytest

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.actor_base import remote_class_id
from zbmd.actors.core.ref import ReasonKind, Ref
from zbmd.actors.errors import (
    ActorFailed,
    ActorStartFailed,
    ChildExists,
    DeadActor,
    NoSuchChild,
    UnknownActorClass,
)
from zbmd.actors.supervision.events import BackOff, Restart
from zbmd.actors.supervision.supervisor import (
    AddChild,
    Children,
    ChildSpec,
    ChildUp,
    DeleteChild,
    RestartChild,
    TerminateChild,
    WhichChildren,
)
from zbmd.actors.system import ActorSystem

Pair = tuple[ActorSystem, ActorSystem]
TIMEOUT_S = 60.0


class Say(Contract, id="dynamic.say"):
    pass


class Said(Contract, id="dynamic.said"):
    words: str


class Crash(Contract, id="dynamic.crash"):
    pass


class Speaker(Actor, remote=True):
    def __init__(self, greeting: str, name: str = "world") -> None:
        if name == "nobody":
            raise ValueError("to whom?")
        self.words = f"{greeting} {name}"

    @on(Say)
    async def say(self, _: Say) -> Said:
        return Said(self.words)

    @on(Crash)
    async def crash(self, _: Crash) -> None:
        raise RuntimeError("hoarse")


TEMPLATE = ChildSpec(name="template", actor=Speaker, args=("hello",), restart=Restart.TRANSIENT)


async def add(supervisor: Ref, *arguments: str, name: str, class_id: str = "", restart: str = "") -> Ref:
    kind = Restart(restart) if restart else Restart.PERMANENT
    message = AddChild(name, list(arguments), class_id, kind)
    return (await supervisor.ask(message, timeout=TIMEOUT_S, reply=ChildUp)).ref


async def children(supervisor: Ref) -> list[tuple[str, str, int]]:
    return (await supervisor.ask(WhichChildren(), timeout=TIMEOUT_S, reply=Children)).children


async def until(supervisor: Ref, wanted: list[tuple[str, str, int]]) -> None:
    """Ask until the children are as they should be; each ask gives the supervisor its turn."""
    async with asyncio.timeout(TIMEOUT_S):
        while await children(supervisor) != wanted:
            pass


@pytest.mark.parametrize("remote", [False, True])
async def test_children_of_a_template_come_crash_and_go(pair: Pair, remote: bool) -> None:
    here, there = pair
    made = await (there if remote else here).supervise([], template=TEMPLATE, name="sup")
    supervisor = here.ref(made.address)
    ann = await add(supervisor, "ann", name="ann")
    bob = await add(supervisor, "bob", name="bob")
    assert await ann.ask(Say(), timeout=TIMEOUT_S) == Said("hello ann")
    monitor = here.monitor(bob)
    with pytest.raises(ActorFailed):
        await bob.ask(Crash(), timeout=TIMEOUT_S)
    assert (await monitor.down(timeout=TIMEOUT_S)).reason.kind is ReasonKind.FAILED
    await until(supervisor, [("ann", "running", 1), ("bob", "running", 2)])
    with pytest.raises(DeadActor):
        await bob.ask(Say(), timeout=TIMEOUT_S)
    assert await here.ref(bob.address).ask(Say(), timeout=TIMEOUT_S) == Said("hello bob")

    await supervisor.ask(TerminateChild("ann"), timeout=TIMEOUT_S)
    assert (await here.monitor(ann).down(timeout=TIMEOUT_S)).reason.kind is ReasonKind.NO_ACTOR
    again = (await supervisor.ask(RestartChild("ann"), timeout=TIMEOUT_S, reply=ChildUp)).ref
    assert again != ann and await again.ask(Say(), timeout=TIMEOUT_S) == Said("hello ann")
    await supervisor.ask(TerminateChild("ann"), timeout=TIMEOUT_S)
    await supervisor.ask(DeleteChild("ann"), timeout=TIMEOUT_S)
    assert await children(supervisor) == [("bob", "running", 2)]
    assert await (await add(supervisor, "eve", name="ann")).ask(Say(), timeout=TIMEOUT_S) == Said("hello eve")


async def test_what_cannot_be_is_refused_with_the_reason(system: ActorSystem) -> None:
    supervisor = await system.supervise([ChildSpec(name="one", actor=Speaker, args=("hi",))], name="sup")
    with pytest.raises(UnknownActorClass, match="has no template"):
        await add(supervisor, name="two")
    with pytest.raises(UnknownActorClass, match="has no actor class os:system"):
        await add(supervisor, name="two", class_id="os:system")
    speaker = remote_class_id(Speaker)
    with pytest.raises(ChildExists, match="child one of rank0/sup is up"):
        await add(supervisor, "hi", name="one", class_id=speaker)
    for message in (TerminateChild("two"), RestartChild("two"), DeleteChild("two")):
        with pytest.raises(NoSuchChild):
            await supervisor.ask(message, timeout=TIMEOUT_S)
    with pytest.raises(ChildExists):
        await supervisor.ask(DeleteChild("one"), timeout=TIMEOUT_S)
    with pytest.raises(ActorStartFailed, match="to whom"):
        await add(supervisor, "hi", "nobody", name="two", class_id=speaker)
    await supervisor.ask(TerminateChild("one"), timeout=TIMEOUT_S)
    await supervisor.ask(TerminateChild("one"), timeout=TIMEOUT_S)
    with pytest.raises(ChildExists, match="which is down"):
        await add(supervisor, "hi", name="one", class_id=speaker)
    assert await children(supervisor) == [("one", "down", 1)]


async def test_a_temporary_child_is_forgotten_at_its_end(system: ActorSystem) -> None:
    supervisor = await system.supervise([], name="sup")
    speaker = remote_class_id(Speaker)
    for _ in range(3):
        ref = await add(supervisor, "hi", name="once", class_id=speaker, restart="temporary")
        with pytest.raises(ActorFailed):
            await ref.ask(Crash(), timeout=TIMEOUT_S)
        await until(supervisor, [])


async def test_children_may_live_in_another_process(pair: Pair) -> None:
    here, there = pair
    template = ChildSpec(name="far", actor=Speaker, args=("hello",), process="rank1")
    supervisor = await here.supervise([], template=template, intensity=5)
    ref = await add(supervisor, "far away", name="far")
    assert ref.process == "rank1" and there.find("far", 0) is not None
    monitor = here.monitor(ref)
    with pytest.raises(ActorFailed):
        await ref.ask(Crash(), timeout=TIMEOUT_S)
    await monitor.down(timeout=TIMEOUT_S)
    await supervisor.ask(TerminateChild("far"), timeout=TIMEOUT_S)
    assert there.find("far", 0) is None


async def test_a_child_that_keeps_failing_is_backed_off(system: ActorSystem) -> None:
    back_off = BackOff(first_ns=3_600_000_000_000, max_ns=3_600_000_000_000, jitter=0)
    supervisor = await system.supervise([], template=TEMPLATE, back_off=back_off, name="sup")
    ref = await add(supervisor, "ann", name="ann")
    for state in ("running", "waiting"):
        with pytest.raises(ActorFailed):
            await ref.ask(Crash(), timeout=TIMEOUT_S)
        await until(supervisor, [("ann", state, 2)])
        ref = system.ref("ann")
    await supervisor.ask(TerminateChild("ann"), timeout=TIMEOUT_S)
    await supervisor.ask(RestartChild("ann"), timeout=TIMEOUT_S)
    assert await ref.ask(Say(), timeout=TIMEOUT_S) == Said("hello ann")
    await system.terminate(supervisor)
    assert system.describe() == []


async def test_a_start_that_is_stopped_is_told_to_who_waits(system: ActorSystem) -> None:
    class Slow(Actor):
        async def started(self) -> None:
            await asyncio.get_running_loop().create_future()

    template = ChildSpec(name="slow", actor=Slow)
    supervisor = await system.supervise([], template=template, name="sup")
    adding = [asyncio.create_task(add(supervisor, name=name)) for name in "ab"]
    await asyncio.sleep(0)
    assert [state for _, state, _ in await children(supervisor)] == ["starting", "starting"]
    await supervisor.ask(TerminateChild("a"), timeout=TIMEOUT_S)
    with pytest.raises(ActorStartFailed):
        await adding[0]
    await system.terminate(supervisor)
    with pytest.raises((ActorStartFailed, DeadActor)):
        await adding[1]


async def test_many_children_of_one_template(system: ActorSystem) -> None:
    supervisor = await system.supervise([], template=TEMPLATE, name="sup", intensity=10)
    refs = await asyncio.gather(*(add(supervisor, str(n), name=f"n{n}") for n in range(500)))
    assert [n for n, _, _ in await children(supervisor)] == [f"n{n}" for n in range(500)]
    assert await refs[499].ask(Say(), timeout=TIMEOUT_S) == Said("hello 499")
    await system.terminate(supervisor)
    assert system.describe() == []
