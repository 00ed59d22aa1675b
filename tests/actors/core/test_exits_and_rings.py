"""`sys.exit` in a handler is the exit of its actor; an ask that can never be answered is refused at once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import structlog
from support.actors.actor_recordings import until

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.context import Deferred, DeferredReply
from zbmd.actors.core.ref import ReasonKind
from zbmd.actors.errors import ActorFailed, ActorStartFailed, AskRing
from zbmd.actors.supervision.events import Restart
from zbmd.actors.supervision.supervisor import ChildSpec
from zbmd.actors.system import ActorSystem

LONG_S = 600.0
"""No test waits for it: what is refused is refused at once."""


class Exit(Contract, id="exits.exit"):
    code: int | str | None = None


class Ask(Contract, id="exits.ask"):
    of: str = ""
    how: str = "here"


class Answer(Contract, id="exits.answer"):
    text: str = ""


class Exits(Actor):
    """Exits as it is asked to, at its start too."""

    def __init__(self, at_start: bool = False) -> None:
        self._at_start = at_start

    async def started(self) -> None:
        if self._at_start:
            sys.exit(5)

    @on(Exit)
    async def exit(self, message: Exit) -> None:
        sys.exit(message.code)

    @on(Ask)
    async def ask(self, message: Ask) -> Answer:
        return Answer("alive")


class Chain(Actor):
    """Asks the next one, in its handler or in a task beside it, before it answers."""

    def __init__(self) -> None:
        self.beside: list[asyncio.Task[Any]] = []

    @on(Ask)
    async def ask(self, message: Ask) -> Answer:
        following, _, rest = message.of.partition(",")
        if not following:
            return Answer("the end")
        asking = self.system.ref(following).ask(Ask(rest, message.how), reply=Answer, timeout=LONG_S)
        if message.how == "beside":
            self.beside.append(asyncio.ensure_future(asking))
            return Answer("beside")
        return await asking


class Owes(Actor):
    """Owes an answer, which comes while its handler waits for the one that it owes it."""

    def __init__(self) -> None:
        self.owed: Deferred | None = None

    @on(Ask)
    async def ask(self, message: Ask) -> Answer | DeferredReply:
        if not message.of:
            self.owed = self.defer()
            return self.owed
        owed = self.owed
        assert owed is not None
        self.system.loop.call_soon(lambda: owed.reply(Answer("later")))
        return await self.system.ref(message.of).ask(Ask(), reply=Answer, timeout=LONG_S)


@pytest.fixture
async def system() -> AsyncGenerator[ActorSystem]:
    made = ActorSystem("exits")
    yield made
    await made.stop()


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (3, ReasonKind.FAILED, "sys.exit(3)"),
        ("no data", ReasonKind.FAILED, "sys.exit('no data')"),
        (0, ReasonKind.NORMAL, "sys.exit(0)"),
        (None, ReasonKind.NORMAL, "sys.exit()"),
    ],
)
async def test_sys_exit_ends_the_actor_and_nothing_else(
    system: ActorSystem, code: int | str | None, kind: ReasonKind, text: str
) -> None:
    stray: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: stray.append(context))
    leaver, other = await system.spawn(Exits, name="leaver"), await system.spawn(Exits, name="other")
    with structlog.testing.capture_logs() as logs, pytest.raises(ActorFailed) as failed:
        await leaver.ask(Exit(code), timeout=LONG_S)
    assert str(failed.value) == f"exits/leaver {kind.value}: {text}"
    told = [(entry["log_level"], entry["reason"]) for entry in logs if entry["event"] == "actor exited"]
    assert told == [("info" if kind is ReasonKind.NORMAL else "error", text)]
    assert (await other.ask(Ask(), reply=Answer, timeout=LONG_S)).text == "alive"
    assert not stray


async def test_sys_exit_at_the_start_is_a_failed_start(system: ActorSystem) -> None:
    with pytest.raises(ActorStartFailed, match=r"sys\.exit\(5\)"):
        await system.spawn(Exits, True, name="early")


async def test_a_supervisor_restarts_what_has_exited_with_a_code(system: ActorSystem) -> None:
    spec = ChildSpec(name="child", actor=Exits, restart=Restart.TRANSIENT)
    await system.supervise([spec])
    with pytest.raises(ActorFailed):
        await system.ref("exits/child").ask(Exit(3), timeout=LONG_S)
    await until(lambda: (cell := system.find("child", 0)) is not None and cell.accepts)
    assert (await system.ref("exits/child").ask(Ask(), reply=Answer, timeout=LONG_S)).text == "alive"


@pytest.mark.parametrize(
    ("ring", "told"),
    [
        ("a", "exits/a asks itself, and would answer only after it has its own answer."),
        ("b,a", "exits/b asks exits/a, which asks exits/b: each would wait"),
        ("b,c,a", "exits/c asks exits/a, which asks exits/b, which asks exits/c: each would wait"),
    ],
)
async def test_an_ask_that_closes_a_ring_is_refused_at_once(
    system: ActorSystem, ring: str, told: str
) -> None:
    refs = {name: await system.spawn(Chain, name=name) for name in "abc"}
    with pytest.raises(ActorFailed) as failed:
        await refs["a"].ask(Ask(ring), reply=Answer, timeout=LONG_S)
    assert "AskRing" in str(failed.value) and told in str(failed.value)


async def test_the_asker_may_catch_it_and_go_on(system: ActorSystem) -> None:
    class Catches(Chain):
        @on(Ask)
        async def ask(self, message: Ask) -> Answer:
            try:
                return await super().ask(message)
            except AskRing as error:
                return Answer(str(error))

    ref = await system.spawn(Catches, name="catches")
    answer = await ref.ask(Ask("exits/catches"), reply=Answer, timeout=LONG_S)
    assert answer.text.startswith("exits/catches asks itself")
    assert (await ref.ask(Ask(), reply=Answer, timeout=LONG_S)).text == "the end"


async def test_chains_that_meet_nobody_twice_and_asks_beside_a_handler_are_let_through(
    system: ActorSystem,
) -> None:
    refs = {name: await system.spawn(Chain, name=name) for name in "abc"}
    assert (await refs["a"].ask(Ask("b,c"), reply=Answer, timeout=LONG_S)).text == "the end"
    both = [refs["a"].ask(Ask("c"), reply=Answer, timeout=LONG_S) for _ in range(4)]
    both += [refs["b"].ask(Ask("c"), reply=Answer, timeout=LONG_S) for _ in range(4)]
    assert {answer.text for answer in await asyncio.gather(*both)} == {"the end"}
    assert (await refs["a"].ask(Ask("a", "beside"), reply=Answer, timeout=LONG_S)).text == "beside"
    assert (await refs["a"].ask(Ask(), reply=Answer, timeout=LONG_S)).text == "the end"


async def test_an_answer_that_was_put_off_may_come_while_its_actor_waits(system: ActorSystem) -> None:
    owes, asks = await system.spawn(Owes, name="owes"), await system.spawn(Chain, name="asks")
    first = asyncio.ensure_future(asks.ask(Ask("owes,"), reply=Answer, timeout=LONG_S))
    cell = system.find("owes", 0)
    assert cell is not None
    owing = cell.actor
    assert isinstance(owing, Owes)
    await until(lambda: owing.owed is not None)
    assert (await owes.ask(Ask("asks"), reply=Answer, timeout=LONG_S)).text == "the end"
    assert (await first).text == "later"
