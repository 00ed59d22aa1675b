"""Actors of a cluster of real nodes: `zbmd-node up --actors`, one name, one group, a node that is killed."""

from __future__ import annotations

from programs.node import leader_actors
from support.cluster.cluster_nodes import BUDGET, Nodes

ACTORS = leader_actors.__name__


async def test_actors_of_a_cluster_have_one_leader_also_after_it_is_killed(nodes: Nodes) -> None:
    first = await nodes.up("n1", "--recovery-budget", BUDGET, "--actors", ACTORS)
    await first.until(r"node\d+: leads")
    door = nodes.address("n1")
    others = [await nodes.up(name, "--join", door, "--actors", f"{ACTORS}:start") for name in ("n2", "n3")]
    for run in others:
        await run.until(r"node\d+: follows")
    await nodes.agreed("n1", "n2", "n3")
    await others[1].until(r"group of 3, spawned there: True")
    await others[0].until(r"group of 3, spawned there: True")
    await first.kill()
    for run in others:
        await run.until(r"node\d+: down: lost peer node\d+ lost: ")
        await run.until(r"node\d+: leader answers: True")
    await nodes.agreed("n2", "n3")
    for run in others:
        assert sum(": down: lost" in line for line in run.lines) == 1, run


async def test_what_cannot_be_started_is_told(nodes: Nodes) -> None:
    run = await nodes.up("n1", "--actors", "no_such_module")
    await run.until(r"--actors no_such_module: no_such_module cannot be imported \(ModuleNotFoundError")
    assert await run.ended() == 2
    run = await nodes.up("n2", "--actors", f"{ACTORS}:begin")
    await run.until(rf"{ACTORS} has no `async def begin\(system\)` to call")
    assert await run.ended() == 2
