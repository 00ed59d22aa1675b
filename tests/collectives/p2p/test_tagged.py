"""Send and receive with tags among real ranks, over shared memory and over TCP; one of them is killed."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes.one_killed import run_and_kill_the_last

import zbmd
from zbmd.actors.host.events import Outcome
from zbmd.collectives.communicator.blocking import OnLoop
from zbmd.collectives.errors import OperationAborted
from zbmd.transport.errors import DeadlineExceeded, LocalProtocolError, UserError

JOB = '''
import asyncio

import numpy as np

import zbmd
from zbmd.transport.errors import PeerLost

LARGE = 300_000


async def exchange(group):
    """Everybody sends to everybody, small and large, in an order of its own; tags tell them apart."""
    me, n = group.rank, group.size
    sends = []
    for tag in (2, 1):
        for to in range(n):
            for count in (3, LARGE):
                x = np.full(count, 100 * me + 10 * to + tag, np.float32)
                send = group.send(x, to, tag=tag + 10 * (count == LARGE))
                sends.append(asyncio.ensure_future(send))
    await asyncio.sleep(0)  # they are posted in this order
    for tag in (1, 2, 11, 12):
        for source in reversed(range(n)):
            got = await group.recv(source, tag=tag)
            assert (got.source, got.tag) == (source, tag)
            assert got.array.size == (LARGE if tag > 10 else 3)
            assert (got.array == 100 * source + 10 * me + tag % 10).all(), (source, tag, got.array[:3])
    await asyncio.gather(*sends)
    shared = zbmd.from_array(np.arange(LARGE, dtype=np.int64).reshape(300, -1) + me)
    out = np.empty((300, LARGE // 300), np.int64)
    sent = asyncio.ensure_future(group.send(shared, (me + 1) % n, tag=5))
    got = await group.recv(tag=5, out=out)
    assert got.array is out and got.source == (me - 1) % n and out[299, -1] == LARGE - 1 + got.source
    await sent
    await give_up_and_take(group, shared, out)
    many = [asyncio.ensure_future(group.send(np.array([k]), (me + 1) % n, tag=k % 3)) for k in range(200)]
    assert [(await group.recv((me - 1) % n)).array[0] for _ in range(200)] == list(range(200))
    await asyncio.gather(*many)
    await group.barrier()


async def give_up_and_take(group, shared, out):
    """Who gives up taking a message may change its memory at once; the message is there for the next."""
    me, n = group.rank, group.size
    sent = asyncio.ensure_future(group.send(shared, (me + 1) % n, tag=6))
    for turns in range(0, 400, 8):
        taking = asyncio.ensure_future(group.recv((me - 1) % n, tag=6, out=out))
        for _ in range(turns):
            await asyncio.sleep(0)
        taking.cancel()
        try:
            await taking
            break
        except asyncio.CancelledError:
            out[:] = -1
    else:
        await group.recv((me - 1) % n, tag=6, out=out)
    assert out[299, -1] == LARGE - 1 + (me - 1) % n and out[0, 0] == (me - 1) % n
    await sent


async def main():
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        await exchange(group)
        worker.report({"ready": worker.rank})
        lost = False
        try:
            if worker.rank == 2:
                await asyncio.Event().wait()
            await group.recv(2, tag=99)
        except PeerLost as error:
            assert error.ranks == (2,), error
            lost = True
        await group.close()
        group = await zbmd.group(worker, after=group.epoch)
        assert lost and group.members == (0, 1)
        await exchange(group)
        worker.report({"after": worker.rank})
        await group.close()

asyncio.run(main())
'''


@pytest.mark.parametrize("links", ["auto", "tcp"])
async def test_ranks_exchange_and_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: str
) -> None:
    async with asyncio.timeout(90):
        ended = await run_and_kill_the_last(
            JOB, tmp_path, monkeypatch, ranks=3, links=links, arena_bytes=32 << 20
        )
    assert ended.said["ready"] == {0, 1, 2} and ended.said["after"] == {0, 1}, "\n".join(ended.lines)


LEAVING = """
import asyncio

import numpy as np

import zbmd


async def main():
    async with zbmd.join() as worker:
        gone = asyncio.Event()
        worker.on_peer_lost(lambda *notice: gone.set())
        group = await zbmd.group(worker)
        total = await group.all_reduce(np.full(300_000, 1.0))  # who is slower in it than the one that leaves
        assert (total == 3).all()
        if worker.rank == 2:
            for to in (0, 1):
                for k in range(50):
                    await group.send(np.full(9, k), to, tag=k)
            worker.report({"left": worker.rank})
            return  # without a word, and closing nothing
        await gone.wait()
        for k in reversed(range(50)):
            assert (await group.recv(2, tag=k)).array[0] == k, "what it sent before has come"
        other = 1 - worker.rank
        await group.send(np.full(9, worker.rank), other)
        assert (await group.recv(other)).array[0] == other, "those who are there go on"
        for call in (group.recv(2), group.send(np.ones(9), 2), group.recv(), group.barrier()):
            try:
                await call
            except zbmd.OperationAborted:
                pass
            else:
                raise AssertionError("nobody was there for it")
        worker.report({"stayed": worker.rank})


asyncio.run(main())
"""


@pytest.mark.parametrize("links", ["auto", "tcp"])
async def test_who_leaves_takes_nothing_with_it_that_was_sent_or_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: str
) -> None:
    async with asyncio.timeout(90):
        ended = await run_and_kill_the_last(LEAVING, tmp_path, monkeypatch, ranks=3, links=links)
    assert ended.result.outcome is Outcome.SUCCEEDED, "\n".join(ended.lines)
    assert ended.said["left"] == {2} and ended.said["stayed"] == {0, 1}, "\n".join(ended.lines)


async def test_leaving_closes_what_is_open() -> None:
    async with zbmd.join() as worker:
        plain, elastic = await zbmd.group(worker), await zbmd.elastic_group(worker, channel=1)
        closed = await zbmd.group(worker, channel=2)
        await closed.close()
        waits = asyncio.create_task(plain.recv())
        await asyncio.sleep(0)
    with pytest.raises(OperationAborted, match="closed"):
        await waits
    for call in (plain.barrier(), elastic.barrier(), closed.barrier()):
        with pytest.raises(OperationAborted, match="closed"):
            await call


async def test_a_receive_that_gives_up_leaves_the_message_for_the_next() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        with pytest.raises(DeadlineExceeded, match="receive from 0 with tag 4"):
            await group.recv(0, tag=4, timeout=0.01)
        waits = asyncio.create_task(group.recv(tag=4))
        await asyncio.sleep(0)
        await group.send(np.arange(3), 0, tag=4)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        with pytest.raises(UserError, match="must have 3 elements"):
            await group.recv(tag=4, out=np.zeros(2))
        got = await group.recv()
        assert (got.array == np.arange(3)).all() and (got.source, got.tag) == (0, 4)
        large = zbmd.from_array(np.ones(100_000))
        sent = asyncio.create_task(group.send(large, 0, tag=1))
        assert (await group.recv(0)).array.sum() == 100_000
        await sent
        with pytest.raises(UserError, match="tag"):
            await group.send(np.ones(1), 0, tag=-1)
        with pytest.raises(UserError, match="no reduction for dtype"):
            await group.send(np.array(["a"]), 0)
        with pytest.raises(LocalProtocolError, match="not a member"):
            await group.send(np.ones(1), 3)
        answer = asyncio.to_thread(lambda: group.blocking.recv(tag=8, timeout=30))
        from_thread = asyncio.create_task(answer)
        await asyncio.to_thread(lambda: group.blocking.send(np.full(2, 7.0), 0, tag=8))
        assert (await from_thread).array.sum() == 14
        with pytest.raises(LocalProtocolError, match="await"):
            group.blocking.recv(0)
        late = asyncio.create_task(group.recv())
        await asyncio.sleep(0)
        await group.close()
        with pytest.raises(OperationAborted, match="closed"):
            await late
        with pytest.raises(OperationAborted):
            await group.send(np.ones(1), 0)


def test_a_call_that_passes_the_loop_ends_with_it() -> None:
    async def leave_behind() -> tuple[OnLoop, Future[Any]]:
        begun = asyncio.Event()

        async def forever() -> None:
            begun.set()
            await asyncio.Event().wait()

        on_loop = OnLoop()
        waits = threads.submit(on_loop.wait_for, forever)
        await begun.wait()
        return on_loop, waits

    with ThreadPoolExecutor(1) as threads:
        on_loop, waits = asyncio.run(leave_behind())
        later = threads.submit(on_loop.wait_for, lambda: asyncio.sleep(0))
        for call in (waits, later):
            with pytest.raises(OperationAborted, match="the loop"):
                call.result(timeout=30)
