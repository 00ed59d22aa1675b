"""PyTorch over zbmd on several hosts, whose ranks nobody supervises and which have no file in common."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator

import pytest
from programs import PROGRAMS
from support.netns.netns import Process, process, require_lab

from zbmd.tools.lab.hosts.netns import Lab

pytest.importorskip("torch", reason="PyTorch is not installed")

PROGRAM = str(PROGRAMS / "torch/several_hosts.py")
RANKS_PER_HOST = 2
PORT = "29500"  # of a host that nobody else is on
PATIENT = "ZBMD_RECOVERY_BUDGET=1min"
"""No host is lost here, and one that its machine lets wait for half a second is none that is."""


@pytest.fixture
def lab() -> Generator[Lab]:
    require_lab()
    with Lab(2) as lab:
        yield lab


@contextlib.contextmanager
def ranks(lab: Lab, *arguments: str) -> Generator[list[Process]]:
    """Start two ranks on each host, as a launcher does that sets PyTorch's variables alone."""
    size = RANKS_PER_HOST * len(lab.hosts)
    meeting = (f"MASTER_ADDR={lab.hosts[0].address}", f"MASTER_PORT={PORT}", f"WORLD_SIZE={size}")
    with contextlib.ExitStack() as stack:
        started: list[Process] = []
        for rank in range(size):
            own = (f"RANK={rank}", f"LOCAL_RANK={rank % RANKS_PER_HOST}", "OMP_NUM_THREADS=1", PATIENT)
            command = ("env", *meeting, *own, sys.executable, PROGRAM, *arguments)
            started.append(stack.enter_context(process(lab.hosts[rank // RANKS_PER_HOST], *command)))
        yield started


def test_ranks_of_several_hosts_attach_and_do_so_again(lab: Lab) -> None:
    """They have no cookie in common, and nobody but PyTorch's store to meet at."""
    with ranks(lab) as started:
        for rank, each in enumerate(started):
            for _ in range(2):
                each.until(rf"rank {rank} of {len(started)} is done")
        assert [each.end() for each in started] == [0] * len(started)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_death_on_one_host_is_heard_of_on_all(lab: Lab, victim: int) -> None:
    """Rank 0 serves the store, and has started the supervisor of the first host."""
    with ranks(lab, str(victim)) as started:
        for rank, each in enumerate(started):
            if rank != victim:
                each.until(rf"rank {rank} hears: MembersLost: peer rank{victim} lost")
        codes = [each.end() for each in started]
        assert codes == [-9 if rank == victim else 0 for rank in range(len(started))]
