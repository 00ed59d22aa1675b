"""A rank that sends to all with tags, again after rank 2 is killed."""

from __future__ import annotations

import asyncio

import numpy as np

import zbmd
from zbmd.collectives.errors import MembersLost

LARGE = 300_000
BEYOND = 5 << 20
"""Elements, of 8 bytes: more than the arena has."""


async def exchange(group: zbmd.Group) -> None:
    """Send small and large arrays to all ranks and receive them in another order, by tag."""
    me, n = group.rank, group.size
    sends = list[asyncio.Future[None]]()
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
    await beyond_the_arena(group)
    many = [asyncio.ensure_future(group.send(np.array([k]), (me + 1) % n, tag=k % 3)) for k in range(200)]
    assert [(await group.recv((me - 1) % n)).array[0] for _ in range(200)] == list(range(200))
    await asyncio.gather(*many)
    await group.barrier()


async def give_up_and_take(group: zbmd.Group, shared: np.ndarray, out: np.ndarray) -> None:
    """Cancel receives: their `out` may change at once, and the message is there for the next receive."""
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


async def beyond_the_arena(group: zbmd.Group) -> None:
    """Send and receive in a ring what no arena could hold; give the receive up in the middle."""
    me, n = group.rank, group.size
    x, out = np.arange(BEYOND) + me, np.zeros(BEYOND, np.int64)
    sent = asyncio.ensure_future(group.send(x, (me + 1) % n, tag=7))
    taking = asyncio.ensure_future(group.recv((me - 1) % n, tag=7, out=out))
    while not out[BEYOND // 2]:  # noqa: ASYNC110 (turn by turn)
        await asyncio.sleep(0)
    taking.cancel()
    await asyncio.wait([taking])
    out[:] = 0
    await group.recv((me - 1) % n, tag=7, out=out)
    assert (out == np.arange(BEYOND) + (me - 1) % n).all()
    await sent


async def stream(group: zbmd.Group) -> None:
    """Rank 2 sends large arrays to rank 0 for ever."""
    x = np.ones(BEYOND // 4)
    while True:
        await (group.send(x, 0, tag=98) if group.rank == 2 else group.recv(2, tag=98))


async def main() -> None:
    async with zbmd.join() as worker:
        group = await zbmd.group(worker)
        await exchange(group)
        worker.report({"ready": worker.rank})
        lost = False
        try:
            await (group.recv(2, tag=99) if worker.rank == 1 else stream(group))
        except MembersLost as error:
            assert error.ranks == (2,), error
            lost = True
        await group.close()
        group = await zbmd.group(worker, after=group.epoch)
        assert lost and group.members == (0, 1)
        await exchange(group)
        worker.report({"after": worker.rank})
        await group.close()


asyncio.run(main())
