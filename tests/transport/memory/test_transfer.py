"""Transfers: waited for in threads and on loops, given up on, failed."""

from __future__ import annotations

import asyncio
import threading
import weakref

import numpy as np
import pytest

from zbmd.transport.errors import DeadlineExceeded, PeerLost
from zbmd.transport.memory.transfer import DONE, Transfer


def in_thread(transfer: Transfer) -> threading.Thread:
    thread = threading.Thread(target=transfer.finish)
    thread.start()
    return thread


async def test_one_transfer_ends_the_waits_of_threads_and_tasks() -> None:
    transfer = Transfer()
    waits = [asyncio.create_task(_awaited(transfer)) for _ in range(3)]
    blocked = asyncio.to_thread(transfer.wait)
    thread = in_thread(transfer)
    await asyncio.gather(*waits, blocked)
    thread.join()
    assert transfer.done
    await transfer
    await DONE


async def _awaited(transfer: Transfer) -> None:
    await transfer


async def test_a_cancelled_wait_leaves_the_buffers_with_the_transfer() -> None:
    buffer = np.zeros(8)
    alive = weakref.ref(buffer)
    transfer = Transfer(buffer)
    del buffer
    task = asyncio.create_task(_awaited(transfer))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not transfer.done and alive() is not None
    transfer.finish()
    assert transfer.done and alive() is None


async def test_a_failure_reaches_everyone_who_waits() -> None:
    transfer = Transfer()
    task = asyncio.create_task(_awaited(transfer))
    await asyncio.sleep(0)
    transfer.finish(PeerLost(1, "it has ended"))
    transfer.finish()
    for _ in range(2):
        with pytest.raises(PeerLost):
            transfer.wait()
    with pytest.raises(PeerLost):
        await task


def test_a_deadline_ends_the_wait_and_not_the_transfer() -> None:
    transfer = Transfer(bytearray(1))
    with pytest.raises(DeadlineExceeded):
        transfer.wait(deadline_ns=1)
    assert not transfer.done
    transfer.finish()
    transfer.wait(deadline_ns=1)


def test_a_loop_that_is_closed_no_longer_hears_of_it() -> None:
    transfer = Transfer()

    async def give_up() -> None:
        async with asyncio.timeout(0):
            await transfer

    with pytest.raises(TimeoutError):
        asyncio.run(give_up())
    transfer.finish()
    assert transfer.done
