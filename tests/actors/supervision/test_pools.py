"""Handlers that compute, in threads and processes: order, answers, errors, withdrawal, replay, no leaks."""

from __future__ import annotations

import asyncio
import os
import select
import sys
import threading
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.actors.actor_recordings import assert_identical, record, until
from support.actors.calculator import Calculator, Count, Cube, Double, Hang, Result, Square

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.actor_base import handler_table
from zbmd.actors.errors import ActorFailed, ContractError
from zbmd.actors.system import ActorSystem

TIMEOUT_S = 180.0


class Hold(Contract, id="pools.hold"):
    pass


class Held(Actor):
    started_to_hold = threading.Event()
    let_go = threading.Event()

    def __init__(self) -> None:
        self.journal: list[str] = []

    @on(Hold, pool="thread")
    def hold(self, _: Hold) -> None:
        Held.started_to_hold.set()
        Held.let_go.wait(TIMEOUT_S)
        self.journal.append("held")

    @on(Count)
    async def counted(self, _: Count) -> Result:
        self.journal.append("counted")
        return Result(len(self.journal), 0, 0)


async def test_a_thread_computes_beside_the_loop_and_messages_keep_their_order(system: ActorSystem) -> None:
    ref = await system.spawn(Calculator)
    asks = [asyncio.create_task(ref.ask(Square(n), timeout=TIMEOUT_S, reply=Result)) for n in range(20)]
    counted = asyncio.create_task(ref.ask(Count(), timeout=TIMEOUT_S, reply=Result))
    results = await asyncio.gather(*asks)
    assert [r.number for r in results] == [n * n for n in range(20)]
    assert threading.get_ident() not in {r.thread for r in results}
    assert (await counted).number == 20
    with pytest.raises(ActorFailed, match="ValueError: negative"):
        await ref.ask(Square(-1), timeout=TIMEOUT_S)


async def test_a_thread_whose_ask_is_withdrawn_is_waited_for(system: ActorSystem) -> None:
    Held.started_to_hold.clear()
    Held.let_go.clear()
    ref = await system.spawn(Held)
    hold = asyncio.create_task(ref.ask(Hold(), timeout=TIMEOUT_S))
    await until(Held.started_to_hold.is_set)
    hold.cancel()
    count = asyncio.create_task(ref.ask(Count(), timeout=TIMEOUT_S))
    await asyncio.sleep(0)
    assert not count.done()
    Held.let_go.set()
    assert await count == Result(2, 0, 0)


async def test_a_process_computes_and_its_end_is_told(system: ActorSystem) -> None:
    ref = await system.spawn(Calculator)
    first = await ref.ask(Cube(3), timeout=TIMEOUT_S, reply=Result)
    again = await ref.ask(Cube(4), timeout=TIMEOUT_S, reply=Result)
    assert (first.number, again.number) == (27, 64)
    assert first.pid == again.pid != os.getpid()
    with pytest.raises(ActorFailed, match="PoolFailed: ValueError: negative"):
        await ref.ask(Cube(-1), timeout=TIMEOUT_S)
    ref = await system.spawn(Calculator)
    assert (await ref.ask(Cube(2), timeout=TIMEOUT_S, reply=Result)).pid == first.pid
    with pytest.raises(ActorFailed, match="ended with code 3"):
        await ref.ask(Cube(0), timeout=TIMEOUT_S)


async def test_a_process_whose_ask_is_withdrawn_is_killed(system: ActorSystem) -> None:
    ref = await system.spawn(Calculator)
    hanging = asyncio.create_task(ref.ask(Hang(), timeout=TIMEOUT_S))
    await until(lambda: bool(system.pools._busy))
    (worker,) = system.pools._busy
    hanging.cancel()
    assert (await ref.ask(Cube(2), timeout=TIMEOUT_S, reply=Result)).number == 8
    assert worker._process.returncode == -9


async def test_a_system_that_stops_leaves_no_process() -> None:
    system = ActorSystem("rank0")
    ref = await system.spawn(Calculator)
    pid = (await ref.ask(Cube(2), timeout=TIMEOUT_S, reply=Result)).pid
    hanging = asyncio.create_task((await system.spawn(Calculator)).ask(Hang(), timeout=TIMEOUT_S))
    await until(lambda: bool(system.pools._busy))
    await system.stop(timeout=0.1)
    with pytest.raises(Exception, match="rank0/Calculator"):
        await hanging
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not system.pools._busy


def test_what_cannot_run_in_a_pool_is_refused_at_the_first_spawn() -> None:
    class Coroutine(Actor):
        @on(Square, pool="thread")
        async def square(self, _: Square) -> None: ...

    class Bound(Actor):
        @on(Square, pool="process")
        def square(self, _: Square) -> None: ...

    class Local(Actor):
        @staticmethod
        @on(Square, pool="process")
        def square(_: Square) -> None: ...

    for cls, words in ((Coroutine, "with `def`"), (Bound, "make it static"), (Local, "cannot import it")):
        with pytest.raises(ContractError, match=words):
            handler_table(cls)


def test_what_a_pool_computed_is_computed_again_in_a_replay(tmp_path: Path) -> None:
    async def scenario(system: ActorSystem) -> None:
        ref = await system.spawn(Calculator, name="calculator")
        for number in range(3):
            await ref.ask(Double(number), timeout=TIMEOUT_S)

    record(tmp_path, scenario)
    assert_identical(tmp_path)


async def test_a_killed_process_takes_its_pool_along() -> None:
    path = os.pathsep.join(filter(None, sys.path))
    victim = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PROGRAMS / "actors/pool_victim.py"),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert victim.stdout is not None
    async with asyncio.timeout(TIMEOUT_S):
        worker = os.pidfd_open(int(await victim.stdout.readline()))
    try:
        victim.kill()
        await victim.wait()
        ended, _, _ = select.select([worker], [], [], TIMEOUT_S)
        assert ended
    finally:
        os.close(worker)
