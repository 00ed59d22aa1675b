"""An actor's task rests for a while between two messages, of so many actors, and an idle actor holds none."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from zbmd.actors.contracts import Contract
from zbmd.actors.core.actor import Actor, on
from zbmd.actors.core.context import trace_id
from zbmd.actors.core.native._serving import ENDED_MAX, RESTING_MAX
from zbmd.actors.core.ref import Reason, ReasonKind, Ref
from zbmd.actors.errors import DeadActor
from zbmd.actors.system import ActorSystem

PATIENCE_S = 120.0
FOR_LONG_S = 3600.0
KILLED = Reason(ReasonKind.KILLED, "the test says so")


class Count(Contract, id="resting.count"):
    """Say the how-manyth this is, and under which trace."""


class Counted(Contract, id="resting.counted"):
    number: int
    trace: int


class Counts(Actor):
    def __init__(self) -> None:
        self.number = 0

    @on(Count)
    async def count(self, _: Count) -> Counted:
        self.number += 1
        return Counted(self.number, trace_id())


async def count(ref: Ref) -> Counted:
    return await ref.ask(Count(), reply=Counted, timeout=PATIENCE_S)


@pytest.fixture
def restful(system: ActorSystem) -> ActorSystem:
    """A system whose tasks rest for as long as the test lasts."""
    system.rest_s = FOR_LONG_S
    return system


def tasks() -> set[asyncio.Task[object]]:
    return asyncio.all_tasks() - {asyncio.current_task()}  # type: ignore[arg-type]


async def test_one_task_serves_an_actor_from_message_to_message(restful: ActorSystem) -> None:
    ref = await restful.spawn(Counts)
    await count(ref)
    (task,) = tasks()
    (cell,) = restful.cells()
    assert cell.task is None and cell._resting is task and restful.resting == 1
    counted = [await count(ref) for _ in range(10)]
    assert tasks() == {task} and restful.resting == 1
    assert [each.number for each in counted] == list(range(2, 12))
    assert len({each.trace for each in counted}) == 10, "nothing of one message is left for the next"


async def test_an_idle_actor_holds_no_task(system: ActorSystem) -> None:
    """Nor the loop a timer, and it serves again what comes then."""
    system.rest_s = 0.001
    refs = [await system.spawn(Counts) for _ in range(ENDED_MAX + 20)]
    for number in (1, 2):
        assert {(await count(ref)).number for ref in refs} == {number}
        async with asyncio.timeout(PATIENCE_S):
            while waiting := tasks():
                await asyncio.wait(waiting)
        assert system.resting == 0 and all(cell._resting is None for cell in system.cells())


async def test_who_is_asked_again_and_again_keeps_its_task(restful: ActorSystem) -> None:
    ref = await restful.spawn(Counts)
    (cell,) = restful.cells()
    for _ in range(3):
        await count(ref)
        task = cell._resting
        assert task is not None
        restful._end_rests()
        assert cell._resting is task, "it has served since the last look"
    restful._end_rests()
    assert cell._resting is None and (await count(ref)).number == 4


async def test_only_so_many_tasks_rest(restful: ActorSystem) -> None:
    refs = [await restful.spawn(Counts) for _ in range(RESTING_MAX + 20)]
    assert restful.resting == RESTING_MAX == len(tasks())
    assert {(await count(ref)).number for ref in refs} == {1}
    assert restful.resting == RESTING_MAX == len(tasks())
    await restful.terminate(refs[0], timeout=PATIENCE_S)
    assert restful.resting == RESTING_MAX - 1
    await count(refs[-1])
    assert restful.resting == RESTING_MAX, "the place went to the next that was idle"
    await restful.stop(timeout=0)
    assert not tasks() and restful.resting == 0


@pytest.mark.parametrize("how", ["stop", "kill", "the system stops"])
async def test_no_task_outlives_an_idle_actor(restful: ActorSystem, how: str) -> None:
    ref = await restful.spawn(Counts)
    await count(ref)
    ended = restful.monitor(ref)
    if how == "stop":
        restful.exit(ref, Reason(ReasonKind.SHUTDOWN, how))
    elif how == "kill":
        restful.exit(ref, KILLED)
    else:
        await restful.stop()
    await ended.down(timeout=PATIENCE_S)
    await asyncio.sleep(0)
    assert not tasks() and restful.resting == 0


async def test_who_is_killed_as_a_message_wakes_it_does_not_handle_it(restful: ActorSystem) -> None:
    ref = await restful.spawn(Counts)
    await count(ref)
    (cell,) = restful.cells()
    asking = asyncio.create_task(ref.ask(Count(), timeout=PATIENCE_S))
    await asyncio.sleep(0)
    assert cell.task is not None, "woken, and its turn has not begun"
    restful.exit(ref, KILLED)
    with pytest.raises(DeadActor):
        await asking
    assert isinstance(cell.actor, Counts) and cell.actor.number == 1
    assert restful.resting == 0


async def test_an_actor_whose_resting_task_was_cancelled_lives_on(restful: ActorSystem) -> None:
    """As by a loop that cancels all tasks at its end: whoever was idle has not failed."""
    ref = await restful.spawn(Counts)
    await count(ref)
    (task,) = tasks()
    task.cancel()
    assert (await count(ref)).number == 2, "asked before the task has ended"
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled() and task not in tasks() and restful.resting == 1
    assert (await count(ref)).number == 3


def test_a_system_that_is_dropped_leaves_no_word_of_its_idle_actors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def use() -> None:
        for _ in range(3):
            await count(await ActorSystem("dropped").spawn(Counts))

    loop = asyncio.new_event_loop()
    with caplog.at_level(logging.WARNING):
        loop.run_until_complete(use())
        loop.close()
        gc.collect()
    assert not caplog.records
