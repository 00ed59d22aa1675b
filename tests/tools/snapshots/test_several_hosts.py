"""A run over several nodes that is killed as a whole goes on in the memory that each node's process holds."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.cluster.etcd_server import free_ports
from support.jobs.held_runs import (
    GATE,
    GATED,
    OPTIONS,
    STEPS,
    kill_all,
    last_committed,
    open_gate,
    started,
    undisturbed,
    weights_of,
)
from support.processes.launcher import Running

from zbmd.actors.snapshots.client import HolderAddress, drop, find_holders, look
from zbmd.training.checkpoint.index import SHARDS_NAME
from zbmd.training.checkpoint.sharded import read_names
from zbmd.transport.errors import UserError

if TYPE_CHECKING:
    from support.processes.launcher import Launcher


STEP_S = 2.0
"""Seconds that ranks stand at a gate, at most."""


@contextmanager
def nodes(
    launcher: Launcher, *more: str, gates: tuple[int, ...] = (GATE,), numbered: bool = True
) -> Generator[list[Running]]:
    """Two nodes of one run, each with one rank."""
    endpoint = f"127.0.0.1:{free_ports(1)[0]}"
    with ExitStack() as stack:
        running = list[Running]()
        for node in range(2):
            number = ("--node-rank", str(node)) if numbered else ()
            options = ("run", "--nnodes", "2", *number, "--rdzv-endpoint", endpoint, "-n", "1")
            words = (*options, *GATED, "train", *OPTIONS, "--out", "run", *more)
            running.append(stack.enter_context(started(launcher, *words, gates=gates)))
        yield running


def held() -> dict[int, HolderAddress]:
    """The processes that hold something, by the rank whose memory that is."""
    found = dict[int, HolderAddress]()
    for address in find_holders():
        with suppress(UserError):
            if (has := look(address.name)) is not None:
                found |= dict.fromkeys(has.memory, address)
                has.close()
    return found


@pytest.mark.parametrize("more", [(), ("--zero", "1")], ids=["replicas", "sharded"])
def test_all_nodes_are_killed_at_once_and_the_next_run_has_the_same_bits(
    launcher: Launcher, run: Path, more: tuple[str, ...]
) -> None:
    calm = undisturbed(launcher)
    try:
        with nodes(launcher, "--checkpoint-every", "0", *more) as running:
            running[0].until(r"^step 3 loss")
            running[0].until_holds(
                lambda: len(set(held().values())) == 2, "both nodes have a snapshot process"
            )
            for node in running:
                kill_all(node)
            assert [node.end() for node in running] == [-signal.SIGKILL] * 2
        open_gate(run)
        committed = last_committed(run)
        assert committed < GATE and not (run / SHARDS_NAME).exists()
        with nodes(launcher, "--checkpoint-every", "0", *more) as running:
            assert [node.end() for node in running] == [0, 0], "\n".join(node.text for node in running)
        for rank, node in enumerate(running):
            assert f"holds the memory of rank {rank} of this job: it goes on from there" in node.text
        text = running[0].text
        first = int(re.findall(r"^step (\d+) loss", text, re.MULTILINE)[0])
        assert committed <= first <= committed + 2, text
        assert weights_of(text) == calm
        assert not held()
    finally:
        for address in held().values():
            drop(address.name)


def test_each_nodes_process_writes_the_shards_of_its_ranks(launcher: Launcher, run: Path) -> None:
    """Without numbers, too: a node has that of the ranks whose memory is there.

    Ranks publish in a later step what the processes have written: so there is a step now and then.
    """
    calm, gates = undisturbed(launcher), tuple(range(GATE, STEPS - 1))
    opened, next_s = list[int](), time.monotonic()

    def are_saved() -> bool:
        nonlocal next_s
        if (run / SHARDS_NAME).exists() and len(set(held().values())) == 2:
            return True
        if len(opened) < len(gates) and time.monotonic() > next_s:
            opened.append(gates[len(opened)])
            open_gate(run, opened[-1])
            next_s = time.monotonic() + STEP_S
        return False

    try:
        with nodes(launcher, "--checkpoint-every", "5", gates=gates, numbered=False) as running:
            running[0].until_holds(are_saved, "both nodes' processes have written a checkpoint")
            for node in running:
                kill_all(node)
        assert len(read_names(run).files) == 2 and last_committed(run) < gates[-1]
        with nodes(launcher, "--checkpoint-every", "5", gates=(), numbered=False) as running:
            assert [node.end() for node in running] == [0, 0], "\n".join(node.text for node in running)
        assert weights_of("\n".join(node.text for node in running)) == calm
        assert read_names(run).version == STEPS
    finally:
        for address in held().values():
            drop(address.name)
