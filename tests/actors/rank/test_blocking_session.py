"""Actors from code that blocks: also below a running loop, also when it is interrupted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.errors import ActorFailed, DeadActor
from zbmd.actors.session import Session
from zbmd.actors.supervision.supervisor import ChildSpec
from zbmd.transport.errors import LocalProtocolError


class Add(Contract, id="session.add"):
    amount: int


class Total(Contract, id="session.total"):
    value: int


class Fail(Contract, id="session.fail"):
    pass


class Hang(Contract, id="session.hang"):
    pass


class Counter(Actor):
    def __init__(self, value: int = 0) -> None:
        self.value = value

    @on(Add)
    async def add(self, message: Add) -> Total:
        self.value += message.amount
        return Total(self.value)

    @on(Fail)
    async def fail(self, _: Fail) -> None:
        raise ValueError("as told")

    @on(Hang)
    async def hang(self, _: Hang) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()


@pytest.fixture
def session() -> Iterator[Session]:
    with Session() as made:
        yield made


def test_a_script_spawns_asks_tells_and_terminates(session: Session) -> None:
    counter = session.spawn(Counter, 1, name="counter")
    session.tell(counter, Add(2))
    assert session.tell_all([counter], Add(3)) == {}
    assert session.ask("counter", Add(4), reply=Total) == Total(10)
    assert [(a.name, a.handled) for a in session.actors()] == [("counter", 3)]
    assert "counter" in str(session.terminate(counter).ref)
    with pytest.raises(DeadActor):
        session.ask(counter, Add(1))


def test_errors_come_as_they_are_and_supervisors_restart(session: Session) -> None:
    session.supervise([ChildSpec(name="counter", actor=Counter)])
    with pytest.raises(ActorFailed, match="as told"):
        session.ask("counter", Fail())
    session.run(asyncio.sleep(0))
    assert session.ask("counter", Add(1), reply=Total) == Total(1)


def test_it_works_where_a_loop_runs_already(session: Session) -> None:
    async def cell_of_a_notebook() -> Total:
        return session.ask(session.spawn(Counter), Add(5), reply=Total)

    assert asyncio.run(cell_of_a_notebook()) == Total(5)


def test_ctrl_c_withdraws_the_call_and_the_session_goes_on(session: Session) -> None:
    counter = session.spawn(Counter, name="counter")
    with pytest.raises(KeyboardInterrupt):
        session.ask(counter, Hang())
    assert session.ask(counter, Add(1), reply=Total) == Total(1), "its handler was cancelled"


def test_an_actor_cannot_wait_for_its_own_loop(session: Session) -> None:
    class Blocks(Actor):
        @on(Add)
        async def add(self, message: Add) -> None:
            session.ask("counter", message)

    with pytest.raises(ActorFailed, match=r"await ref\.ask"):
        session.ask(session.spawn(Blocks), Add(1))


def test_closed_it_says_so_and_leaves_no_thread() -> None:
    before = threading.active_count()
    session = Session("brief")
    assert "open" in repr(session)
    session.close()
    session.close()
    assert threading.active_count() == before and "closed" in repr(session)
    with pytest.raises(LocalProtocolError, match="has been closed"):
        session.actors()


def test_a_script_that_forgets_to_close_it_ends_all_the_same() -> None:
    script = "import zbmd; s = zbmd.Session(); print(s.actors())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
