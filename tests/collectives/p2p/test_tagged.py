"""Send and receive with tags among real ranks, over shared memory and over TCP; one of them is killed."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import PROGRAMS
from support.processes.one_killed import run_and_kill_the_last

import zbmd
from zbmd.actors.cluster.jobs.reports import Outcome
from zbmd.collectives.errors import OperationAborted
from zbmd.collectives.p2p.on_loop import OnLoop
from zbmd.transport.errors import DeadlineExceeded, LocalProtocolError, UserError


@pytest.mark.parametrize("links", ["auto", "tcp"])
async def test_ranks_exchange_and_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: str
) -> None:
    script = PROGRAMS / "collectives/tagged.py"
    async with asyncio.timeout(90):
        ended = await run_and_kill_the_last(
            script, tmp_path, monkeypatch, ranks=3, links=links, arena_bytes=32 << 20
        )
    assert ended.said["ready"] == {0, 1, 2} and ended.said["after"] == {0, 1}, "\n".join(ended.lines)


@pytest.mark.parametrize("links", ["auto", "tcp"])
async def test_who_leaves_takes_nothing_with_it_that_was_sent_or_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: str
) -> None:
    script = PROGRAMS / "collectives/tagged_leave.py"
    async with asyncio.timeout(90):
        ended = await run_and_kill_the_last(script, tmp_path, monkeypatch, ranks=3, links=links)
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
        for count in (100_000, 4 << 20):  # lent as one piece, and in several
            sent = asyncio.create_task(group.send(np.arange(count), 0, tag=2))
            await asyncio.sleep(0)
            sent.cancel()
            await asyncio.wait([sent])
            if count == 100_000:  # a copy was under way
                assert (await group.recv(0)).array[-1] == count - 1
            else:
                with pytest.raises(OperationAborted, match="rank 0 gave its message up"):
                    await group.recv(0)
            sent = asyncio.create_task(group.send(np.arange(count) + 1, 0, tag=2))
            assert (await group.recv(0)).array[-1] == count
            await sent
        with pytest.raises(UserError, match="tag"):
            await group.send(np.ones(1), 0, tag=-1)
        with pytest.raises(UserError, match="no reduction for dtype"):
            await group.send(np.array(["a"]), 0)
        with pytest.raises(UserError, match="to=3 is not a rank of this group: expected 0"):
            await group.send(np.ones(1), 3)
        answer = asyncio.to_thread(lambda: group.blocking.recv(tag=8, timeout=180))
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
                call.result(timeout=180)
