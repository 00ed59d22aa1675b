"""The simulated event loop: asyncio unchanged on a virtual clock, and what ends a run that cannot go on."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zbmd.transport.errors import LocalProtocolError
from zbmd.transport.sim import Deadlock, Livelock, NotSimulated, SimLoop
from zbmd.transport.sim import loop as loop_module

T = TypeVar("T")


def play(program: Callable[[], Coroutine[Any, Any, T]], seed: int | str = 0) -> T:
    with asyncio.Runner(loop_factory=lambda: SimLoop(seed)) as runner:
        return runner.run(program())


@given(delays_ms=st.lists(st.integers(0, 100_000), max_size=20))
def test_sleeps_end_in_the_order_of_their_times_and_at_those(delays_ms: list[int]) -> None:
    async def main() -> list[tuple[int, float]]:
        loop, ended = asyncio.get_running_loop(), list[tuple[int, float]]()
        start_s = loop.time()

        async def one(delay_ms: int) -> None:
            await asyncio.sleep(delay_ms / 1000)
            ended.append((delay_ms, loop.time() - start_s))

        async with asyncio.TaskGroup() as group:
            for delay_ms in delays_ms:
                group.create_task(one(delay_ms))
        return ended

    ended = play(main)
    assert [delay_ms for delay_ms, _ in ended] == sorted(delays_ms)
    assert all(abs(at_s - delay_ms / 1000) < 1e-6 for delay_ms, at_s in ended)


def test_the_tools_of_asyncio_run_unchanged() -> None:
    async def main() -> list[object]:
        seen: list[object] = []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        done, pending = await asyncio.wait(
            [asyncio.create_task(asyncio.sleep(1, 1)), asyncio.create_task(asyncio.sleep(9, 9))],
            return_when=asyncio.FIRST_COMPLETED,
        )
        seen += [len(done), len(pending)]
        queue: asyncio.Queue[int] = asyncio.Queue(1)

        async def produce() -> None:
            for number in range(5):
                await queue.put(number)

        producing = asyncio.create_task(produce())
        seen += [await queue.get() for _ in range(5)]
        await producing
        seen += await asyncio.gather(asyncio.sleep(2, "a"), asyncio.sleep(1, "b"))
        async with asyncio.Lock(), asyncio.Semaphore(1):
            seen.append("held")
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(1e6))
                group.create_task(fail())
        for task in pending:
            task.cancel()
        return seen

    async def fail() -> None:
        raise ValueError

    assert play(main) == [1, 1, 0, 1, 2, 3, 4, "a", "b", "held"]


def test_clocks_and_dice_are_the_simulations_inside_and_real_outside() -> None:
    async def main() -> list[object]:
        start_s, wall_s = time.monotonic(), time.time()
        await asyncio.sleep(3600)
        assert time.monotonic() - start_s == pytest.approx(3600)
        assert time.time() - wall_s == pytest.approx(3600)
        assert time.monotonic_ns() == round(asyncio.get_running_loop().time() * 1e9)
        before_ns = time.monotonic_ns()
        time.sleep(5)  # noqa: ASYNC251 (the virtual one)
        assert time.monotonic_ns() - before_ns == 5_000_000_000
        return [random.random(), os.urandom(8), random.randrange(10**9)]

    real, state = time.monotonic_ns, random.getstate()
    first, again, other = play(main, 1), play(main, 1), play(main, 2)
    assert first == again != other
    assert time.monotonic_ns is real
    assert random.getstate() == state


def test_other_threads_keep_the_real_clock() -> None:
    async def main() -> tuple[int, int]:
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(time.time_ns()))
        thread.start()
        thread.join()
        return time.time_ns(), seen[0]

    virtual_ns, real_ns = play(main)
    assert real_ns - virtual_ns > 10**16


def test_an_executors_job_runs_later_on_the_loop() -> None:
    async def main() -> None:
        loop, thread = asyncio.get_running_loop(), threading.get_ident()
        before_s = loop.time()
        assert await asyncio.to_thread(threading.get_ident) == thread
        assert loop.time() > before_s
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(None, lambda: 1 // 0)

    play(main)


def test_a_deadlock_tells_where_every_task_waits() -> None:
    async def stuck(queue: asyncio.Queue[int]) -> None:
        await queue.get()

    async def main() -> None:
        queue: asyncio.Queue[int] = asyncio.Queue()
        helper = asyncio.create_task(stuck(queue), name="helper")
        await asyncio.sleep(1)
        await helper

    with pytest.raises(Deadlock, match=r"in stuck > .* in get") as caught:
        play(main)
    by_name = {task.task: task for task in caught.value.waiting}
    assert set(by_name) == {"task-1", "helper"}
    assert by_name["task-1"].frames[-1] == "task helper"


def test_a_loop_that_never_lets_time_pass_is_a_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "TURNS_AT_ONE_INSTANT_MAX", 500)

    async def main() -> None:
        while True:  # noqa: ASYNC110 (a spin is what is tried)
            await asyncio.sleep(0)

    with pytest.raises(Livelock, match="500 callbacks"):
        play(main)


def test_timers_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "TIMERS_MAX", 100)
    loop = SimLoop()
    for _ in range(100):
        loop.call_later(1, print)
    with pytest.raises(Livelock, match="100 timers"):
        loop.call_later(1, print)
    loop.close()


def test_cancelled_timers_do_not_pile_up() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        for _ in range(5000):
            loop.call_later(1000, lambda: None).cancel()
        return len(loop._heap)

    assert play(main) < 1000


def test_what_would_leave_the_simulation_is_refused() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(NotSimulated, match="add_signal_handler"):
            loop.add_signal_handler(2, lambda: None)
        with pytest.raises(NotSimulated, match="create_connection"):
            await asyncio.open_connection("localhost", 1)
        with pytest.raises(NotSimulated, match="subprocess_exec"):
            await asyncio.create_subprocess_exec("true")

    play(main)


def test_a_loop_is_used_from_its_own_thread_and_once_at_a_time() -> None:
    async def main() -> None:
        loop, caught = asyncio.get_running_loop(), list[BaseException]()

        def misuse() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except NotSimulated as error:
                caught.append(error)

        thread = threading.Thread(target=misuse)
        thread.start()
        thread.join()
        assert len(caught) == 1
        other, never = SimLoop(), asyncio.sleep(0)
        with pytest.raises(LocalProtocolError, match="running event loop"):
            other.run_until_complete(never)
        never.close()
        other.close()

    play(main)


def test_a_closed_loop_is_closed() -> None:
    loop = SimLoop()
    loop.close()
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.call_soon(print)


def test_asynchronous_generators_are_closed_in_time() -> None:
    closed: list[str] = []

    async def numbers(name: str) -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(1)
            closed.append(name)

    async def main() -> None:
        async for _ in numbers("dropped"):
            break
        await asyncio.sleep(5)
        assert closed == ["dropped"]
        left = numbers("left")
        kept.append(left)
        await anext(left)

    kept: list[AsyncIterator[int]] = []
    play(main)
    assert closed == ["dropped", "left"]


def test_an_exception_in_a_callback_reaches_the_handler() -> None:
    async def main() -> list[str]:
        loop, told = asyncio.get_running_loop(), list[str]()
        loop.set_exception_handler(lambda _, context: told.append(repr(context["exception"])))
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(1)
        return told

    assert play(main) == ["ZeroDivisionError('integer division or modulo by zero')"]


def test_sets_of_tasks_have_one_order() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        junk = [object() for _ in range(random.SystemRandom().randrange(1, 50))]
        tasks = {loop.create_task(asyncio.sleep(i), name=str(i)) for i in range(50)}
        order = [task.get_name() for task in tasks]
        await asyncio.wait(tasks)
        assert junk
        return order

    assert play(main) == play(main)


def test_what_is_thrown_away_leaves_no_warning_behind() -> None:
    began: list[str] = []

    async def late() -> None:
        began.append("late")

    async def stuck(loop: asyncio.AbstractEventLoop) -> None:
        try:
            await loop.create_future()
        finally:
            began.append("finally")
            loop.create_task(late())

    async def main() -> None:
        loop = asyncio.get_running_loop()
        tasks.append(asyncio.create_task(stuck(loop)))
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(late()))  # it never begins

    tasks: list[asyncio.Task[None]] = []
    loop = SimLoop(1)
    loop.run_until_complete(main())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.close()
        tasks.clear()
        gc.collect()
    assert began == ["finally"]
    assert not caught
