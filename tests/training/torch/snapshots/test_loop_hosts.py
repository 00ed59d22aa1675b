"""Resilient loops over two nodes go on in the memory that each node's process holds, or in what is left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.cluster.etcd_server import free_ports
from support.jobs.held_loops import DDP, FSDP, check_bits, command, end_of, holders, variables, whole_at
from support.jobs.held_runs import PATIENT, kill_all, started
from support.processes.launch_fixtures import launcher, template
from support.processes.launcher import TIMEOUT_S, Running, assert_no_socket

from zbmd.actors.snapshots.client import HolderLine, find_holders

if TYPE_CHECKING:
    from support.processes.launcher import Launcher

__all__ = ["holders", "launcher", "template"]

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.optional

NODES = 2
STANDS = {DDP: "loop.prepared:9", FSDP: "loop.prepared:8"}
"""The points at which all ranks stand still while step 6 is the last one that is committed."""
STEP = 6


@contextmanager
def nodes(launcher: Launcher, program: Path, fault: str = "") -> Generator[list[Running]]:
    """Start both nodes of a loop, with a rank each."""
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    with ExitStack() as stack:
        running = list[Running]()
        for node in range(NODES):
            place = (*PATIENT, "--nnodes", str(NODES), "--node-rank", str(node), "--rdzv-endpoint", endpoint)
            words = command(program, 1, *place)
            running.append(stack.enter_context(started(launcher, *words, **variables(fault))))
            running[-1].deadline_s += TIMEOUT_S  # both import PyTorch, at once
        yield running


@pytest.mark.parametrize(
    ("program", "lost", "sources"),
    [(FSDP, 1, "0"), (DDP, 0, "1")],
    ids=["sharded", "replicas"],
)
async def test_both_nodes_are_killed_at_once_and_one_comes_back_without_its_memory(
    launcher: Launcher, program: Path, lost: int, sources: str
) -> None:
    """Of a sharded state the copy that the buddy has is used, of one that all have alike any."""
    fault = ",".join(f"rank{rank}:{STANDS[program]}" for rank in range(NODES))
    with nodes(launcher, program, fault) as running:
        for rank, node in enumerate(running):
            await asyncio.to_thread(node.until, f"rank {rank} stands")
        held = await whole_at(STEP, {0, 1})
        assert held[0] != held[1]
        for node in running:
            kill_all(node)
        for node in running:
            end_of(node, -signal.SIGKILL)
    line = HolderLine(held[lost].name)
    os.kill(line.pid, signal.SIGKILL)
    line.close()
    assert_no_socket(held[lost].name)
    with nodes(launcher, program) as running:
        text = "\n".join([await asyncio.to_thread(end_of, node) for node in running])
    assert f"resumed step {STEP} from the memory of rank {sources}\n" in text, text
    check_bits(launcher, program, text)
    assert not find_holders()
