"""An elastic group and its sub-group on a job that grows: a node joins, is killed, and comes again."""

from __future__ import annotations

from support.cluster.cluster_nodes import Nodes

SCRIPT = """
import asyncio
import os

import numpy as np
import zbmd


async def work(worker, name, group, first):
    # Operations by number: who comes later takes part from its `sequence` on.
    of, over = None, False
    while not over:
        if group.sequence % 2 != first:
            await group.refresh(timeout=60)
            continue
        x = np.array([10.0**worker.rank, os.path.exists("done")])
        done = await group.all_reduce(x, inputs="preserve", timeout=60)
        assert done.value[0] == sum(10.0**rank for rank in done.contributors), done
        over = done.value[1] > 0
        if done.contributors != of:
            of = done.contributors
            print(f"{name} of rank {worker.rank}#{worker.incarnation}: {of}", flush=True)
        await asyncio.sleep(0.01)


async def main():
    async with zbmd.join() as worker:
        group = await zbmd.elastic_group(worker, timeout=60)
        part = await group.subgroup((2, 0), timeout=60)  # rank 2 is not there yet
        both = [work(worker, "all", group, 0)]
        if part is not None:
            assert part.ranks == (2, 0)
            both.append(work(worker, "part", part, 1))
        await asyncio.gather(*both)
        for each in (part, group):
            if each is not None:
                await each.close()


zbmd.run(main())
"""


async def test_a_group_grows_by_real_ranks_shrinks_and_has_them_back(nodes: Nodes) -> None:
    (nodes.directory / "train.py").write_text(SCRIPT)
    await nodes.form("n1", "n2")
    options = ("--nnodes", "2:3", "-n", "1", "--arena", "1MiB")
    follower = await nodes.start("n1", "submit", "--follow", *options, "train.py")
    await follower.until(r"all of rank 1#1: \(0, 1\)")
    await follower.until(r"part of rank 0#1: \(0,\)")
    await nodes.up("n3", "--join", nodes.address("n1"))
    for told in (r"all of rank 1#1", r"all of rank 2#1"):
        await follower.until(rf"{told}: \(0, 1, 2\)")
    for rank in (0, 2):
        await follower.until(rf"part of rank {rank}#1: \(0, 2\)")
    seen = len(follower.lines)
    await nodes.runs["n3"].kill()
    await follower.until(r"all of rank 1#1: \(0, 1\)", after=seen)
    await follower.until(r"part of rank 0#1: \(0,\)", after=seen)
    await nodes.up("n3")
    for told in (r"all of rank 1#1", r"all of rank 2#2"):
        await follower.until(rf"{told}: \(0, 1, 2\)", after=seen)
    for told in ("0#1", "2#2"):
        await follower.until(rf"part of rank {told}: \(0, 2\)", after=seen)
    (nodes.directory / "done").touch()
    await follower.until("job .* is ended, succeeded")
    assert await follower.ended() == 0, str(follower)
