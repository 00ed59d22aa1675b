"""Supervisors over real actors: restarts keep names, groups restart in order, trees escalate and stop."""

from __future__ import annotations

import asyncio
import math
from typing import Any, ClassVar

import pytest

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.ref import Reason, ReasonKind, Ref
from zbmd.actors.errors import ActorFailed, ActorStartFailed
from zbmd.actors.supervision.events import AutoShutdown, Restart, Strategy
from zbmd.actors.supervision.supervisor import Children, ChildSpec, Supervisor, WhichChildren
from zbmd.actors.system import ActorSystem
from zbmd.transport.errors import LocalProtocolError


class Who(Contract, id="test.who"):
    pass


class Life(Contract, id="test.life"):
    incarnation: int


class Fail(Contract, id="test.fail"):
    pass


class Leave(Contract, id="test.leave"):
    pass


class Worker(Actor):
    journal: ClassVar[list[str]] = []
    changed: ClassVar[asyncio.Condition]

    def __init__(self, hang: bool = False) -> None:
        self.hang = hang

    async def note(self, what: str) -> None:
        Worker.journal.append(f"{what}{self.ref.actor}")
        async with Worker.changed:
            Worker.changed.notify_all()

    async def started(self) -> None:
        await self.note("+")

    async def stopping(self, reason: Reason) -> None:
        if self.hang:
            await asyncio.Event().wait()
        await self.note("-" if reason.is_normal else "x")

    @on(Who)
    async def who(self, _: Who) -> Life:
        return Life(self.ref.incarnation)

    @on(Fail)
    async def fail(self, _: Fail) -> None:
        raise RuntimeError("told to")

    @on(Leave)
    async def leave(self, _: Leave) -> None:
        self.stop()


@pytest.fixture(autouse=True)
def fresh_journal() -> None:
    Worker.journal.clear()
    Worker.changed = asyncio.Condition()


async def until(journal: list[str]) -> None:
    async with asyncio.timeout(120), Worker.changed:
        await Worker.changed.wait_for(lambda: len(Worker.journal) >= len(journal))
    assert Worker.journal == journal


async def crash(ref: Ref) -> None:
    with pytest.raises(ActorFailed):
        await ref.ask(Fail(), timeout=60)


def specs(names: str, **kwargs: Any) -> list[ChildSpec]:
    return [ChildSpec(name=n, actor=Worker, **kwargs) for n in names]


async def test_a_restarted_actor_keeps_its_name_and_has_a_new_incarnation(system: ActorSystem) -> None:
    await system.supervise(specs("ab"), name="sup")
    ref = system.ref("a")
    before = await ref.ask(Who(), timeout=60, reply=Life)
    await crash(ref)
    await until(["+a", "+b", "xa", "+a"])
    after = await ref.ask(Who(), timeout=60, reply=Life)
    assert after.incarnation > before.incarnation
    listed = await system.ref("sup").ask(WhichChildren(), timeout=60, reply=Children)
    assert listed.children == [("a", "running", 2), ("b", "running", 1)]


@pytest.mark.parametrize(
    ("strategy", "follows"),
    [
        (Strategy.ONE_FOR_ONE, ["xb", "+b"]),
        (Strategy.ONE_FOR_ALL, ["xb", "-c", "-a", "+a", "+b", "+c"]),
        (Strategy.REST_FOR_ONE, ["xb", "-c", "+b", "+c"]),
    ],
)
async def test_strategies(system: ActorSystem, strategy: Strategy, follows: list[str]) -> None:
    await system.supervise(specs("abc"), strategy=strategy)
    await crash(system.ref("b"))
    await until(["+a", "+b", "+c", *follows])


async def test_children_stop_in_reverse_order_with_their_supervisor(system: ActorSystem) -> None:
    sup = await system.supervise(specs("abc"))
    down = await system.terminate(sup)
    assert down.reason.kind is ReasonKind.SHUTDOWN
    assert Worker.journal == ["+a", "+b", "+c", "-c", "-b", "-a"]
    assert system.describe() == []


async def test_a_normal_end_is_final_for_a_transient_child_only(system: ActorSystem) -> None:
    children = [
        ChildSpec(name="a", actor=Worker, restart=Restart.TRANSIENT),
        ChildSpec(name="b", actor=Worker, restart=Restart.PERMANENT),
    ]
    await system.supervise(children)
    await system.ref("a").tell(Leave())
    await until(["+a", "+b", "-a"])
    await system.ref("b").tell(Leave())
    await until(["+a", "+b", "-a", "-b", "+b"])


class Brief(Worker):
    async def started(self) -> None:
        await super().started()
        self.stop("done")


async def test_a_child_that_ends_normally_before_its_start_was_noticed(system: ActorSystem) -> None:
    child = ChildSpec(name="a", actor=Brief, restart=Restart.TRANSIENT)
    sup = await system.supervise([child, *specs("b")])
    await until(["+a", "-a", "+b"])
    listed = await sup.ask(WhichChildren(), timeout=60, reply=Children)
    assert listed.children == [("a", "down", 1), ("b", "running", 1)]


async def test_too_many_restarts_escalate_through_the_tree(system: ActorSystem) -> None:
    inner = ChildSpec(name="inner", actor=Supervisor, args=(specs("ab"), Strategy.ONE_FOR_ONE, 1, 60.0))
    top = await system.supervise([*specs("z"), inner], intensity=1, period_s=60.0, name="top")
    monitor = system.monitor(top)
    await crash(system.ref("a"))
    await until(["+z", "+a", "+b", "xa", "+a"])
    await crash(system.ref("a"))  # inner gives up, top restarts it
    await until(["+z", "+a", "+b", "xa", "+a", "xa", "-b", "+a", "+b"])
    await crash(system.ref("a"))
    await until(["+z", "+a", "+b", "xa", "+a", "xa", "-b", "+a", "+b", "xa", "+a"])
    await crash(system.ref("a"))  # inner gives up again, and so does top
    down = await monitor.down(timeout=60)
    assert down.reason.kind is ReasonKind.FAILED
    assert "more than 1 restarts within 60 s" in down.reason.text and "inner" in down.reason.text
    assert Worker.journal[-3:] == ["xa", "-b", "-z"]
    assert system.describe() == []


async def test_a_child_that_cannot_start_ends_the_supervisor(system: ActorSystem) -> None:
    class Stillborn(Actor):
        def __init__(self) -> None:
            raise OSError("no disk")

    with pytest.raises(ActorStartFailed, match="c failed to start: OSError: no disk"):
        await system.supervise([*specs("ab"), ChildSpec(name="c", actor=Stillborn)])
    assert Worker.journal == ["+a", "+b", "-b", "-a"]
    assert system.describe() == []


async def test_a_child_that_does_not_stop_is_killed(system: ActorSystem) -> None:
    hanging = ChildSpec(name="h", actor=Worker, args=(True,), shutdown_s=0.01)
    sup = await system.supervise([*specs("a"), hanging])
    down = await system.terminate(sup)
    assert down.reason.kind is ReasonKind.SHUTDOWN
    assert Worker.journal == ["+a", "+h", "-a"]


async def test_a_child_with_all_the_time_is_waited_for(system: ActorSystem) -> None:
    over = asyncio.Event()

    class Slow(Worker):
        async def stopping(self, reason: Reason) -> None:
            await self.note("?")
            await over.wait()
            await self.note("-")

    inner = ChildSpec(
        name="inner", actor=Supervisor, args=([ChildSpec(name="h", actor=Slow, shutdown_s=math.inf)],)
    )
    sup = await system.supervise([*specs("a"), inner])
    stopping = asyncio.create_task(system.terminate(sup))
    await until(["+a", "+h", "?h"])
    over.set()
    await stopping
    assert Worker.journal == ["+a", "+h", "?h", "-h", "-a"]


@pytest.mark.parametrize(
    ("restart", "follows"),
    [
        (Restart.PERMANENT, ["+b", "+c"]),  # its supervisor has ended, normally, and is started again
        (Restart.TRANSIENT, []),
        (Restart.TEMPORARY, []),
    ],
)
async def test_a_significant_child_ends_its_supervisor(
    system: ActorSystem, restart: Restart, follows: list[str]
) -> None:
    children = [
        ChildSpec(name="b", actor=Worker, restart=Restart.TRANSIENT, significant=True),
        *specs("c"),
    ]
    arguments = (children, Strategy.ONE_FOR_ONE, 3, 5.0, None, None, AutoShutdown.ANY_SIGNIFICANT)
    inner = ChildSpec(name="inner", actor=Supervisor, args=arguments, restart=restart)
    await system.supervise([*specs("a"), inner], intensity=1)
    monitor = system.monitor(system.ref("inner"))
    await crash(system.ref("b"))
    await until(["+a", "+b", "+c", "xb", "+b"])
    await system.ref("b").tell(Leave())
    down = await monitor.down(timeout=60)
    assert down.reason.kind is ReasonKind.SHUTDOWN and "any_significant" in down.reason.text
    await until(["+a", "+b", "+c", "xb", "+b", "-b", "-c", *follows])


async def test_a_significant_child_that_ends_before_all_are_up(system: ActorSystem) -> None:
    child = ChildSpec(name="a", actor=Brief, restart=Restart.TRANSIENT, significant=True)
    sup = await system.supervise([child, *specs("b")], auto_shutdown=AutoShutdown.ALL_SIGNIFICANT)
    down = await system.monitor(sup).down(timeout=60)
    assert down.reason.kind in (ReasonKind.SHUTDOWN, ReasonKind.NO_ACTOR)
    assert system.describe() == []


async def test_what_is_added_later_is_not_significant(system: ActorSystem) -> None:
    template = ChildSpec(name="t", actor=Worker, restart=Restart.TRANSIENT, significant=True)
    with pytest.raises(LocalProtocolError, match="template t is significant"):
        await system.supervise([], template=template, auto_shutdown=AutoShutdown.ANY_SIGNIFICANT)


async def test_a_killed_supervisor_takes_its_children_along(system: ActorSystem) -> None:
    inner = ChildSpec(name="inner", actor=Supervisor, args=(specs("bc"),))
    sup = await system.supervise([*specs("a"), inner])
    monitors = [system.monitor(system.ref(n)) for n in "abc"]
    system.exit(sup, Reason(ReasonKind.KILLED, "test"))
    for monitor in monitors:
        assert (await monitor.down(timeout=60)).reason.kind is ReasonKind.KILLED
    assert system.describe() == []
    assert Worker.journal == ["+a", "+b", "+c"]


async def test_a_supervisor_killed_while_its_children_start(system: ActorSystem) -> None:
    class Slow(Actor):
        async def started(self) -> None:
            await Worker.note(self, "+")  # type: ignore[arg-type] # pyright: ignore[reportArgumentType]
            await asyncio.Event().wait()

    starting = asyncio.create_task(
        system.supervise([*specs("a"), ChildSpec(name="s", actor=Slow)], name="sup")
    )
    await until(["+a", "+s"])
    system.exit(system.ref("sup"), Reason(ReasonKind.KILLED, "test"))
    with pytest.raises(ActorStartFailed, match="killed: test"):
        await starting
    assert system.describe() == []


async def test_stopping_the_system_stops_the_tree_in_order(system: ActorSystem) -> None:
    inner = ChildSpec(name="inner", actor=Supervisor, args=(specs("bc"),))
    await system.supervise([*specs("a"), inner, *specs("d")])
    await system.stop()
    assert Worker.journal == ["+a", "+b", "+c", "+d", "-d", "-c", "-b", "-a"]
