"""Guards on two laboratory hosts, which have no file in common, under torchrun. Real processes and kills."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest
from programs import PROGRAMS
from support.jobs.guarded import GUARD, guards_of
from support.jobs.resilient_loops import check_as_undisturbed
from support.netns.netns import Process, process, require_lab

from zbmd.tools.lab.hosts.netns import Lab

pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.slow

HOSTS, RANKS_PER_HOST = 2, 2
PORT = "29500"  # of a host that nobody else is on
TIMEOUT_S = 240.0
TORCHRUN = ("torch.distributed.run", "--nnodes", str(HOSTS), "--nproc-per-node", str(RANKS_PER_HOST))


@pytest.fixture
def lab() -> Generator[Lab]:
    require_lab()
    with Lab(HOSTS) as lab:
        yield lab


@contextlib.contextmanager
def torchruns(
    lab: Lab,
    directory: Path,
    *script: str | Path,
    options: Sequence[str] = (),
    fault: str = "",
    budget: str = "",
) -> Generator[list[Process]]:
    """Start torchrun on each host, with guards. fault: of `ZBMD_FAULT`; budget: of a recovery."""
    with contextlib.ExitStack() as stack:
        started: list[Process] = []
        for number, host in enumerate(lab.hosts):
            variables = ["OMP_NUM_THREADS=1", "ZBMD_ARENA=32MiB", f"ZBMD_COOKIE_FILE={directory}/{number}"]
            # Between hosts each run measures which order of sums is faster: two runs may have other bits.
            variables.append("ZBMD_ALGORITHM=all_reduce=ring")
            variables += [f"ZBMD_FAULT={fault}"] if fault else []
            variables += [f"ZBMD_RECOVERY_BUDGET={budget}"] if budget else []
            place = ("--node-rank", str(number), "--master-addr", lab.hosts[0].address, "--master-port", PORT)
            command = (sys.executable, "-m", *TORCHRUN, *place, *options, *GUARD, *map(str, script))
            one = process(host, "env", *variables, *command, timeout_s=TIMEOUT_S)
            started.append(stack.enter_context(one))
        yield started


def trained(lab: Lab, directory: Path, fault: str = "") -> list[str]:
    """Return what the ranks of a loop on all hosts say of their processes, steps and final states."""
    said: list[str] = []
    script = PROGRAMS / "training/guarded_ddp.py"
    # No host is lost, and one that its machine lets wait for half a second is none that is.
    with torchruns(lab, directory, script, fault=fault, budget="1min") as started:
        for each in started:
            for _ in range(RANKS_PER_HOST):
                while not said or not said[-1].startswith("ended"):
                    said.append(each.until(r"^\[rank\d\]: ((?:begun|step|final|ended).*)$")[1])
                said.append("")
        assert [each.end() for each in started] == [0] * HOSTS
    return said


def steps_of(said: Sequence[str]) -> list[str]:
    return [line for line in said if line.startswith(("step", "final"))]


def test_ranks_killed_on_either_host_are_replaced(lab: Lab, tmp_path: Path) -> None:
    """Rank 0 is on the first host, rank 3 on the second one, and nobody copies a cookie."""
    fault = "rank0:loop.prepared:3,rank3:loop.begin:6"
    wanted, said = trained(lab, tmp_path), trained(lab, tmp_path, fault)
    check_as_undisturbed(steps_of(said), steps_of(wanted), fault)
    for rank in range(HOSTS * RANKS_PER_HOST):
        begun, ended = (
            [line.partition(" is ")[2] for line in said if line.startswith(f"{what}: rank {rank}")]
            for what in ("begun", "ended")
        )
        assert len(begun) == 1 + (rank in (0, 3)) and ended == begun[-1:], said
    assert not list(tmp_path.iterdir()), "the cookie is in memory alone"


def test_a_host_whose_guards_are_killed_is_started_again_with_the_others(lab: Lab, tmp_path: Path) -> None:
    again = tmp_path / "again"
    script, options = (PROGRAMS / "torch/guarded.py", again), ("--max-restarts", "1")
    with torchruns(lab, tmp_path, *script, options=options) as started:
        for each in started:
            for _ in range(RANKS_PER_HOST):
                each.until(r"rank \d of 4 waits")
        again.touch()
        os.kill(guards_of(started[1].process.pid)[0], signal.SIGKILL)
        for each in started:
            for _ in range(RANKS_PER_HOST):
                each.until(r"rank \d of 4 is good")
        assert [each.end() for each in started] == [0] * HOSTS
