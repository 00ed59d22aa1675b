"""Loops that take in the ranks of a node that joins, and lose them: each sample comes once."""

from __future__ import annotations

import itertools
import socket
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.cluster.cluster_nodes import Nodes, nodes_in
from support.processes.kept_lines import Lines
from support.processes.launch_fixtures import template
from support.processes.warm_template import template_of

from zbmd.actors.cluster.jobs.host import Host, HostConfig
from zbmd.actors.view import Outcome
from zbmd.tools.runs.commands import audit_run
from zbmd.training.run.audit import LoopAudit, Proof
from zbmd.training.run.ledger import LOG_NAME, loss_of, read_log

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

__all__ = ["template"]
PROGRAM = str(PROGRAMS / "torch/growing.py")
STEPS = 10


@pytest.fixture
async def nodes(tmp_path: Path, template: socket.socket) -> AsyncGenerator[Nodes]:
    """Real nodes, that are all gone afterwards."""
    async with nodes_in(tmp_path, template) as found:
        yield found


def ledger_of(out: Path) -> tuple[list[float], list[int]]:
    """Return the losses, and in how many ranks each step was made, of a log that proves that all is there."""
    found = audit_run(out)
    assert isinstance(found, LoopAudit) and found.is_whole and found.proves is Proof.SAMPLES, found
    records = read_log(out / LOG_NAME)[1]
    assert len(records) == STEPS
    return [loss_of(record) for record in records], [len(record.members) for record in records]


async def undisturbed(out: Path, kind: str) -> list[float]:
    """Return the losses of two ranks that stay two."""
    output = Lines()
    config = HostConfig(target=PROGRAM, arguments=(kind, str(out)), world_size=2, arena_bytes=32 << 20)
    result = await Host(config, output=output, template=template_of(config)).run()
    assert result.outcome is Outcome.SUCCEEDED, "\n".join(output.lines)
    return ledger_of(out)[0]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
async def test_a_loop_takes_a_node_in_and_goes_on_when_that_is_killed(
    nodes: Nodes, tmp_path: Path, kind: str
) -> None:
    """With `exact`, DDP ends with the bits of a run that was never disturbed."""
    wanted, out = await undisturbed(tmp_path / "calm", kind), nodes.directory / "out"
    await nodes.form("n1")
    elastic = ("--nnodes", "1:2", "--on-loss", "shrink", "-n", "1")
    follower = await nodes.start("n1", "submit", "--follow", *elastic, PROGRAM, kind, str(out), "1,2")
    await follower.until("waits in a group of 1")
    await nodes.up("n2", "--join", nodes.address("n1"))
    await follower.until("waits in a group of 2")
    await nodes.runs["n2"].kill()
    await follower.until("ends with 1 ranks")
    await follower.until("job .* is ended, succeeded")
    assert await follower.ended() == 0, str(follower)
    losses, sizes = ledger_of(out)
    assert [size for size, _ in itertools.groupby(sizes)] == [1, 2, 1]
    assert losses == (wanted if kind == "ddp" else pytest.approx(wanted, rel=1e-4))


async def test_a_rank_that_is_killed_before_it_joins_leaves_a_loop_as_it_was(
    nodes: Nodes, tmp_path: Path
) -> None:
    """The view after its loss has the members that there were before it came."""
    wanted, out = await undisturbed(tmp_path / "calm", "ddp"), nodes.directory / "out"
    await nodes.form("n1")
    elastic = ("--nnodes", "1:2", "--on-loss", "shrink", "-n", "1", "--env", "FIRST=1", "--env", "EARLY=1")
    follower = await nodes.start("n1", "submit", "--follow", *elastic, PROGRAM, "ddp", str(out))
    await follower.until("waits in a group of 1")
    await nodes.up("n2", "--join", nodes.address("n1"))
    await follower.until("job .* is ended, succeeded")
    assert await follower.ended() == 0, str(follower)
    losses, sizes = ledger_of(out)
    assert sizes == [1] * STEPS and losses == wanted
