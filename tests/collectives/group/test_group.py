"""Groups: operations that a coroutine awaits, and how they end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import zbmd
from zbmd.collectives.communicator.communicator import Communicator
from zbmd.collectives.errors import OperationAborted
from zbmd.transport.errors import ArenaFull, DeadlineExceeded, UserError

RunRanks = Callable[..., list[Any]]
WAIT_S_MAX = 60.0


async def test_closing_ends_what_is_queued_and_tells_who_waits_for_it() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        gate = threading.Event()
        running = group.submit(lambda _: gate.wait(WAIT_S_MAX))
        queued = [group.submit(lambda c: c.barrier()) for _ in range(3)]
        closing = asyncio.create_task(group.close())
        await asyncio.sleep(0)  # it has begun: the communicator is aborted
        gate.set()
        await closing
        done, left = concurrent.futures.wait(queued, timeout=WAIT_S_MAX)
        assert not left and len(done) == 3
        assert running.result() is True
        for future in queued:
            assert isinstance(future.exception(), OperationAborted)
        with pytest.raises(OperationAborted, match="get a group of the new view"):
            group.submit(lambda c: c.barrier())


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan"), float("inf")])
async def test_a_timeout_is_a_bounded_number_of_seconds(timeout: float) -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        with pytest.raises(UserError, match="timeout"):
            await group.barrier(timeout=timeout)
        await group.all_reduce(np.ones(3), timeout=60)
        await group.close()


def test_a_rank_that_fails_before_it_enters_ends_its_peers_wait(run_ranks: RunRanks) -> None:
    def body(p: Any) -> str:
        c: Communicator = p.communicator()
        c.barrier(deadline_ns=p.soon())
        if p.rank == 1:
            with pytest.raises(ArenaFull):  # too large to be staged
                c.all_reduce(np.zeros(1 << 16), algorithm="direct", deadline_ns=p.soon())
            return "failed"
        try:
            c.all_reduce(np.zeros(1 << 10), algorithm="direct", deadline_ns=p.soon())
        except OperationAborted:
            return "aborted"
        except DeadlineExceeded:
            return "waited in vain"
        return "complete"

    for _ in range(5):
        assert run_ranks(3, body, arena_bytes=1 << 16) == ["aborted", "failed", "aborted"]


def test_a_rank_that_closes_ends_its_peers_wait_but_harms_no_finished_operation(run_ranks: RunRanks) -> None:
    def body(p: Any) -> str:
        c: Communicator = p.communicator()
        total = c.all_reduce(np.full(5, float(p.rank)), deadline_ns=p.soon())
        assert (total == 3.0).all()
        if p.rank == 2:
            c.close()
            return "closed"
        with pytest.raises(OperationAborted):
            c.barrier(deadline_ns=p.soon())
        return "aborted"

    for _ in range(5):
        assert run_ranks(3, body) == ["aborted", "aborted", "closed"]
