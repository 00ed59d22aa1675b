"""The next call finds the actor that a process makes once, also when the first call was cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

import zbmd
from zbmd.actors.rank.once import OncePerWorker
from zbmd.collectives.elastic import subgroups as elastic
from zbmd.collectives.elastic.subgroups import open_asks
from zbmd.collectives.group import subgroup_driver
from zbmd.collectives.group.subgroup_driver import open_subgroups
from zbmd.collectives.p2p import tagged
from zbmd.collectives.p2p.actor import tagged_groups

OPENED: list[tuple[Callable[[zbmd.Worker], Awaitable[object]], str]] = [
    (open_subgroups, subgroup_driver.ACTOR_NAME),
    (open_asks, elastic.ACTOR_NAME),
    (tagged_groups, tagged.ACTOR_NAME),
]


@pytest.mark.parametrize(("opened", "actor"), OPENED)
async def test_an_actor_of_groups_outlives_the_call_that_spawned_it(
    opened: Callable[[zbmd.Worker], Awaitable[object]], actor: str
) -> None:
    """As when a loss cuts the making of a group: the next view's group counts on the same actor."""
    async with zbmd.join() as worker:
        first = asyncio.ensure_future(opened(worker))
        await asyncio.sleep(0)  # it has begun
        first.cancel()
        await asyncio.wait([first])
        again = await opened(worker)
        assert await opened(worker) is again
        assert worker.system.find(actor, 0) is not None


async def test_who_comes_after_an_error_tries_again() -> None:
    tries: list[zbmd.Worker] = []

    async def make(worker: zbmd.Worker) -> int:
        tries.append(worker)
        if len(tries) == 1:
            raise ValueError("not yet")
        return len(tries)

    once = OncePerWorker(make)
    async with zbmd.join() as worker:
        with pytest.raises(ValueError, match="not yet"):
            await once.of(worker)
        assert [await once.of(worker), await once.of(worker)] == [2, 2]
