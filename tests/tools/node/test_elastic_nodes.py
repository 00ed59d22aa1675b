"""An elastic group and its sub-group on a job that grows: a node joins, is killed, and comes again."""

from __future__ import annotations

from programs import PROGRAMS
from support.cluster.cluster_nodes import Nodes


async def test_a_group_grows_by_real_ranks_shrinks_and_has_them_back(nodes: Nodes) -> None:
    await nodes.form("n1", "n2")
    options = ("--nnodes", "2:3", "-n", "1", "--arena", "1MiB")
    follower = await nodes.start(
        "n1", "submit", "--follow", *options, str(PROGRAMS / "node/elastic_growth.py")
    )
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
