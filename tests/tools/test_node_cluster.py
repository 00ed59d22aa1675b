"""Clusters of real nodes on loopback: they form, die, leave, stop, wake up and restart."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from cluster_nodes import Nodes, nodes_in


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncGenerator[Nodes]:
    async with nodes_in(tmp_path) as found:
        yield found


async def test_three_nodes_form_a_cluster_that_outlives_the_death_of_its_founder(nodes: Nodes) -> None:
    first, second, third = await nodes.form("n1", "n2", "n3")
    await first.kill()
    await nodes.agreed("n2", "n3", after=nodes.marks() | {"n2": 0, "n3": 0})
    found = await nodes.members("n2")
    assert sorted(member["node"]["name"] for member in found["members"]) == ["n2", "n3"]
    assert found["known"] == found["entered"]
    for run in (second, third):
        code, _, errors = await nodes.command(run.name, "down")
        assert code == 0 and "has left the cluster" in errors, errors
        assert await run.ended() == 0, str(run)
