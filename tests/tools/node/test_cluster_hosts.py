"""A supervisor of nodes that is in the cluster: a node that stands still is lost, though its command runs."""

from __future__ import annotations

import asyncio
import os
import sys

import pytest
from support.cluster.cluster_nodes import TIMEOUT_S, Nodes
from support.processes.polling import until
from support.processes.stopping import stop

from zbmd.actors.process_pool.placement import Placement, PlacementMachine
from zbmd.actors.process_pool.process_actor import NodeProcess, Placements, node_child
from zbmd.actors.session import Session
from zbmd.actors.supervision.events import BackOff


async def healthy(_: str) -> str:
    return ""


async def test_a_node_that_stands_still_is_replaced_on_another_host(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two others, so that the cluster goes on; the third is stopped, and no command ends by itself."""
    monkeypatch.setenv("ZBMD_COOKIE_FILE", str(nodes.directory / "cookie"))
    monkeypatch.setenv("ZBMD_STATE_DIR", str(nodes.directory / "n1"))
    monkeypatch.setattr(NodeProcess, "ready_s", TIMEOUT_S)  # it imports beside whatever else runs
    runs = await nodes.form("n1", "n2")
    zbmd_node = (
        sys.executable,
        "-c",
        "import sys; from zbmd.tools.entry.scripts import node; sys.exit(node())",
    )
    command = (*zbmd_node, "up", "--name", "{host}", "--listen", "127.0.0.1:0", "--join", nodes.address("n1"))
    state = {"ZBMD_STATE_DIR": str(nodes.directory / "{host}")}
    session = await asyncio.to_thread(Session.connect)
    hosts: list[Placements] = []

    async def supervise() -> None:
        hosts.append(Placements(PlacementMachine([Placement(name="a"), Placement(name="b")]), healthy))
        child = node_child("spare", hosts[0], command, environment=state)
        await session.system.supervise(
            [child], intensity=20, back_off=BackOff(first_ns=10_000_000, max_ns=100_000_000)
        )

    def pid_at(place: str) -> int:
        cell = session.system.find("spare", 0)
        actor = None if cell is None else cell.actor
        if not isinstance(actor, NodeProcess) or actor.place != place or actor.process is None:
            return 0
        return actor.process.pid

    try:
        await asyncio.to_thread(session.run, supervise())
        await runs[0].until(r"view \d+: (?=.*\ba\b)(?=.*\bn1\b)(?=.*\bn2\b)")
        stopped = pid_at("a")
        stop(stopped)
        await runs[0].until(r"view \d+: (?=.*\bb\b)(?=.*\bn1\b)(?=.*\bn2\b)")
        async with asyncio.timeout(TIMEOUT_S):
            await until(lambda: pid_at("b") not in (0, stopped))
        with pytest.raises(ProcessLookupError):
            os.kill(stopped, 0)
    finally:
        if hosts:
            await asyncio.to_thread(session.run, hosts[0].close())
        await asyncio.to_thread(session.close)
