"""A run over several nodes that is killed as a whole goes on in the memory that each node's process holds."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.cluster.etcd_server import free_ports
from support.jobs.held_runs import (
    GATE,
    GATED,
    HOLDER,
    OPTIONS,
    PATIENT,
    STEPS,
    kill_all,
    last_committed,
    open_gate,
    saved_in,
    started,
    undisturbed,
    weights_of,
)
from support.processes.launcher import Running
from support.processes.polling import wait_until
from support.processes.stopping import stop

from zbmd.actors.snapshots.client import HolderAddress, drop, find_holders, look
from zbmd.training.checkpoint.index import SHARDS_NAME
from zbmd.training.checkpoint.sharded import open_state, read_names
from zbmd.transport.errors import UserError

if TYPE_CHECKING:
    from support.processes.launcher import Launcher


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
            options = ("run", *PATIENT, "--nnodes", "2", *number, "--rdzv-endpoint", endpoint, "-n", "1")
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


def has_committed(run: Path, step: int) -> bool:
    with suppress(UserError, IndexError):
        return last_committed(run) >= step
    return False


@pytest.mark.parametrize(
    ("more", "numbered"), [((), True), (("--zero", "1"), False)], ids=["replicas", "sharded"]
)
def test_all_nodes_are_killed_at_once_and_the_next_run_has_the_same_bits(
    launcher: Launcher, run: Path, more: tuple[str, ...], numbered: bool
) -> None:
    """Without numbers, too: a node has that of the ranks whose memory is there."""
    calm = undisturbed(launcher)
    try:
        with nodes(launcher, "--checkpoint-every", "0", *more, numbered=numbered) as running:
            running[0].until_holds(
                lambda: len(set(held().values())) == 2, "both nodes have a snapshot process"
            )
            running[0].until_holds(lambda: has_committed(run, 3), "three steps are committed")
            for node in running:
                kill_all(node)
            assert [node.end() for node in running] == [-signal.SIGKILL] * 2
        open_gate(run)
        committed = last_committed(run)
        assert committed < GATE and not (run / SHARDS_NAME).exists()
        with nodes(launcher, "--checkpoint-every", "0", *more, numbered=numbered) as running:
            assert [node.end() for node in running] == [0, 0], "\n".join(node.text for node in running)
        text = "\n".join(node.text for node in running)
        for rank in range(2):
            assert f"holds the memory of rank {rank} of this job: it goes on from there" in text
        first = int(re.findall(r"^step (\d+) loss", text, re.MULTILINE)[0])
        assert committed <= first <= committed + 2, text
        assert weights_of(text) == calm
        assert not held()
    finally:
        for address in held().values():
            drop(address.name)


EVERY = 10
FIRST, BETWEEN, BEYOND = 3, 19, 22
"""The gates: until the state is held, at the end of an interval, and after the checkpoint is handed over."""


def test_a_checkpoint_that_was_handed_over_becomes_whole_without_ranks_and_launchers(
    launcher: Launcher, run: Path
) -> None:
    """The nodes' processes find each other's parts."""
    calm, every = undisturbed(launcher), ("--checkpoint-every", str(EVERY))
    try:
        gates = (FIRST, BETWEEN, BEYOND)
        with nodes(launcher, *every, gates=gates) as running:
            running[0].until_holds(
                lambda: len(set(held().values())) == 2, "both nodes have a snapshot process"
            )
            open_gate(run, FIRST)
            running[0].until(rf"^step {BETWEEN - 1} loss")
            running[0].until_holds(lambda: saved_in(run) == EVERY, "the first checkpoint is written")
            holders = [pid for node in running for pid in node.processes()[HOLDER]]
            for pid in holders:
                stop(pid)
            open_gate(run, BETWEEN)
            running[0].until(rf"^step {BEYOND - 1} loss")
            for node in running:
                kill_all(node)
            assert [node.end() for node in running] == [-signal.SIGKILL] * 2
        assert saved_in(run) == EVERY and len(set(holders)) == 2
        for pid in holders:
            os.kill(pid, signal.SIGCONT)
        wait_until(lambda: saved_in(run) == 2 * EVERY)
        assert len(read_names(run).files) == 2
        with closing(open_state(run, plan=read_names(run).plan)) as saved:
            saved.verify()
        for address in set(held().values()):
            assert drop(address.name) == ""
        with nodes(launcher, "--resume", "run", gates=()) as running:
            assert [node.end() for node in running] == [0, 0], "\n".join(node.text for node in running)
        text = "\n".join(node.text for node in running)
        assert weights_of(text) == calm and f"step {2 * EVERY + 1} loss" in text, text
        assert saved_in(run) == STEPS and not [path for path in run.iterdir() if "-part-" in path.name]
    finally:
        for address in held().values():
            drop(address.name)
